"""Sender and receiver, event by event; their interleavings are the transfer simulator's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.ids import BlockId
from services.transfer import receiver as rx
from services.transfer import sender as tx
from services.transfer.values import FinalArgs, OpenArgs, Peer, ReadyArgs, RejectCode
from tests.support.transfer_policies import BLOCK_BYTES, RECEIVER_POLICY, SENDER_POLICY

# ---- sender -----------------------------------------------------------------------------------

BLOCKS = [BlockId(4), BlockId(5)]
A = Peer(b"a\0" + bytes(8), b"a\0" + bytes(8) + b"m1234")
B = Peer(b"b\0" + bytes(8), b"b\0" + bytes(8) + b"m1234")


def _sender(num_blocks: int = 2, has_tail: bool = False) -> tx.SenderTransfer:
    return tx.SenderTransfer(1, num_blocks, has_tail, SENDER_POLICY, now=0.0)


def _open(attempt: int = 1, num_blocks: int = 2, plane: str = "zmq") -> OpenArgs:
    return OpenArgs(attempt, (False,) * num_blocks, plane)


def test_ticket_expires_without_open() -> None:
    sender = _sender()
    assert sender.on_time(4.9) == []
    assert sender.on_time(5.0) == [tx.Release("expired", "no decode worker opened the ticket")]
    [reject] = sender.on_open(A, _open(), 5.1)
    assert isinstance(reject, tx.SendReject)
    assert reject.code is RejectCode.EXPIRED


def test_lease_runs_out_without_renewal_and_holds_with_it() -> None:
    sender = _sender()
    sender.on_open(A, _open(), 1.0)
    assert sender.on_renew(A.base, 9.0)
    assert sender.on_time(18.9) == []
    actions = sender.on_time(19.0)
    assert tx.Release("peer_lost", "lease ran out") in actions
    assert not sender.on_renew(A.base, 19.1)


def test_duplicate_open_is_replayed() -> None:
    sender = _sender()
    sender.on_sealed(0, BLOCKS)
    first = sender.on_open(A, _open(), 1.0)
    assert sender.on_open(A, _open(), 1.1) == first
    assert tx.SendReady(A, 1, 0, 2) in first


def test_equal_attempt_of_another_decode_is_busy() -> None:
    sender = _sender()
    sender.on_open(A, _open(), 1.0)
    [reject] = sender.on_open(B, _open(), 1.1)
    assert isinstance(reject, tx.SendReject)
    assert (reject.code, reject.retry_after_s) == (RejectCode.BUSY, SENDER_POLICY.lease_s)


def test_higher_attempt_fences_the_lower() -> None:
    sender = _sender()
    sender.on_open(A, _open(1), 1.0)
    actions = sender.on_open(B, _open(2), 1.1)
    assert actions[0] == tx.SendAbort(A, 1, "fenced by a higher attempt")
    assert sender.on_abort(A, 1, "late", 1.2) == [tx.SendAborted(A, 1)]
    assert sender.on_credit(A, 1, 10_000) == []
    assert sender.state is tx.SenderState.STREAMING
    [reject] = sender.on_open(A, _open(1), 1.3)
    assert isinstance(reject, tx.SendReject)
    assert reject.code is RejectCode.FENCED


def test_release_waits_for_data_that_is_still_read() -> None:
    sender = _sender()
    sender.on_sealed(0, BLOCKS)
    sender.on_open(A, _open(), 1.0)
    sender.on_credit(A, 1, BLOCK_BYTES)
    out = sender.take_data()
    assert out is not None
    assert (out.indexes, out.block_ids) == ((0,), (4,))
    assert sender.take_data() is None  # the credit is used up
    assert sender.cancel("client left", 1.1) == [tx.SendAbort(A, 1, "client left")]
    assert sender.on_data_left(1.2) == [tx.Release("aborted", "client left")]


def test_a_memfd_reader_must_say_that_it_stopped() -> None:
    sender = _sender()
    sender.on_open(A, _open(plane="memfd"), 1.0)
    assert sender.cancel("client left", 1.1) == [tx.SendAbort(A, 1, "client left")]
    assert sender.on_time(1.4) == [tx.SendAbort(A, 1, "client left")]  # repeated
    assert sender.on_aborted(A, 1, 1.5) == [tx.Release("aborted", "client left")]


def test_a_block_is_sent_again_at_most_twice() -> None:
    sender = _sender()
    sender.on_sealed(0, BLOCKS)
    sender.on_open(A, _open(), 1.0)
    sender.on_credit(A, 1, 100 * BLOCK_BYTES)
    sender.take_data()
    sender.on_data_left(1.0)
    for _ in range(2):
        assert sender.on_nack(A, 1, [0], False, 1.1) == [tx.DataReady(A)]
        again = sender.take_data()
        assert again is not None
        assert again.indexes == (0,)
        sender.on_data_left(1.2)
    actions = sender.on_nack(A, 1, [0], False, 1.3)
    assert [type(a) for a in actions] == [tx.SendAbort, tx.Release]


def test_done_before_final_is_no_success() -> None:
    sender = _sender()
    sender.on_open(A, _open(), 1.0)
    closed, release = sender.on_done(A, 1, 0, 1.1)
    assert closed == tx.SendClosed(A, 1)
    assert isinstance(release, tx.Release)
    assert release.outcome == "aborted"


def test_blocks_must_be_sealed_in_order() -> None:
    sender = _sender()
    with pytest.raises(ValueError, match="expected 0"):
        sender.on_sealed(1, BLOCKS)


# ---- receiver ---------------------------------------------------------------------------------


def _pulling(num_tokens: int = 32, plane: str = "zmq", start: float = 0.0) -> rx.ReceiverTransfer:
    have = (False,) * (num_tokens // 16)
    machine = rx.ReceiverTransfer(num_tokens, have, RECEIVER_POLICY, now=start)
    machine.on_connected(plane, start + 0.1)
    machine.on_opened(start + 0.2)
    machine.reserve([BlockId(10), BlockId(11)][: len(have)], None, start + 0.3)
    return machine


def _ready(lo: int, hi: int) -> ReadyArgs:
    count = hi - lo
    return ReadyArgs(
        lo=lo,
        gens=np.full(count, 2, np.uint64),
        digests=np.ones((count, 1), np.uint64),
        source_blocks=np.arange(lo, hi, dtype=np.uint32),
    )


def _final(num_tokens: int = 32) -> FinalArgs:
    return FinalArgs((), num_tokens, num_tokens // 16, num_tokens % 16, 0, 2, 1, 0)


def test_only_every_block_verified_and_final_is_success() -> None:
    """RB-029: anything short of DONE of all chunks is no success."""
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.4)
    assert machine.on_block(0, True, 0.5) == []
    assert machine.on_final(_final(), 0.6) == [rx.WorkReady()]
    actions = machine.on_block(1, True, 0.7)
    assert [type(a) for a in actions] == [rx.Deliver, rx.SendDone]


@pytest.mark.parametrize("code", [*RejectCode])
def test_every_reject_code_fails_closed(code: RejectCode) -> None:
    """RB-029: known or unknown, a refusal is a failure."""
    machine = _pulling()
    fail = machine.on_reject(code, 0.0, "detail")[0]
    assert isinstance(fail, rx.Fail)
    assert fail.can_recompute
    assert code.name in fail.message


def test_final_for_another_prompt_is_refused() -> None:
    machine = _pulling()
    actions = machine.on_final(_final(48), 0.4)
    assert [type(a) for a in actions] == [rx.SendAbort, rx.Fail]


def test_a_block_that_is_wrong_three_times_ends_the_receive() -> None:
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.4)
    for _ in range(2):
        assert rx.SendNack((0,), False, "digest") in machine.on_block(0, False, 0.5, "digest")
    actions = machine.on_block(0, False, 0.6, "digest")
    assert [type(a) for a in actions] == [rx.SendAbort, rx.Fail]
    assert machine.dest_of(1) is None


def test_credit_covers_announced_blocks_only() -> None:
    machine = _pulling()
    assert machine.credit_wanted() == 0
    machine.on_ready(_ready(0, 1), 0.4)
    assert machine.credit_wanted() == BLOCK_BYTES
    assert machine.grant(BLOCK_BYTES, 0.5) == [rx.SendCredit(BLOCK_BYTES)]
    assert (machine.credit_wanted(), machine.outstanding_bytes) == (0, BLOCK_BYTES)
    machine.account(1)
    machine.on_block(0, True, 0.6)
    assert (machine.credit_wanted(), machine.outstanding_bytes) == (0, 0)


def test_stalled_data_is_asked_for_twice_then_given_up() -> None:
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.4)
    now = 0.5
    for _ in range(2):
        machine.grant(2 * BLOCK_BYTES, now)
        now += RECEIVER_POLICY.stall_timeout_s
        actions = machine.on_time(now)
        assert rx.SendNack((0, 1), False, "no progress") in actions
    machine.grant(2 * BLOCK_BYTES, now)
    actions = machine.on_time(now + RECEIVER_POLICY.stall_timeout_s)
    assert [type(a) for a in actions] == [rx.SendAbort, rx.Fail]


@given(st.floats(0.0, 1e7), st.floats(0.0, 5.0), st.sampled_from(["zmq", "memfd"]))
def test_a_moment_that_has_come_is_not_asked_for_again(
    start: float, gap: float, plane: str
) -> None:
    """Found by the simulator: a difference of two floats is less than the sum said it would be."""
    machine = _pulling(plane=plane, start=start)
    machine.on_ready(_ready(0, 1), start + gap)
    for _ in range(10):
        due = machine.next_deadline()
        machine.on_time(due)
        if machine.state is not rx.ReceiverState.PULLING:
            return
        assert machine.next_deadline() > due


def test_a_busy_link_is_progress_but_not_for_ever() -> None:
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.0)
    machine.grant(2 * BLOCK_BYTES, 1.0)
    assert machine.on_time(4.0, link_progress_at=3.9) == []
    busy_until = 1.0 + RECEIVER_POLICY.window_s + RECEIVER_POLICY.stall_timeout_s
    assert machine.on_time(busy_until, link_progress_at=busy_until) != []


def test_mapped_pool_is_read_to_its_end_after_its_owner_died() -> None:
    machine = _pulling(plane="memfd")
    machine.on_ready(_ready(0, 2), 0.4)
    machine.on_final(_final(), 0.5)
    assert machine.on_peer_lost(True, 0.6) == [rx.WorkReady()]
    for pull in machine.take_pulls(8):
        actions = machine.on_block(pull.index, True, 0.7)
    assert [type(a) for a in actions] == [rx.Deliver, rx.Forget]


def test_memory_on_a_device_does_not_outlive_its_owner() -> None:
    machine = _pulling(plane="cuda_ipc")
    machine.on_ready(_ready(0, 2), 0.4)
    machine.on_final(_final(), 0.5)
    assert [type(a) for a in machine.on_peer_lost(True, 0.6)] == [rx.Fail, rx.Forget]


def test_a_dead_owner_before_final_fails_at_once() -> None:
    machine = _pulling(plane="memfd")
    machine.on_ready(_ready(0, 2), 0.4)
    actions = machine.on_peer_lost(True, 0.5)
    assert [type(a) for a in actions] == [rx.Fail, rx.Forget]


def test_a_broken_link_is_made_again_once_keeping_what_was_verified() -> None:
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.4)
    machine.grant(2 * BLOCK_BYTES, 0.4)
    machine.on_block(0, True, 0.5)
    assert machine.on_peer_lost(False, 0.6) == [rx.Connect()]
    assert machine.on_connected("zmq", 0.7) == [rx.SendOpen((True, False))]
    machine.on_opened(0.8)
    assert (machine.outstanding_bytes, machine.credit_wanted()) == (0, BLOCK_BYTES)
    assert [type(a) for a in machine.on_peer_lost(False, 0.9)] == [rx.Fail, rx.Forget]


def test_a_lost_plane_is_replaced_keeping_what_was_verified() -> None:
    """An aborted group costs the blocks that were in it, not the request."""
    machine = _pulling(plane="nccl")
    machine.on_ready(_ready(0, 2), 0.4)
    machine.grant(2 * BLOCK_BYTES, 0.4)
    machine.on_block(0, True, 0.5)
    assert machine.on_plane_lost("deadline", 0.6) == [rx.Connect()]
    assert machine.dest_of(1) is None  # a late batch has nowhere to go
    assert machine.on_connected("zmq", 0.7) == [rx.SendOpen((True, False))]
    machine.on_opened(0.8)
    assert machine.credit_wanted() == BLOCK_BYTES
    machine.check_integrity()


def test_a_cancel_between_two_planes_still_tells_the_peer() -> None:
    machine = _pulling(plane="nccl")
    machine.on_plane_lost("deadline", 0.6)
    assert [type(a) for a in machine.cancel("client left", 0.7)] == [rx.SendAbort, rx.Fail]


def test_a_plane_that_is_lost_again_and_again_ends_the_receive() -> None:
    machine = _pulling(plane="nccl")
    for _ in range(RECEIVER_POLICY.max_plane_losses):
        assert machine.on_plane_lost("deadline", 1.0) == [rx.Connect()]
        machine.on_connected("nccl", 1.1)
        machine.on_opened(1.2)
    actions = machine.on_plane_lost("deadline", 2.0)
    assert [type(a) for a in actions] == [rx.SendAbort, rx.Fail]


def test_another_plane_of_the_same_attempt_starts_the_stream_anew() -> None:
    sender = _sender()
    sender.on_sealed(0, BLOCKS)
    sender.on_open(A, _open(plane="nccl"), 1.0)
    sender.on_credit(A, 1, 2 * BLOCK_BYTES)
    assert sender.take_data() is not None
    sender.on_data_left(1.1)  # it is in a staging slot, and the group dies with it
    sender.on_open(A, OpenArgs(1, (True, False), "zmq"), 1.2)
    sender.on_credit(A, 1, BLOCK_BYTES)
    out = sender.take_data()
    assert out is not None
    assert (out.indexes, sender.plane) == ((1,), "zmq")


def test_an_offer_the_peer_took_back_fails() -> None:
    machine = _pulling()
    assert machine.on_renewed(True, 1.0) == []
    assert [type(a) for a in machine.on_renewed(False, 1.0)] == [rx.Fail, rx.Forget]


def test_cancel_by_the_worker_is_not_to_be_recomputed() -> None:
    machine = _pulling()
    abort, fail = machine.cancel("client left", 1.0)
    assert abort == rx.SendAbort("client left")
    assert fail == rx.Fail("cancelled", "client left", False)
    assert machine.cancel("again", 1.1) == []


def test_repeated_announcements_are_no_progress_of_stuck_data() -> None:
    """RB-009: found by the simulator: gaps on the link repeated READY and so hid the stall."""
    machine = _pulling()
    machine.on_ready(_ready(0, 2), 0.4)
    machine.grant(2 * BLOCK_BYTES, 0.5)
    for step in range(1, 10):
        machine.on_ready(_ready(0, 2), 0.5 + 0.2 * step)
    actions = machine.on_time(0.5 + RECEIVER_POLICY.stall_timeout_s)
    assert rx.SendNack((0, 1), False, "no progress") in actions


def test_gaps_in_a_row_repeat_one_open() -> None:
    """Found by the simulator: every gap used to bring three messages, each with its own chance."""
    machine = _pulling()
    assert machine.on_gap(0.4) == [rx.SendOpen((False, False))]
    assert machine.on_gap(0.5) == machine.on_gap(0.6) == []
    due = machine.next_deadline()
    assert due == pytest.approx(0.4 + RECEIVER_POLICY.open_retry_s)
    assert machine.on_time(due) == [rx.SendOpen((False, False))]
    assert machine.next_deadline() > due


def test_a_lost_nack_is_made_good_by_opening_again() -> None:
    """RB-009: found by the simulator: a mapped pool was waited for until the last limit."""
    machine = _pulling(plane="memfd")
    machine.on_ready(_ready(0, 2), 0.4)
    for pull in machine.take_pulls(8):
        machine.on_block(pull.index, pull.index != 1, 0.5, "generation")
    assert not machine.has_pulls()
    actions = machine.on_time(machine.next_deadline())
    assert actions == [rx.SendOpen((True, False))]
    machine.on_ready(_ready(0, 2), 3.0)
    assert [pull.index for pull in machine.take_pulls(8)] == [1]


def test_a_dead_owner_whose_blocks_were_not_all_announced_fails_at_once() -> None:
    """RB-010: found by the simulator: FINAL had come, one READY was lost with its owner."""
    machine = _pulling(plane="memfd")
    machine.on_ready(_ready(0, 1), 0.4)
    machine.on_final(_final(), 0.5)
    actions = machine.on_peer_lost(True, 0.6)
    assert [type(a) for a in actions] == [rx.Fail, rx.Forget]


def test_a_dead_owner_who_was_asked_for_a_block_again_fails_the_receive_at_once() -> None:
    """RB-010: found by the simulator (seed 1318): the refused block was waited for."""
    machine = _pulling(plane="memfd")
    machine.on_ready(_ready(0, 2), 0.4)
    machine.on_final(_final(), 0.5)
    for pull in machine.take_pulls(8):
        machine.on_block(pull.index, pull.index != 1, 0.6, "generation")
    actions = machine.on_peer_lost(True, 0.7)
    assert [type(a) for a in actions] == [rx.Fail, rx.Forget]
