"""What a worker takes, and what follows a failed receive."""

from __future__ import annotations

from services.decode.admission import AdmissionLimits, FailureLadder, admit
from services.engine.api import EngineLoad

LIMITS = AdmissionLimits(max_requests=2, max_recomputes=2)


def test_takes_work_below_the_limit() -> None:
    assert admit(EngineLoad(requests_open=1), is_draining=False, limits=LIMITS).is_taken


def test_refuses_as_overloaded_at_the_limit() -> None:
    verdict = admit(EngineLoad(requests_open=2), is_draining=False, limits=LIMITS)
    assert (verdict.is_taken, verdict.code) == (False, "overloaded")


def test_refuses_everything_while_draining() -> None:
    verdict = admit(EngineLoad(), is_draining=True, limits=LIMITS)
    assert (verdict.is_taken, verdict.code) == (False, "draining")


def test_recomputes_within_the_budget_then_fails_then_recovers() -> None:
    ladder = FailureLadder(LIMITS)
    assert ladder.next_step(can_recompute=True, now=0.0).recompute
    assert ladder.next_step(can_recompute=True, now=1.0).recompute
    assert ladder.next_step(can_recompute=True, now=2.0).reason == "recompute_budget_spent"
    assert ladder.next_step(can_recompute=True, now=10.5).recompute


def test_cancelled_receive_is_never_recomputed() -> None:
    ladder = FailureLadder(LIMITS)
    assert ladder.next_step(can_recompute=False, now=0.0).reason == "cancelled"
