"""WorkerShell: what it takes, what it refuses, and that nothing it took is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.ids import BlockHash, BlockId, WorkerId
from services.common.token_rows import TOKEN_ROW
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CancelSource,
    ChoiceDone,
    EndReason,
    EngineLoad,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    Refused,
    TokenLogprobs,
    TokensOut,
    UnpinWanted,
    WorkKind,
)
from services.pb import worker_pb2
from services.pb.common_pb2 import SamplingParams
from services.transfer.api import (
    NO_STATS,
    FinalInfo,
    FirstTokenInfo,
    SinkReady,
    SinkReleased,
    SourceReleased,
    SourceUnpinned,
    TransferStats,
)
from services.worker.outputs import add_outputs
from services.worker.session import (
    MAX_PAUSE_S,
    MAX_UNACKED_TOKENS,
    RESUME_GRACE_S,
    DoneOut,
    TicketOut,
)
from tests.support.shell_rig import ShellRig, make_work

STATS = TransferStats("memfd", "p", size_bytes=64, blocks_moved=2)


@pytest.fixture
async def rig() -> ShellRig:
    return ShellRig().start()


async def test_takes_a_work_item_and_passes_its_tokens_on(rig: ShellRig) -> None:
    key = rig.work()
    tokens = TokensOut(key, 0, 0, (5,))
    done = ChoiceDone(key, 0, EndReason.STOP, all_choices=True)

    await rig.emit(tokens, done)

    assert [r.key for r in rig.engine.requests] == [key]
    assert rig.sent == [tokens, DoneOut(key, done, is_receiver=False, stats=None)]
    assert rig.shell.num_open() == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"expect_incarnation": 1}, "stale_incarnation"),
        ({"slot_gen": 9}, "stale_incarnation"),
        ({"block_hashes": b"x" * 32}, "hash_mismatch"),
        ({"tenant": "other"}, "hash_mismatch"),
        ({"token_ids": b""}, "empty_prompt"),
        ({"token_ids": b"abc"}, "invalid_argument"),
        ({"tokens": (1, 100)}, "token_out_of_range"),
        ({"max_tokens": 0}, "invalid_argument"),
        ({"n": 17}, "invalid_argument"),
        ({"kind": ""}, "invalid_argument"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "invalid_argument"),
        ({"sampling": SamplingParams(repetition_penalty=float("inf"))}, "invalid_argument"),
        ({"sampling": SamplingParams(top_p=-1.0)}, "invalid_argument"),
    ],
)
async def test_refuses_a_bad_work_item_and_holds_nothing(
    rig: ShellRig, fields: dict[str, Any], code: str
) -> None:
    rig.shell.slot_gens = lambda: (3, 2)
    key = rig.work(**fields)

    [refusal] = rig.sent
    assert isinstance(refusal, Refused)
    assert (refusal.key, refusal.code) == (key, code)
    assert rig.engine.requests == []
    assert rig.shell.num_open() == 0


async def test_work_for_the_previous_slot_generation_is_taken(rig: ShellRig) -> None:
    rig.shell.slot_gens = lambda: (3, 2)
    rig.work(slot_gen=2)
    assert len(rig.engine.requests) == 1


async def test_refuses_when_draining_and_when_full(rig: ShellRig) -> None:
    rig.engine.load_value = EngineLoad(requests_open=10_000)
    rig.work(request=1)
    rig.shell.begin_drain()
    rig.work(request=2)
    assert [i.code for i in rig.sent if isinstance(i, Refused)] == ["overloaded", "draining"]


async def test_engine_that_cannot_queue_is_a_refusal_not_a_lost_request(rig: ShellRig) -> None:
    rig.engine.refuses = True
    key = rig.work()
    assert rig.sent == [Refused(key, "overloaded", "too much work arrived within one step")]
    assert rig.shell.num_open() == 0


async def test_higher_attempt_cancels_the_lower_and_lower_is_fenced(rig: ShellRig) -> None:
    first = rig.work(attempt=1)
    rig.work(attempt=2)
    rig.work(attempt=1)
    assert rig.engine.cancelled == [first]
    [refusal] = [i for i in rig.sent if isinstance(i, Refused)]
    assert refusal.code == "fenced"


async def test_cancel_of_an_older_attempt_spares_the_newer(rig: ShellRig) -> None:
    rig.work(attempt=2)
    cancel = worker_pb2.Cancel(request=1, attempt=1)
    rig.shell.handle(rig.session, worker_pb2.RouterFrame(cancel=[cancel]))
    assert rig.engine.cancelled == []


async def test_cancel_in_the_frame_of_its_work_ends_it(rig: ShellRig) -> None:
    """RB-001: a client that left at once must not leave work behind that nobody wants."""
    frame = worker_pb2.RouterFrame(
        work=[make_work(attempt=1)], cancel=[worker_pb2.Cancel(request=1, attempt=1)]
    )
    rig.shell.handle(rig.session, frame)
    assert rig.engine.cancelled == [rig.engine.requests[0].key]


async def test_cancel_in_the_frame_of_a_newer_attempt_spares_it(rig: ShellRig) -> None:
    first = rig.work(attempt=1)
    frame = worker_pb2.RouterFrame(
        work=[make_work(attempt=2)], cancel=[worker_pb2.Cancel(request=1, attempt=1)]
    )
    rig.shell.handle(rig.session, frame)
    assert rig.engine.cancelled == [first]


async def test_cancel_reaches_an_item_that_was_handed_off(rig: ShellRig) -> None:
    """RB-001: the client left before decode took over; prefill still lends the blocks."""
    key = rig.work(kind="prefill")
    await rig.emit(ChoiceDone(key, 0, EndReason.STOP, all_choices=True, handed_off=True))
    cancel = worker_pb2.Cancel(request=1, attempt=0)
    rig.shell.handle(rig.session, worker_pb2.RouterFrame(cancel=[cancel]))
    assert rig.engine.cancelled == [key]


async def test_single_token_requests_are_not_handed_off(rig: ShellRig) -> None:
    """RB-071."""
    rig.work(kind="prefill", max_tokens=1)
    assert rig.engine.requests[0].kind is WorkKind.WHOLE


async def test_prefill_item_is_offered_streamed_and_released(rig: ShellRig) -> None:
    key = rig.work(kind="prefill")
    hashes = rig.engine.requests[0].block_hashes
    await rig.emit(
        OfferReady(key, "req-1", 39, hashes, ""),
        BlocksSealed(key, 0, (BlockId(4), BlockId(5))),
        PrefillFinished(key, (), 39, BlockId(6), 7, 100),
    )

    assert rig.sent == [TicketOut(key, b"ticket")]
    assert rig.source.sealed == [(key, 0)]
    assert rig.source.finished == [key]
    await rig.emit(UnpinWanted(key))
    assert rig.source.unpinned == [key]
    rig.source.emit(SourceUnpinned(key, (BlockId(4),)))
    assert (rig.engine.unpinned, rig.engine.released) == ([(key, (4,))], [])
    rig.source.emit(SourceReleased(key, "done", "", STATS))
    assert rig.engine.released == [key]


async def test_offer_that_fails_ends_the_item_and_gives_the_blocks_back(rig: ShellRig) -> None:
    """RB-001: nothing stays pinned for a transfer that never was."""
    rig.source.refuses = True
    key = rig.work(kind="prefill")
    await rig.emit(OfferReady(key, "req-1", 39, (), ""))
    assert rig.engine.cancelled == [key]

    await rig.emit(BlocksSealed(key, 0, (BlockId(4),)), CancelSource(key, "cancelled"))

    assert rig.source.sealed == []
    assert rig.source.cancelled == []
    assert rig.engine.released == [key]


async def test_continue_item_opens_reserves_and_runs(rig: ShellRig) -> None:
    key = rig.work(kind="continue", attempt=3)
    await rig.emit(ReceiveWanted(key, (False, False)))
    await rig.emit(BlocksReserved(key, (BlockId(1), BlockId(2)), BlockId(3)))
    assert rig.sink.opened == [(key, b"t", 3)]
    assert rig.sink.reserved == [key]

    final = FinalInfo((FirstTokenInfo(0, 9),), 39, None, 7, 1)
    rig.sink.emit(SinkReady(key, final, STATS))
    done = ChoiceDone(key, 0, EndReason.STOP, all_choices=True)
    await rig.emit(done)

    assert rig.engine.received_keys == [key]
    assert rig.sent == [DoneOut(key, done, is_receiver=True, stats=STATS)]


async def test_failed_receive_is_recomputed_here_unless_it_was_cancelled(rig: ShellRig) -> None:
    key = rig.work(kind="continue")
    rig.sink.emit(SinkReleased(key, "handoff_failed", "peer lost", True, STATS))
    rig.sink.emit(SinkReleased(key, "cancelled", "", False, STATS))
    assert rig.engine.failed == [(key, "handoff_failed", True), (key, "cancelled", False)]


async def test_end_of_a_prompt_that_was_computed_again_says_so(rig: ShellRig) -> None:
    """It used to count as a handoff that went well."""
    key = rig.work(kind="continue")
    rig.sink.emit(SinkReleased(key, "incompatible", "planes", True, NO_STATS))
    done = ChoiceDone(key, 0, EndReason.STOP, all_choices=True)
    await rig.emit(done)
    (said,) = rig.sent
    assert said == DoneOut(key, done, is_receiver=True, stats=NO_STATS, was_recomputed=True)
    frame = worker_pb2.WorkerFrame()
    add_outputs(frame, [said], WorkerId("w"))
    assert frame.done[0].timing.recomputed


async def test_request_of_a_router_that_lags_is_paused_and_later_given_up(rig: ShellRig) -> None:
    """It used to be cancelled at once: a busy machine's router cost its requests."""
    key = rig.work()
    await rig.emit(TokensOut(key, 0, 0, tuple(range(MAX_UNACKED_TOKENS))))
    assert rig.engine.paused == []
    await rig.emit(TokensOut(key, 0, MAX_UNACKED_TOKENS, (1,)))
    await rig.emit(TokensOut(key, 0, MAX_UNACKED_TOKENS + 1, (2,)))  # of the step under way
    assert rig.engine.paused == [key]

    rig.clock.advance(MAX_PAUSE_S)
    rig.shell.sweep()
    assert rig.engine.cancelled == []
    rig.clock.advance(0.1)
    rig.shell.sweep()
    assert rig.engine.cancelled == [key]


@pytest.mark.parametrize("by_attach", [False, True])
async def test_paused_request_goes_on_once_its_router_has_caught_up(
    rig: ShellRig, by_attach: bool
) -> None:
    key = rig.work()
    await rig.emit(TokensOut(key, 0, 0, tuple(range(MAX_UNACKED_TOKENS + 1))))
    half = MAX_UNACKED_TOKENS // 2

    def acknowledge(index: int) -> None:
        if by_attach:
            rig.attach(r1=(index + 1,))
        else:
            ack = worker_pb2.Ack(request=1, choice=0, index=index)
            rig.shell.handle(rig.session, worker_pb2.RouterFrame(ack=[ack]))

    acknowledge(half - 1)
    assert rig.engine.paused == [key]
    acknowledge(half)
    assert rig.engine.paused == []
    rig.clock.advance(2 * MAX_PAUSE_S)
    rig.shell.sweep()
    assert rig.engine.cancelled == []


async def test_cut_link_is_resumed_with_what_was_missed(rig: ShellRig) -> None:
    key = rig.work()
    rig.shell.detach(rig.session, rig.send)
    await rig.emit(TokensOut(key, 0, 0, (5, 6)))
    assert rig.sent == []

    lost = rig.attach(r1=(1,), r9=(0,))

    assert lost == (9,)
    assert rig.sent == [TokensOut(key, 0, 1, (6,))]


async def test_request_of_a_router_that_stays_away_is_cancelled(rig: ShellRig) -> None:
    key = rig.work()
    rig.shell.detach(rig.session, rig.send)
    rig.clock.advance(RESUME_GRACE_S)
    rig.shell.sweep()
    assert rig.engine.cancelled == []
    rig.clock.advance(0.1)
    rig.shell.sweep()
    assert rig.engine.cancelled == [key]


async def test_encoded_frame_carries_ids_times_and_plane(rig: ShellRig) -> None:
    key = rig.work(kind="continue", request=4, attempt=2)
    done = ChoiceDone(key, 0, EndReason.LENGTH, all_choices=True, cached_tokens=16)
    frame = worker_pb2.WorkerFrame()
    add_outputs(
        frame, [TokensOut(key, 1, 3, (7, 8)), DoneOut(key, done, True, STATS)], WorkerId("w")
    )

    [tokens] = frame.tokens
    assert (tokens.request, tokens.attempt, tokens.choice) == (4, 2, 1)
    assert (tokens.first_index, tokens.token_ids) == (3, b"\x07\0\0\0\x08\0\0\0")
    [end] = frame.done
    assert (end.cached_tokens, end.timing.handoff_bytes, end.timing.decode_worker) == (16, 64, "w")


async def test_tokens_that_need_no_message_go_as_rows_to_routers_that_read_them(
    rig: ShellRig,
) -> None:
    key = rig.work(request=1 << 40, attempt=2)
    single, logprobs = TokensOut(key, 0, 3, (7,)), (TokenLogprobs(7, -0.5, ()),)
    others = [
        TokensOut(key, 0, 4, (8, 9)),
        TokensOut(key, 1, 3, (7,)),
        TokensOut(key, 0, 6, (7,), logprobs),
    ]
    frame, old = worker_pb2.WorkerFrame(), worker_pb2.WorkerFrame()
    add_outputs(frame, [single, *others, single], WorkerId("w"), with_rows=True)
    add_outputs(old, [single, *others], WorkerId("w"))

    row = (1 << 40, 2, 3, 7)
    assert list(TOKEN_ROW.iter_unpack(frame.rows)) == [row, row]
    assert [(t.choice, t.first_index) for t in frame.tokens] == [(0, 4), (1, 3), (0, 6)]
    assert not old.rows
    assert len(old.tokens) == 4


async def test_refusals_hold_no_path_and_no_hash(rig: ShellRig) -> None:
    rig.work(block_hashes=b"x" * 32)
    [refusal] = rig.sent
    assert isinstance(refusal, Refused)
    assert "/" not in refusal.message
    assert BlockHash(b"x" * 16).hex() not in refusal.message
