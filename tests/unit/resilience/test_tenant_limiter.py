from __future__ import annotations

import random

import pytest

from services.resilience.tenant_limiter import Claim, Shared, TenantLimiter, TenantLimits, Verdict
from services.resilience.token_bucket import TokenBucket

LIMITS = TenantLimits(requests_per_s=2, request_burst=4, tokens_per_min=600, max_streams=10)


def limiter(limits: TenantLimits | None = LIMITS, max_tenants: int = 4096) -> TenantLimiter:
    return TenantLimiter(lambda _tenant: limits, max_tenants)


def reasons(limiter: TenantLimiter, count: int, now: float, tenant: str = "a") -> list[str]:
    found: list[str] = []
    for _ in range(count):
        verdict = limiter.admit(tenant, now)
        found.append(verdict.reason)
        if verdict.reason == "ok":
            limiter.release(tenant)
    return found


def test_a_bucket_fills_at_its_rate_up_to_its_size() -> None:
    bucket = TokenBucket(2.0, 10.0, 100.0)
    bucket.charge(10, 100.0)
    assert bucket.level(101.0) == 2.0
    assert bucket.wait_s(5, 101.0) == 1.5
    assert bucket.level(200.0) == 10.0


def test_a_bucket_may_owe_and_pays_before_it_gives() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0)
    bucket.charge(25, 0.0)
    assert bucket.level(0.0) == -15.0
    assert bucket.wait_s(1, 0.0) == 16.0
    assert bucket.wait_s(1000, 0.0) == 25.0  # more than it holds: when it is full
    assert bucket.wait_s(1, 16.0) == 0.0


def test_time_that_goes_back_gives_nothing() -> None:
    """RB-101: no clock step makes or takes budget."""
    bucket = TokenBucket(1.0, 10.0, 100.0)
    bucket.charge(5, 100.0)
    assert bucket.level(50.0) == 5.0
    assert bucket.level(101.0) == 6.0


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_a_bucket_without_rate_or_size_is_none(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(rate, burst, 0.0)


def test_requests_beyond_burst_and_rate_wait() -> None:
    limits = limiter()
    assert reasons(limits, 6, 0.0) == ["ok"] * 4 + ["requests"] * 2
    verdict = limits.admit("a", 0.0)
    assert verdict.retry_after_s == 0.5
    assert verdict.requests is not None
    assert (verdict.requests.limit, verdict.requests.remaining) == (4, 0)
    assert reasons(limits, 2, 0.5) == ["ok", "requests"]
    assert reasons(limits, 6, 100.0) == ["ok"] * 4 + ["requests"] * 2


def test_tokens_are_charged_when_they_are_known_and_owed() -> None:
    limits = limiter()
    assert limits.admit("a", 0.0).reason == "ok"
    limits.charge("a", 700, 0.0)
    verdict = limits.admit("a", 0.0)
    assert verdict.reason == "tokens"
    assert verdict.retry_after_s == pytest.approx(10.1)  # ten a second, a hundred owed
    assert verdict.tokens is not None
    assert verdict.tokens.remaining == 0
    assert limits.admit("a", 10.2).reason == "ok"


def test_tokens_given_back_are_told_and_fill_no_bucket_over_its_size() -> None:
    limits = limiter()
    assert limits.admit("a", 0.0).reason == "ok"
    limits.charge("a", 100, 0.0)
    (claim,) = limits.claims(10, 0.0)
    limits.settle([claim], [Shared(3, 500, 0, 1)], 0.0)
    limits.charge("a", -100, 5.0)  # fifty came back by themselves
    verdict = limits.admit("a", 5.0)
    assert verdict.tokens is not None
    assert verdict.tokens.remaining == 600
    (claim,) = limits.claims(10, 5.0)
    assert (claim.told_tokens, claim.tokens) == (100, 0)


def test_streams_are_counted_while_they_are_open() -> None:
    limits = limiter(TenantLimits(max_streams=2))
    assert [limits.admit("a", 0.0).reason for _ in range(3)] == ["ok", "ok", "streams"]
    limits.release("a")
    assert limits.admit("a", 0.0) == Verdict("ok")


def test_a_refused_request_costs_nothing() -> None:
    limits = limiter(TenantLimits(requests_per_s=1, request_burst=1, max_streams=1))
    assert limits.admit("a", 0.0).reason == "ok"
    assert reasons(limits, 50, 0.5) == ["streams"] * 50
    limits.release("a")
    assert reasons(limits, 2, 1.0) == ["ok", "requests"]


def test_tenants_do_not_feel_each_other() -> None:
    limits = limiter()
    assert reasons(limits, 6, 0.0, "a")[-1] == "requests"
    assert reasons(limits, 4, 0.0, "b") == ["ok"] * 4


def test_without_limits_nobody_is_remembered() -> None:
    limits = limiter(None)
    assert limits.admit("a", 0.0) == Verdict("ok")
    limits.charge("a", 10**9, 0.0)
    limits.release("a")
    assert limits.claims(10, 0.0) == ()


def test_idle_tenants_are_forgotten_first() -> None:
    limits = limiter(TenantLimits(max_streams=1), max_tenants=3)
    assert limits.admit("busy", 0.0).reason == "ok"
    for i in range(50):
        reasons(limits, 1, 0.0, f"t{i}")
    assert limits.admit("busy", 0.0).reason == "streams"
    assert len(limits._accounts) <= 4


def test_changed_limits_count_at_once_and_keep_what_is_owed() -> None:
    table = {"a": TenantLimits(tokens_per_min=600)}
    limits = TenantLimiter(table.get)
    assert limits.admit("a", 0.0).reason == "ok"
    limits.charge("a", 700, 0.0)
    table["a"] = TenantLimits(tokens_per_min=6000)
    verdict = limits.admit("a", 0.0)
    assert verdict.reason == "tokens"
    assert verdict.retry_after_s == pytest.approx(1.01)


def test_limits_that_were_taken_away_hold_nobody() -> None:
    table = {"a": LIMITS}
    limits = TenantLimiter(table.get)
    assert reasons(limits, 5, 0.0)[-1] == "requests"
    limits.charge("a", 10_000, 0.0)
    del table["a"]
    assert [limits.admit("a", 0.0) for _ in range(20)] == [Verdict("ok")] * 20
    limits.charge("a", 10_000, 0.0)
    assert limits.claims(10, 0.0) == ()


def test_streams_from_before_a_limit_count_and_free_no_others() -> None:
    table: dict[str, TenantLimits] = {}
    limits = TenantLimiter(table.get)
    assert [limits.admit("a", 0.0).reason for _ in range(2)] == ["ok", "ok"]
    table["a"] = TenantLimits(max_streams=3)
    assert [limits.admit("a", 0.0).reason for _ in range(2)] == ["ok", "streams"]
    limits.release("a")  # one of the old ones
    limits.release("a")
    assert [limits.admit("a", 0.0).reason for _ in range(3)] == ["ok", "ok", "streams"]
    (claim,) = limits.claims(10, 0.0)
    assert claim.streams == 3
    for _ in range(3):
        limits.release("a")
    assert not limits._streams


def test_what_the_others_spent_counts_here() -> None:
    limits = limiter()
    assert limits.admit("a", 0.0).reason == "ok"
    (claim,) = limits.claims(10, 0.0)
    assert (claim.requests, claim.tokens, claim.streams) == (1, 0, 1)
    limits.charge("a", 30, 0.0)  # while the store is asked
    limits.settle([claim], [Shared(0.5, 100, 9, 2)], 0.0)
    verdict = limits.admit("a", 0.0)
    assert (verdict.reason, verdict.tokens) == ("streams", verdict.tokens)
    assert verdict.tokens is not None
    assert verdict.tokens.remaining == 70
    limits.release("a")
    assert limits.admit("a", 0.0).reason == "requests"


def test_without_an_answer_a_router_has_its_share_of_the_rate() -> None:
    limits = limiter(TenantLimits(requests_per_s=10, request_burst=1))
    assert reasons(limits, 1, 0.0) == ["ok"]
    claims = limits.claims(10, 0.0)
    limits.settle(claims, [Shared(0, 0, 0, 5)], 0.0)
    assert reasons(limits, 1, 0.4) == ["requests"]  # two a second are left of ten
    assert reasons(limits, 1, 0.5) == ["ok"]


def test_what_was_not_answered_is_told_again_as_a_total() -> None:
    limits = limiter()
    reasons(limits, 1, 0.0)
    limits.claims(10, 0.0)  # and no answer
    reasons(limits, 1, 0.0)
    (claim,) = limits.claims(10, 0.0)
    assert (claim.requests, claim.told_requests) == (2, 0)
    limits.settle([claim], [Shared(2, 600, 0, 1)], 0.0)
    (claim,) = limits.claims(10, 0.0)
    assert (claim.requests, claim.told_requests) == (2, 2)  # asked after until it is full again
    assert limits.claims(10, 2.0) == ()


def test_a_tenant_that_was_forgotten_counts_in_another_life() -> None:
    """Totals begin at zero again, which must not look like budget given back."""
    table = {"a": LIMITS}
    limits = TenantLimiter(table.get)
    reasons(limits, 1, 0.0)
    (claim,) = limits.claims(10, 0.0)
    del table["a"]
    reasons(limits, 1, 0.0)
    table["a"] = LIMITS
    reasons(limits, 2, 0.0)
    (later,) = limits.claims(10, 0.0)
    assert later.life != claim.life
    assert (later.requests, later.told_requests) == (2, 0)
    limits.settle([claim], [Shared(0, 0, 0, 1)], 0.0)  # an answer to the earlier life
    assert limits.admit("a", 0.0).reason == "ok"


def test_a_lying_store_locks_nobody_out_for_long() -> None:
    limits = limiter()
    reasons(limits, 1, 0.0)
    limits.settle(limits.claims(10, 0.0), [Shared(-1e300, -1e300, 0, 1)], 0.0)
    assert limits.admit("a", 0.0).retry_after_s <= 41 / 2 + 1
    assert limits.admit("a", 661.0).reason == "ok"


def test_many_tenants_are_told_of_in_turn() -> None:
    limits = limiter()
    for i in range(5):
        assert limits.admit(f"t{i}", 0.0).reason == "ok"
    told = [claim.tenant for _ in range(2) for claim in limits.claims(3, 0.0)]
    assert set(told) == {f"t{i}" for i in range(5)}


@pytest.mark.parametrize("seed", range(20))
def test_over_any_time_no_more_than_rate_and_burst_get_in(seed: int) -> None:
    rng = random.Random(seed)
    limits, now, let_in = limiter(), 0.0, 0
    for _ in range(500):
        now += rng.expovariate(5.0)
        let_in += reasons(limits, 1, now) == ["ok"]
    assert let_in <= 4 + 2 * now + 1e-6
    assert let_in >= min(500, 4 + 2 * now) * 0.8


def test_claims_carry_the_limits_they_were_made_under() -> None:
    limits = limiter()
    reasons(limits, 1, 0.0)
    assert limits.claims(1, 0.0) == (Claim("a", 1, 1, 0, 0, 0, 0, LIMITS),)
