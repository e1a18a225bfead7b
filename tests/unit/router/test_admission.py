from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ERROR_TABLE
from services.registry.base import LoadReport
from services.registry.cost import Booked
from services.resilience.breaker import Outcome, outcome_of
from services.router.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    QUEUE,
    REFUSE,
    START,
    AdmissionConfig,
    DrainRate,
    Standing,
    TtftRatio,
    WaitMargin,
    Wish,
    admit,
    backlog_of,
    is_decode_full,
    least_gaps,
)
from services.router.policy import PolicyConfig
from tests.unit.router.test_policy import make_worker

CONFIG = AdmissionConfig()
POLICY = PolicyConfig()
IDLE = Standing(
    queue_wait_s=0, worker_wait_s=0, work_s=0.1, has_room=True, num_queued=0, fits_queue=True
)
BUSY = replace(IDLE, queue_wait_s=2.0, worker_wait_s=0.25, has_room=False, num_queued=20)
PATIENT = Wish(elapsed_s=0.0, left_s=600.0)

seconds = st.floats(0, 100)
wishes = st.builds(Wish, seconds, seconds, seconds, seconds)
standings = st.builds(
    Standing, seconds, seconds, seconds, st.booleans(), st.integers(0, 5), st.booleans(),
    seconds, seconds,
)  # fmt: skip


def test_with_room_and_nobody_before_it_a_request_starts() -> None:
    assert admit(PATIENT, IDLE, CONFIG).action == START


def test_without_room_it_waits() -> None:
    decision = admit(PATIENT, replace(IDLE, has_room=False), CONFIG)
    assert (decision.action, decision.reason) == (QUEUE, "no_room")


def test_with_others_before_it_it_waits_its_turn() -> None:
    decision = admit(PATIENT, replace(IDLE, num_queued=1), CONFIG)
    assert (decision.action, decision.reason) == (QUEUE, "behind_others")


def test_a_wait_that_breaks_the_slo_is_refused_with_the_time_until_it_does_not() -> None:
    decision = admit(replace(PATIENT, slo_ttft_s=2.0), BUSY, CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "ttft_slo")
    assert decision.retry_after_s == 2.25 - (2.0 * 0.8 - 0.1)
    assert decision.predicted_ttft_s == 2.35
    assert admit(replace(PATIENT, slo_ttft_s=3.0), BUSY, CONFIG).action == QUEUE


def test_what_has_passed_already_counts() -> None:
    decision = admit(replace(PATIENT, slo_ttft_s=3.0, elapsed_s=0.5), BUSY, CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "ttft_slo")


def test_a_wait_that_passes_the_deadline_is_refused_at_once() -> None:
    decision = admit(Wish(0.0, 2.0), BUSY, CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "deadline")
    assert admit(Wish(0.0, 3.0), BUSY, CONFIG).action == QUEUE


def test_a_full_queue_refuses() -> None:
    decision = admit(PATIENT, replace(BUSY, fits_queue=False), CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "queue_full")
    assert decision.retry_after_s == 1.125


def test_slow_tokens_are_refused_where_an_idle_worker_would_be_fast() -> None:
    wish = replace(PATIENT, slo_tpot_s=0.05)
    slow = replace(IDLE, gap_s=0.08, idle_gap_s=0.02)
    decision = admit(wish, slow, CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "tpot_slo")
    assert admit(wish, replace(slow, gap_s=0.04), CONFIG).action == START
    # No worker could ever do it: waiting elsewhere would not help this client.
    assert admit(wish, replace(slow, idle_gap_s=0.06), CONFIG).action == START


def test_one_in_the_queue_is_late_once_its_work_does_not_fit_the_slo() -> None:
    decision = admit(replace(PATIENT, slo_ttft_s=4.0), BUSY, CONFIG)
    assert decision.action == QUEUE
    assert decision.late_in_s == 4.0 - 0.1 - 0.25


@given(wishes, st.floats(0, 1000), st.floats(0, 1000))
def test_nobody_is_ever_refused_where_nothing_waits(
    wish: Wish, work_s: float, gap_s: float
) -> None:
    """A laptop with one user: whatever is asked for, it starts."""
    idle = replace(IDLE, work_s=work_s, gap_s=gap_s, idle_gap_s=gap_s)
    assert admit(wish, idle, CONFIG).action == START


@given(wishes, standings)
def test_decisions_hold_what_they_promise(wish: Wish, standing: Standing) -> None:
    decision = admit(wish, standing, CONFIG)
    if decision.action == START:
        assert standing.has_room
        assert standing.num_queued == 0
    elif decision.action == QUEUE:
        assert standing.fits_queue
        assert standing.wait_s <= max(wish.left_s - standing.work_s, CONFIG.short_wait_s)
        assert decision.late_in_s >= CONFIG.short_wait_s
    else:
        assert MIN_RETRY_AFTER_S <= decision.retry_after_s <= MAX_RETRY_AFTER_S
        assert standing.wait_s > CONFIG.short_wait_s or decision.reason in (
            "queue_full", "tpot_slo",
        )  # fmt: skip


@given(wishes, standings, st.floats(0, 10))
def test_less_waiting_never_turns_a_start_into_a_refusal(
    wish: Wish, standing: Standing, less_s: float
) -> None:
    shorter = replace(standing, queue_wait_s=max(0.0, standing.queue_wait_s - less_s))
    if admit(wish, standing, CONFIG).action != REFUSE:
        assert admit(wish, shorter, CONFIG).action != REFUSE


def test_refusals_say_nothing_of_workers() -> None:
    """RB-054: neither what the router refuses nor a worker's full queue opens a breaker."""
    assert ERROR_TABLE["overloaded"].grpc_status == "RESOURCE_EXHAUSTED"
    assert ERROR_TABLE["overloaded"].http_status == 429
    assert outcome_of("overloaded") is Outcome.NEUTRAL
    assert outcome_of("rate_limited") is Outcome.NEUTRAL


def test_a_worker_has_room_until_it_has_the_backlog_in_hand() -> None:
    def room(queued: int, rate: float, booked: int = 0, starting: int = 0) -> bool:
        load = LoadReport(queued_uncached_tokens=queued, rate_tok_s=rate)
        worker = make_worker("p0", load, booked=Booked(1, booked, 0))
        return backlog_of(worker, (worker,), 100, starting, POLICY, CONFIG).has_room

    assert room(2500, 10_000.0)
    assert not room(2501, 10_000.0)
    assert room(1024, 100.0)
    assert not room(1025, 100.0)
    assert not room(1000, 100.0, booked=25)
    assert not room(1000, 100.0, starting=25)


def test_a_backlog_is_in_seconds_of_the_worker_and_of_its_pool() -> None:
    fast = make_worker("p0", LoadReport(queued_uncached_tokens=500, rate_tok_s=1000.0))
    fresh = make_worker("p1", LoadReport())
    backlog = backlog_of(fast, (fast, fresh), 250, 200, POLICY, CONFIG)
    assert backlog.worker_s == 0.6
    assert backlog.work_s == 0.25
    assert backlog.pool_tok_s == 1000.0 + POLICY.default_rate_tok_s


def test_decode_is_full_when_sequences_wait_at_every_worker() -> None:
    full = make_worker("d0", LoadReport(waiting=9))
    assert is_decode_full((full,), CONFIG)
    assert not is_decode_full((full, make_worker("d1", LoadReport(waiting=8))), CONFIG)
    assert not is_decode_full((), CONFIG)


def test_the_gap_is_that_of_the_least_loaded_decode_worker() -> None:
    load = LoadReport(resident_tokens=1000, tbt_a_us=10_000.0, tbt_b_us=2.0)
    busy = make_worker("d0", load)
    busier = make_worker("d1", replace(load, resident_tokens=9000))
    assert least_gaps((busier, busy), 500, POLICY) == (0.013, 0.011)
    assert least_gaps((), 500, POLICY) == (0.0, 0.0)


def test_the_ratio_learns_and_forgets() -> None:
    ratio = TtftRatio()
    assert ratio.value == 1.0
    for step in range(100):
        ratio.note(1.0, 3.0, step * 0.1)
    assert 2.8 < ratio.value <= 3.0
    for step in range(400):
        ratio.note(1.0, 1.0, 10 + step * 0.1)
    assert ratio.value < 1.1


def test_short_times_teach_the_ratio_little() -> None:
    """Ten milliseconds of overhead on a prediction of one are no factor of ten."""
    ratio = TtftRatio()
    for step in range(100):
        ratio.note(0.001, 0.01, step * 0.1)
    assert ratio.value < 1.25


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e9))))
def test_the_ratio_stays_in_bounds(notes: list[tuple[float, float, float]]) -> None:
    ratio = TtftRatio()
    for predicted_s, measured_s, now in notes:
        ratio.note(predicted_s, measured_s, now)
        assert 0.25 <= ratio.value <= 8.0


def test_the_margin_is_of_waits_that_were_longer_than_predicted() -> None:
    margin = WaitMargin()
    assert margin.value_s == 0.0
    margin.note(1.0, 0.2, 0.0)
    assert margin.value_s == 0.0
    for step in range(200):
        margin.note(1.0, 1.1, step * 0.1)
    assert 0.19 < margin.value_s <= 0.2


def test_a_margin_makes_the_router_careful_but_promises_nothing_worse() -> None:
    decision = admit(replace(PATIENT, slo_ttft_s=3.0), replace(BUSY, margin_s=0.2), CONFIG)
    assert (decision.action, decision.reason) == (REFUSE, "ttft_slo")
    assert decision.predicted_ttft_s == 2.35


def test_the_drain_rate_is_the_pools_until_it_is_measured() -> None:
    drain = DrainRate()
    assert drain.rate(5000.0) == 5000.0
    drain.note(0, 0.0, is_busy=True)
    for step in range(1, 101):
        drain.note(100, step * 0.1, is_busy=True)
    # A thousand tokens a second left it, although five times as many should have.
    assert 1000.0 < drain.rate(5000.0) < 1900.0
    assert 990.0 < drain.rate(1000.0) < 1010.0


def test_time_in_which_nothing_waits_does_not_count() -> None:
    drain = DrainRate()
    drain.note(0, 0.0, is_busy=True)
    drain.note(1000, 1.0, is_busy=False)
    measured = drain.rate(1000.0)
    drain.note(0, 2.0, is_busy=True)
    assert drain.rate(1000.0) >= measured * 0.9
