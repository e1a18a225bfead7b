"""The attach plane in the two sessions: the lease lasts as long as something is read in place."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.ids import BlockId
from services.kv.attached import PoolBases
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer import receiver as rx
from services.transfer import sender as tx
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.values import FinalArgs, FinalBlocks, OpenArgs, Peer, ReadyArgs
from tests.support.transfer_policies import BLOCK_BYTES, RECEIVER_POLICY, SENDER_POLICY

A = Peer(b"a\0" + bytes(8), b"a\0" + bytes(8) + b"m1234")
BLOCKS = [BlockId(4), BlockId(5)]
NONE_HAD = (False, False)


def _ready() -> ReadyArgs:
    gens = np.array([2, 4], np.uint64)
    return ReadyArgs(0, gens, np.zeros((2, 3), np.uint64), np.array([7, 9], np.uint32))


def _final(tail: int = 5) -> FinalArgs:
    return FinalArgs((FirstTokenInfo(0, 9),), 32 + tail, 2, tail, 11, 6, 77, 5)


def _pulling(tail: int = 5, plane: str = "attach") -> rx.ReceiverTransfer:
    machine = rx.ReceiverTransfer(32 + tail, NONE_HAD, RECEIVER_POLICY, 0.0)
    machine.start()
    machine.on_connected(plane, 0.1)
    machine.on_opened(0.2)
    machine.reserve((BlockId(1), BlockId(2)), BlockId(3) if tail else None, 0.3)
    return machine


def _attached(tail: int = 5) -> rx.ReceiverTransfer:
    machine = _pulling(tail)
    machine.on_ready(_ready(), 0.4)
    machine.on_final(_final(tail), 0.5)
    pulls = machine.take_pulls(8)
    assert [pull.in_place for pull in pulls] == [True, True, False][: len(pulls)]
    actions = machine.on_attached((0, 1), 0.6)
    if tail:
        assert actions == []
        actions = machine.on_good_blocks((2,), 0.7)
    assert [type(a) for a in actions] == [rx.Deliver], "no DONE: the blocks are read"
    machine.check_integrity()
    return machine


def test_full_blocks_are_read_in_place_and_the_tail_is_copied() -> None:
    machine = _attached()
    assert machine.state is rx.ReceiverState.ATTACHED
    assert machine.in_place.indexes == [0, 1]
    assert machine.blocks_moved == 1
    assert machine.sources_of([0, 1]) == ([7, 9], [2, 4])


def test_done_comes_with_detach() -> None:
    machine = _attached()
    actions = machine.detach(True, 5.0)
    assert actions == [rx.SendDone(77, BLOCK_BYTES)]
    assert machine.state is rx.ReceiverState.DONE
    assert machine.on_closed() == [rx.Forget()]
    assert machine.detach(True, 5.1) == []


def test_a_prompt_without_a_full_block_is_done_at_once() -> None:
    machine = rx.ReceiverTransfer(5, (), RECEIVER_POLICY, 0.0)
    machine.on_connected("attach", 0.1)
    machine.on_opened(0.2)
    machine.reserve((), BlockId(3), 0.3)
    machine.on_final(FinalArgs((FirstTokenInfo(0, 9),), 5, 0, 5, 11, 6, 77, 5), 0.5)
    assert [pull.in_place for pull in machine.take_pulls(8)] == [False]
    assert [type(a) for a in machine.on_good_blocks((0,), 0.6)] == [rx.Deliver, rx.SendDone]


def test_changed_blocks_end_as_aborted_not_as_done() -> None:
    machine = _attached()
    [abort] = machine.detach(False, 5.0)
    assert isinstance(abort, rx.SendAbort)
    assert machine.on_closed() == [rx.Forget()]


def test_an_abort_is_answered_only_when_nothing_is_read_any_more() -> None:
    """RB-011: what is acknowledged as aborted must be quiescent."""
    machine = _attached()
    for _ in range(2):
        assert [type(a) for a in machine.on_abort("worker stops")] == [rx.MoveIn]
    assert machine.detach(True, 5.0) == [rx.SendAborted(), rx.Forget()]


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_lost_owner_makes_us_move_and_is_told_nothing(is_dead: bool) -> None:
    """RB-032: the mapping outlives its owner, so nothing has to be read from anyone else."""
    machine = _attached()
    assert [type(a) for a in machine.on_peer_lost(is_dead, 1.0)] == [rx.MoveIn]
    assert machine.state is rx.ReceiverState.ATTACHED
    assert machine.detach(True, 5.0) == [rx.Forget()]


def test_a_lost_lease_makes_us_move() -> None:
    machine = _attached()
    assert machine.on_renewed(True, 1.0) == []
    assert [type(a) for a in machine.on_renewed(False, 1.0)] == [rx.MoveIn]
    assert machine.detach(False, 5.0) == [rx.Forget()]


def test_blocks_are_not_held_for_ever() -> None:
    machine = _attached()
    due = 0.7 + RECEIVER_POLICY.attach_max_s
    assert machine.next_deadline() == due
    assert machine.on_time(due - 0.1) == []
    assert [type(a) for a in machine.on_time(due)] == [rx.MoveIn]
    assert machine.next_deadline() == due + RECEIVER_POLICY.attach_max_s


def test_the_engines_cancel_waits_for_detach() -> None:
    machine = _attached()
    assert machine.cancel("client left", 1.0) == []
    assert [type(a) for a in machine.detach(True, 1.1)] == [rx.SendDone]


def test_an_owner_short_of_memory_is_copied_from() -> None:
    machine = _pulling(0)
    assert machine.on_drain() == []
    machine.on_ready(_ready(), 0.4)
    machine.on_final(_final(0), 0.5)
    assert [pull.in_place for pull in machine.take_pulls(8)] == [False, False]
    actions = machine.on_good_blocks((0, 1), 0.6)
    assert [type(a) for a in actions] == [rx.Deliver, rx.SendDone]


def test_an_owner_that_asks_half_way_gets_a_move_right_after() -> None:
    machine = _pulling(0)
    machine.on_ready(_ready(), 0.4)
    assert [pull.index for pull in machine.take_pulls(1)] == [0]
    machine.on_attached((0,), 0.5)
    machine.on_drain()
    assert [pull.in_place for pull in machine.take_pulls(1)] == [False]
    machine.on_good_blocks((1,), 0.6)
    actions = machine.on_final(_final(0), 0.7)
    assert [type(a) for a in actions] == [rx.WorkReady, rx.Deliver, rx.MoveIn]
    assert machine.in_place.indexes == [0]


def test_an_owner_that_died_while_we_verified_is_moved_from_at_once() -> None:
    machine = _pulling(0)
    machine.on_ready(_ready(), 0.4)
    machine.on_final(_final(0), 0.5)
    assert machine.on_peer_lost(True, 0.55) == [rx.WorkReady()]
    machine.take_pulls(8)
    actions = machine.on_attached((0, 1), 0.6)
    assert [type(a) for a in actions] == [rx.Deliver, rx.MoveIn]


def test_a_block_that_is_wrong_in_place_is_asked_for_again() -> None:
    machine = _pulling(0)
    machine.on_ready(_ready(), 0.4)
    machine.take_pulls(8)
    machine.on_attached((0,), 0.5)
    assert machine.on_block(1, False, 0.5, "generation")[0] == rx.SendNack(
        (1,), False, "generation"
    )
    machine.on_ready(_ready(), 0.6)
    assert [pull.index for pull in machine.take_pulls(8)] == [1]


@pytest.mark.parametrize("plane", ["zmq", "memfd"])
def test_blocks_out_of_reach_on_another_plane_have_to_come_after_all(plane: str) -> None:
    machine = _pulling(0)
    machine.on_ready(_ready(), 0.4)
    machine.take_pulls(8)
    machine.on_attached((0,), 0.5)
    assert machine.on_plane_lost("unmapped", 0.6) == [rx.Connect()]
    assert machine.on_connected(plane, 0.7) == [rx.SendOpen(NONE_HAD)]
    machine.on_opened(0.8)
    machine.on_final(_final(0), 0.9)
    machine.on_ready(_ready(), 0.9)
    assert machine.in_place.indexes == []
    assert machine.on_good_blocks((0,), 1.0) == []
    assert [type(a) for a in machine.on_good_blocks((1,), 1.0)] == [rx.Deliver, rx.SendDone]
    machine.check_integrity()


def test_the_same_plane_over_another_connection_keeps_what_was_verified_in_place() -> None:
    machine = _pulling(0)
    machine.on_ready(_ready(), 0.4)
    machine.take_pulls(8)
    machine.on_attached((0,), 0.5)
    assert machine.on_peer_lost(False, 0.6) == [rx.Connect()]
    assert machine.on_connected("attach", 0.7) == [rx.SendOpen((True, False))]
    assert machine.in_place.indexes == [0]
    machine.check_integrity()


# ---- sender -----------------------------------------------------------------------------------


def _opened(plane: str = "attach") -> tx.SenderTransfer:
    sender = tx.SenderTransfer(1, 2, False, SENDER_POLICY, now=0.0)
    sender.on_sealed(0, BLOCKS)
    sender.on_open(A, OpenArgs(1, NONE_HAD, plane), 1.0)
    return sender


def _finish(sender: tx.SenderTransfer) -> None:
    info = FinalInfo((FirstTokenInfo(0, 9),), 32, None, 0, 5)
    sender.on_prefill_finished(FinalBlocks(info, 0, 0))


def test_blocks_stay_lent_while_the_lease_is_renewed() -> None:
    sender = _opened()
    _finish(sender)
    for now in range(5, 300, 5):
        assert sender.on_renew(A.base, float(now))
        assert sender.on_time(float(now)) == []
    actions = sender.on_done(A, 1, 0, 301.0)
    assert actions == [tx.SendClosed(A, 1), tx.Release("done", "done")]
    assert (sender.blocks_moved, sender.bytes_moved) == (0, 0)


def test_a_reader_that_went_silent_loses_its_blocks_with_its_lease() -> None:
    sender = _opened()
    _finish(sender)
    actions = sender.on_time(1.0 + SENDER_POLICY.lease_s)
    assert tx.Release("peer_lost", "lease ran out") in actions


def test_an_abort_waits_for_the_reader_but_not_longer_than_its_lease() -> None:
    sender = _opened()
    _finish(sender)
    assert sender.cancel("client left", 2.0) == [tx.SendAbort(A, 1, "client left")]
    assert sender.on_aborted(A, 1, 2.5) == [tx.Release("aborted", "client left")]


def test_memory_pressure_asks_the_reader_to_move() -> None:
    sender = _opened()
    _finish(sender)
    assert sender.unpin() == [tx.SendDrain(A, 1)]


def test_asked_before_it_was_opened_and_told_when_it_is() -> None:
    sender = tx.SenderTransfer(1, 2, False, SENDER_POLICY, now=0.0)
    assert sender.ask_back() == []
    actions = sender.on_open(A, OpenArgs(1, NONE_HAD, "attach"), 1.0)
    assert tx.SendDrain(A, 1) in actions
    assert tx.SendDrain(A, 1) not in _opened("memfd").ask_back()


def test_what_readers_in_place_hold_is_counted() -> None:
    sender = _opened()
    assert sender.num_attached == 2
    assert _opened("memfd").num_attached == 0
    _finish(sender)
    sender.on_done(A, 1, 0, 2.0)
    assert sender.num_attached == 0


# ---- numbers of pools -------------------------------------------------------------------------


def _pools(count: int) -> list[KvPoolMemory]:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8)
    return [KvPoolMemory.create(layout, 1, kind="anonymous") for _ in range(count)]


def test_seven_pools_have_numbers_and_an_eighth_has_none() -> None:
    bases, pools = PoolBases(), _pools(8)
    assert [bases.hold(pool) for pool in pools] == [1, 2, 3, 4, 5, 6, 7, None]
    assert bases.hold(pools[2]) == 3
    bases.drop(3)
    assert bases.hold(pools[7]) is None, "somebody still holds the third"
    bases.drop(3)
    assert bases.hold(pools[7]) == 3
    assert bases.num_held() == 7
    bases.drop(1)
    with pytest.raises(ValueError, match="not held"):
        bases.drop(1)
