"""When a prompt's blocks are announced one chunk after the other, and when all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.ids import BlockId
from services.transfer import sender as tx
from services.transfer.announce import (
    ASKED_AGAIN,
    MAX_EXPOSED_S,
    MIN_SAMPLES,
    NOTHING_LEFT,
    REASONS,
    AnnouncePlan,
    CostMeter,
    Costs,
    Mean,
    Pending,
    plan_announcements,
)
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.values import FinalBlocks, OpenArgs, Peer
from tests.support.transfer_policies import SENDER_POLICY

BLOCK = 1 << 20
COSTS = st.builds(
    Costs,
    announce_s=st.floats(1e-6, 1e-2),
    copy_s_per_byte=st.floats(1e-12, 1e-8),
    chunk_blocks=st.floats(0.5, 64),
)
SIZES = st.integers(1, 4096)


def _pending(num_blocks: int, num_sealed: int) -> Pending:
    return Pending(num_blocks, min(num_sealed, num_blocks), BLOCK)


@given(COSTS, SIZES, SIZES)
def test_never_a_single_shot_where_more_would_be_hidden_than_is_saved(
    costs: Costs, num_blocks: int, num_sealed: int
) -> None:
    plan = plan_announcements(_pending(num_blocks, num_sealed), costs)
    assert plan.reason in REASONS
    assert plan.is_single_shot == (plan.reason == "costs_more")
    if plan.is_single_shot:
        assert plan.hidden_s <= plan.cost_s * (1 + 1e-9)
        assert plan.hidden_s <= MAX_EXPOSED_S


@given(COSTS, SIZES, SIZES, SIZES)
def test_a_shorter_prompt_is_sent_whole_if_a_longer_one_is(
    costs: Costs, num_blocks: int, shorter: int, num_sealed: int
) -> None:
    """Monotone in the prompt's length, all else being equal."""
    shorter, num_blocks = sorted((shorter, num_blocks))
    num_sealed = min(num_sealed, shorter)
    if plan_announcements(_pending(num_blocks, num_sealed), costs).is_single_shot:
        assert plan_announcements(_pending(shorter, num_sealed), costs).is_single_shot


@given(COSTS, SIZES, SIZES, st.floats(1.0, 100.0))
def test_dearer_announcements_and_cheaper_copies_only_speak_for_it(
    costs: Costs, num_blocks: int, num_sealed: int, factor: float
) -> None:
    assert costs.announce_s is not None
    assert costs.copy_s_per_byte is not None
    pending = _pending(num_blocks, num_sealed)
    if plan_announcements(pending, costs).is_single_shot:
        for other in (
            replace(costs, announce_s=costs.announce_s * factor),
            replace(costs, copy_s_per_byte=costs.copy_s_per_byte / factor),
        ):
            assert plan_announcements(pending, other).is_single_shot


@pytest.mark.parametrize("unknown", ["announce_s", "copy_s_per_byte", "chunk_blocks"])
def test_nothing_is_decided_by_what_is_not_known(unknown: str) -> None:
    costs = replace(Costs(1.0, 1e-12, 4.0), **{unknown: None})
    assert plan_announcements(Pending(4, 1, BLOCK), costs).reason == "costs_unknown"


def test_cases() -> None:
    """Announcing costs 0.3 ms and a block copies in 0.1 ms."""
    costs = Costs(3e-4, 1e-4 / BLOCK, 2.0)
    for num_blocks, num_sealed, reason in (
        (2, 2, "costs_more"),
        (6, 2, "costs_more"),
        (9, 2, "costs_more"),
        (64, 2, "copy_too_long"),
        (9, 4, "hides_more"),  # 4 were cached: the first announcement pays
    ):
        plan = plan_announcements(Pending(num_blocks, num_sealed, BLOCK), costs)
        assert plan.reason == reason, (num_blocks, num_sealed)
    slow = replace(costs, chunk_blocks=8.0)
    assert plan_announcements(Pending(24, 2, BLOCK), slow).reason == "hides_more"
    assert plan_announcements(Pending(10, 2, BLOCK), slow).is_single_shot, "one chunk is left"


# ---- learning -----------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e-3), min_size=MIN_SAMPLES, max_size=50))
def test_a_mean_lies_between_its_samples(samples: list[float]) -> None:
    mean = Mean()
    for number, sample in enumerate(samples):
        assert (mean.known() is None) == (number < MIN_SAMPLES)
        mean.add(sample)
    known = mean.known()
    assert known is not None
    assert min(samples) * 0.999 <= known <= max(samples) * 1.001


def test_a_thread_that_was_not_run_for_a_while_is_hardly_believed() -> None:
    mean = Mean()
    for _ in range(20):
        mean.add(1e-4)
    mean.add(1.0)
    assert mean.value < 2e-4


def test_a_meter_knows_a_plane_when_it_has_seen_both_sides() -> None:
    meter = CostMeter()
    for _ in range(MIN_SAMPLES):
        meter.plane("memfd").ready_s.add(1e-4)
        meter.plane("memfd").pulled_s.add(0.5e-4)
        meter.note_chunk(2)
        assert meter.costs("memfd").announce_s is None
        meter.note_done("memfd", 4, 8 * BLOCK, 8e-4, 6e-4)
    costs = meter.costs("memfd")
    assert costs.announce_s == pytest.approx(3e-4)
    assert costs.copy_s_per_byte == pytest.approx(1e-4 / BLOCK)
    assert costs.chunk_blocks == 2.0
    assert meter.costs("zmq").announce_s is None
    meter.note_done("memfd", 4, 8 * BLOCK, 1e9, 1e9)
    assert meter.costs("memfd") == costs, "nonsense of a peer is not taken"


# ---- the sender ---------------------------------------------------------------------------------

PEER = Peer(b"d", b"d0")
HOLD = AnnouncePlan(True, "costs_more")


def _sender(plan: AnnouncePlan, num_blocks: int = 3) -> tx.SenderTransfer:
    return tx.SenderTransfer(1, num_blocks, False, SENDER_POLICY, 0.0, lambda _plane, _p: plan)


def _open(num_blocks: int = 3, attempt: int = 1) -> OpenArgs:
    return OpenArgs(attempt=attempt, have=(False,) * num_blocks, plane="memfd")


def _final(num_tokens: int = 48) -> FinalBlocks:
    return FinalBlocks(FinalInfo((FirstTokenInfo(0, 1),), num_tokens, None, 0, 1))


def _ready(actions: list[tx.SenderAction]) -> list[tuple[int, int]]:
    return [(a.lo, a.hi) for a in actions if isinstance(a, tx.SendReady)]


def test_a_prompt_that_is_held_back_is_announced_before_its_end() -> None:
    sender = _sender(HOLD)
    assert sender.on_sealed(0, [BlockId(5)]) == []
    assert _ready(sender.on_open(PEER, _open(), 0.1)) == []
    assert sender.on_sealed(1, [BlockId(6)]) == []
    assert sender.on_sealed(2, [BlockId(7)]) == []
    assert not sender.is_single_shot, "it is not over yet"
    actions = sender.on_prefill_finished(_final())
    assert [type(a) for a in actions] == [tx.SendReady, tx.SendFinal, tx.DataReady]
    assert _ready(actions) == [(0, 3)]
    assert sender.is_single_shot
    assert sender.num_announcements == 1


def test_a_reader_that_asks_again_is_told_what_there_is() -> None:
    """It asks when it has waited long: the plan was wrong, or its OPENED was lost."""
    sender = _sender(HOLD)
    sender.on_sealed(0, [BlockId(5)])
    sender.on_open(PEER, _open(), 0.1)
    assert _ready(sender.on_open(PEER, _open(), 3.0)) == [(0, 1)]
    assert sender.plan == ASKED_AGAIN
    assert _ready(sender.on_sealed(1, [BlockId(6)])) == [(1, 2)]
    sender.on_sealed(2, [BlockId(7)])
    sender.on_prefill_finished(_final())
    assert not sender.is_single_shot


def test_the_next_owner_gets_a_plan_of_its_own() -> None:
    plans = iter([HOLD, AnnouncePlan(False, "hides_more")])
    sender = tx.SenderTransfer(1, 3, False, SENDER_POLICY, 0.0, lambda _plane, _p: next(plans))
    sender.on_sealed(0, [BlockId(5)])
    assert _ready(sender.on_open(PEER, _open(), 0.1)) == []
    other = Peer(b"e", b"e0")
    assert _ready(sender.on_open(other, _open(attempt=2), 0.2)) == [(0, 1)]
    assert _ready(sender.on_sealed(1, [BlockId(6)])) == [(1, 2)]


def test_a_prefill_that_was_over_before_anyone_asked_needs_no_plan() -> None:
    sender = _sender(AnnouncePlan(False, "hides_more"))
    sender.on_sealed(0, [BlockId(5), BlockId(6), BlockId(7)])
    sender.on_prefill_finished(_final())
    assert _ready(sender.on_open(PEER, _open(), 0.1)) == [(0, 3)]
    assert sender.plan == NOTHING_LEFT
    assert sender.is_single_shot


def test_streaming_announces_every_chunk_once() -> None:
    sender = _sender(AnnouncePlan(False, "hides_more"))
    sender.on_sealed(0, [BlockId(5)])
    assert _ready(sender.on_open(PEER, _open(), 0.1)) == [(0, 1)]
    assert _ready(sender.on_sealed(1, [BlockId(6)])) == [(1, 2)]
    assert _ready(sender.on_sealed(2, [BlockId(7)])) == [(2, 3)]
    assert _ready(sender.on_prefill_finished(_final())) == []
    assert sender.num_announcements == 3
    assert not sender.is_single_shot
