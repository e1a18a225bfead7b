"""When the sender may give single blocks back before the transfer is over, and when not."""

from __future__ import annotations

import pytest

from services.common.ids import BlockId
from services.transfer import sender as tx
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.values import FinalBlocks, OpenArgs, Peer, RejectCode
from tests.support.transfer_policies import BLOCK_BYTES, SENDER_POLICY

A = Peer(b"a\0" + bytes(8), b"a\0" + bytes(8) + b"m1234")
B = Peer(b"b\0" + bytes(8), b"b\0" + bytes(8) + b"m1234")
BLOCKS = tuple(BlockId(i) for i in (4, 5, 6))
NONE_HAD = (False, False, False)


def _final() -> FinalBlocks:
    return FinalBlocks(FinalInfo((FirstTokenInfo(0, 9),), 48, None, 0, 5), 0, 0)


def _opened(plane: str) -> tx.SenderTransfer:
    sender = tx.SenderTransfer(1, 3, False, SENDER_POLICY, now=0.0)
    sender.on_sealed(0, list(BLOCKS))
    sender.on_open(A, OpenArgs(1, NONE_HAD, plane), 1.0)
    return sender


def _unpins(actions: list[tx.SenderAction]) -> list[BlockId]:
    return [b for action in actions if isinstance(action, tx.Unpin) for b in action.block_ids]


def test_pulled_blocks_go_back_once_asked_for_and_each_once() -> None:
    sender = _opened("memfd")
    sender.on_prefill_finished(_final())
    assert _unpins(sender.on_pulled(A, 1, 0, 1, 1.1)) == [], "nobody asked"
    assert _unpins(sender.unpin()) == [4]
    assert _unpins(sender.unpin()) == []
    assert _unpins(sender.on_pulled(A, 1, 0, 2, 1.2)) == [5]
    actions = sender.on_done(A, 1, 3 * BLOCK_BYTES, 1.3)
    assert _unpins(actions) == []
    assert tx.Release("done", "done") in actions
    sender.check_integrity()


def test_nothing_goes_back_while_prefill_runs() -> None:
    """The prompt's later chunks still attend to them."""
    sender = _opened("memfd")
    sender.unpin()
    assert _unpins(sender.on_pulled(A, 1, 0, 2, 1.1)) == []
    assert _unpins(sender.on_prefill_finished(_final())) == [4, 5]


def test_over_zmq_blocks_wait_for_every_message_that_is_still_read() -> None:
    """PULLED says that the peer has them; only the tracker says that ZMQ is done with them."""
    sender = _opened("zmq")
    sender.on_prefill_finished(_final())
    sender.on_credit(A, 1, 3 * BLOCK_BYTES)
    first, second = sender.take_data(), sender.take_data()
    assert first is not None
    assert second is not None
    sender.unpin()
    assert _unpins(sender.on_pulled(A, 1, 0, 2, 1.1)) == []
    assert _unpins(sender.on_data_left(1.2)) == []
    assert _unpins(sender.on_data_left(1.3)) == [4, 5]


def test_a_block_that_was_asked_for_again_and_then_came_is_not_sent_after_it_went_back() -> None:
    """RB-010: it may be another request's by then."""
    sender = _opened("zmq")
    sender.on_prefill_finished(_final())
    sender.on_credit(A, 1, 6 * BLOCK_BYTES)
    while sender.take_data() is not None:
        sender.on_data_left(1.1)
    sender.on_nack(A, 1, (0, 2), False, 1.2)
    sender.unpin()
    assert _unpins(sender.on_pulled(A, 1, 0, 1, 1.3)) == [4]
    again = sender.take_data()
    assert again is not None
    assert again.indexes == (2,)
    assert sender.take_data() is None


def test_what_went_back_is_not_sent_anew_on_another_connection() -> None:
    """RB-010: the stream began again, and word of what the first one brought came after that."""
    sender = _opened("zmq")
    sender.on_prefill_finished(_final())
    again = Peer(A.base, A.base + b"m5678")
    sender.on_open(again, OpenArgs(1, NONE_HAD, "zmq", 3 * BLOCK_BYTES), 1.2)
    sender.unpin()
    assert _unpins(sender.on_pulled(again, 1, 0, 2, 1.3)) == [4, 5]
    out = sender.take_data()
    assert out is not None
    assert out.indexes == (2,)
    assert sender.take_data() is None
    sender.check_integrity()


def test_pulled_of_a_fenced_attempt_counts_for_nothing() -> None:
    sender = _opened("memfd")
    sender.on_prefill_finished(_final())
    sender.on_pulled(A, 1, 0, 2, 1.1)
    sender.on_open(B, OpenArgs(2, NONE_HAD, "memfd"), 1.2)
    assert _unpins(sender.unpin()) == []
    assert _unpins(sender.on_pulled(A, 1, 0, 3, 1.3)) == []
    assert _unpins(sender.on_pulled(B, 2, 2, 3, 1.4)) == [6]


@pytest.mark.parametrize(("have", "is_taken"), [(NONE_HAD, False), ((True, False, False), True)])
def test_another_worker_may_only_follow_if_it_has_what_is_gone(
    have: tuple[bool, ...], is_taken: bool
) -> None:
    sender = _opened("memfd")
    sender.on_prefill_finished(_final())
    sender.unpin()
    assert _unpins(sender.on_pulled(A, 1, 0, 1, 1.1)) == [4]
    actions = sender.on_open(B, OpenArgs(2, have, "memfd"), 1.2)
    if is_taken:
        assert any(isinstance(action, tx.SendOpened) for action in actions)
    else:
        (reject,) = actions
        assert isinstance(reject, tx.SendReject)
        assert reject.code is RejectCode.EXPIRED


def test_a_refused_block_that_is_gone_ends_the_transfer() -> None:
    sender = _opened("memfd")
    sender.on_prefill_finished(_final())
    sender.unpin()
    sender.on_pulled(A, 1, 0, 1, 1.1)
    actions = sender.on_nack(A, 1, [0], False, 1.2)
    assert [type(action) for action in actions] == [tx.SendAbort]
    assert sender.state is tx.SenderState.ABORTING
