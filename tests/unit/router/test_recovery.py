"""What follows the failure of a leg, for every kind of leg and state of the answer."""

from __future__ import annotations

import pytest

from services.common.ids import Incarnation, WorkerId
from services.router.booking import Booking
from services.router.legs import CONTINUE, PREFILL, WHOLE, Leg, Progress
from services.router.policy import RequestFacts
from services.router.recovery import Cure, RecoveryLimits, plan_recovery, tells_of_load
from services.router.request import LogicalRequest, TokensIn
from services.router.timing import Marks
from tests.support.cluster import DigitText, make_call

LIMITS = RecoveryLimits(max_retries=1, max_losses=3)


def make_leg(kind: str, worker: str = "w", **fields: object) -> Leg:
    leg = Leg(
        kind=kind,
        worker_id=WorkerId(worker),
        incarnation=Incarnation(1),
        attempt=1,
        booking=Booking(WorkerId(worker), 0.0, 0, 0),
        next_index=[0],
        sent_at=0.0,
    )
    for name, value in fields.items():
        setattr(leg, name, value)
    return leg


def make_progress(*legs: Leg, tokens: int = 0, n: int = 1, **fields: object) -> Progress:
    call = make_call(n=n)
    logical = LogicalRequest(call, DigitText())
    if tokens:
        logical.take_tokens(TokensIn(0, 0, tuple(range(1, tokens + 1))))
    progress = Progress(
        number=1,
        call=call,
        facts=RequestFacts("r", 100, 8),
        hashes=(),
        logical=logical,
        marks=Marks(0.0),
        legs=list(legs),
    )
    for name, value in fields.items():
        setattr(progress, name, value)
    return progress


def plan(leg: Leg, progress: Progress, code: str = "worker_lost") -> tuple[Cure, str]:
    """Fail a leg as the conductor does."""
    leg.is_open, leg.has_failed = False, True
    found = plan_recovery(progress, leg, code, LIMITS)
    return found.cure, found.reason


@pytest.mark.parametrize("kind", [PREFILL, WHOLE])
@pytest.mark.parametrize(("tokens", "reason"), [(0, "not_begun"), (3, "under_way")])
def test_a_lost_leg_is_replaced_whatever_the_client_has(
    kind: str, tokens: int, reason: str
) -> None:
    leg = make_leg(kind)
    assert plan(leg, make_progress(leg, tokens=tokens)) == (Cure.REPLACE, reason)


def test_a_prefill_worker_may_die_once_decode_has_every_first_token() -> None:
    prefill, decode = make_leg(PREFILL, ticket=b"t"), make_leg(CONTINUE)
    progress = make_progress(prefill, decode, tokens=1)
    assert plan(prefill, progress) == (Cure.LEAVE, "decode_goes_on")
    several = make_progress(prefill, decode, tokens=1, n=2)
    assert plan(prefill, several) == (Cure.REPLACE, "under_way")


def test_of_two_equal_prefills_one_may_fail() -> None:
    first, second = make_leg(PREFILL, "a"), make_leg(PREFILL, "b")
    progress = make_progress(first, second)
    assert plan(second, progress) == (Cure.LEAVE, "hedge_goes_on")
    assert plan(first, progress) == (Cure.REPLACE, "not_begun")


def test_a_ticket_nobody_used_is_passed_on() -> None:
    source = make_leg(PREFILL, "p", ticket=b"t", is_open=False, is_handed_off=True)
    decode = make_leg(CONTINUE, "d", source=source)
    progress = make_progress(source, decode, tokens=1)
    found = plan_recovery(progress, decode, "worker_lost", LIMITS)
    assert (found.cure, found.source) == (Cure.PASS_ON, source)


@pytest.mark.parametrize("change", ["has_tokens", "is_given_up", "is_lost", "has_failed"])
def test_a_ticket_that_was_used_or_whose_issuer_is_gone_is_not(change: str) -> None:
    source = make_leg(PREFILL, "p", ticket=b"t")
    decode = make_leg(CONTINUE, "d", source=source)
    setattr(source if change in ("is_lost", "has_failed") else decode, change, True)
    assert plan(decode, make_progress(source, decode, tokens=2)) == (Cure.REPLACE, "under_way")


@pytest.mark.parametrize("code", ["internal", "deadline_exceeded", "prompt_too_large_for_pool"])
def test_what_no_other_worker_would_mend_ends_the_request(code: str) -> None:
    leg = make_leg(WHOLE)
    assert plan(leg, make_progress(leg), code) == (Cure.GIVE_UP, "not_retryable")


def test_losses_and_refusals_have_limits_of_their_own() -> None:
    leg = make_leg(WHOLE)
    assert plan(leg, make_progress(leg, num_retries=1), "overloaded")[1] == "retries_spent"
    assert plan(leg, make_progress(leg, num_retries=1))[0] is Cure.REPLACE
    assert plan(leg, make_progress(leg, num_losses=3))[1] == "losses_spent"
    under_way = make_progress(leg, tokens=2, num_retries=1)
    assert plan(leg, under_way, "overloaded")[0] is Cure.REPLACE
    under_way.num_losses = 2
    assert plan(leg, under_way, "overloaded")[1] == "losses_spent"


def test_only_refusals_for_load_draw_on_the_small_budget() -> None:
    """A death or a drain hits all that was open at one worker in the same moment."""
    codes = ("overloaded", "hash_mismatch", "draining", "worker_lost", "handoff_failed")
    assert [code for code in codes if tells_of_load(code)] == ["overloaded", "hash_mismatch"]


def test_workers_that_drain_are_passed_over_one_after_the_other() -> None:
    """RB-105: a pool that shrinks by two has two workers that refuse, and neither tells of load."""
    prefill = make_leg(PREFILL)
    for num_retries in range(LIMITS.max_losses):
        progress = make_progress(prefill, num_retries=num_retries)
        assert plan(prefill, progress, "draining") == (Cure.REPLACE, "not_begun")
    progress = make_progress(prefill, num_retries=LIMITS.max_losses)
    assert plan(prefill, progress, "draining") == (Cure.GIVE_UP, "losses_spent")
    assert plan(prefill, make_progress(prefill, num_retries=1), "overloaded")[0] is Cure.GIVE_UP
