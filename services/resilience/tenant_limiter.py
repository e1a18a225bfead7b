"""What a tenant may do at a time: requests, tokens and open streams. Pure.

Several routers hold one budget. Each decides alone and at once, on what it knows; now and then it
tells the others, through the store, what it has spent, and hears what is left in all. While nobody
answers it lets through its own share: the rate over as many routers as there were.

It tells what it has spent in all, not what it has spent since: a message whose answer is lost may
have come or not, and the next one says the same and more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.light_value import light_value
from services.resilience.token_bucket import TokenBucket

_MAX_DEBT = 10  # full budgets, as heard from the others
_STREAM_WAIT_S = 1.0  # nobody knows when a stream will end

Reason = Literal["ok", "requests", "tokens", "streams"]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds of one tenant over all routers; 0 = none."""

    requests_per_s: float = 0.0
    request_burst: float = 0.0  # 0 = what a second brings, one at least
    tokens_per_min: float = 0.0  # prompt and answer together; a minute's worth may come at once
    max_streams: int = 0

    @property
    def burst(self) -> float:
        """Requests that may come at once."""
        return self.request_burst or max(1.0, self.requests_per_s)


@dataclass(frozen=True, slots=True)
class RateState:
    """One budget as its tenant may see it."""

    limit: float
    remaining: float
    reset_s: float  # until it is full again


@light_value
class Verdict:
    """Whether a request may begin, and why not."""

    reason: Reason
    retry_after_s: float = 0.0
    requests: RateState | None = None  # None = no such limit
    tokens: RateState | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What this router has spent of a tenant's budget since it knows of the tenant."""

    tenant: str
    life: int  # another one counts from zero
    requests: float
    tokens: float
    told_requests: float  # of them, what the store is known to have been told
    told_tokens: float
    streams: int  # open now
    limits: TenantLimits


@dataclass(frozen=True, slots=True)
class Shared:
    """What all routers together have left of it."""

    requests: float
    tokens: float
    other_streams: int
    num_routers: int


@dataclass(slots=True)
class _Account:
    limits: TenantLimits
    life: int
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    other_streams: int = 0
    num_routers: int = 1
    spent_requests: float = 0.0
    spent_tokens: float = 0.0
    told_requests: float = 0.0
    told_tokens: float = 0.0

    def shape(self, limits: TenantLimits, now: float) -> None:
        """Take over limits, of which this router has its share."""
        self.limits = limits
        n = self.num_routers
        self.requests = _shaped(
            self.requests,
            limits.requests_per_s / n,
            limits.burst if limits.requests_per_s else 0,
            now,
        )
        self.tokens = _shaped(
            self.tokens, limits.tokens_per_min / 60 / n, limits.tokens_per_min, now
        )

    def is_full(self, now: float) -> bool:
        """Whether nothing of the budget is in use, here or elsewhere."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.other_streams and all(b.level(now) >= b.burst for b in buckets)

    @property
    def is_told(self) -> bool:
        """Whether the others know all that was spent here."""
        spent, told = self.spent_requests, self.told_requests
        return spent == told and self.spent_tokens == self.told_tokens

    def claim(self, tenant: str, streams: int) -> Claim:
        """Say what was spent."""
        return Claim(
            tenant, self.life, self.spent_requests, self.spent_tokens, self.told_requests,
            self.told_tokens, streams, self.limits,
        )  # fmt: skip

    def settle(self, claim: Claim, shared: Shared, now: float) -> None:
        """Go on from what all routers have left, less what was spent here since the claim."""
        self.told_requests, self.told_tokens = claim.requests, claim.tokens
        self.num_routers = max(1, shared.num_routers)
        self.other_streams = max(0, shared.other_streams)
        self.shape(self.limits, now)
        _refit(self.requests, shared.requests - (self.spent_requests - claim.requests), now)
        _refit(self.tokens, shared.tokens - (self.spent_tokens - claim.tokens), now)


def _shaped(
    bucket: TokenBucket | None, rate: float, burst: float, now: float
) -> TokenBucket | None:
    if not rate:
        return None
    if bucket is None:
        return TokenBucket(rate, burst, now)
    bucket.reshape(rate, burst, now)
    return bucket


class TenantLimiter:
    """Decides for every tenant; remembers so many of them, and forgets idle ones first."""

    def __init__(
        self, limits_of: Callable[[str], TenantLimits | None], max_tenants: int = 4096
    ) -> None:
        self._limits_of = limits_of
        self._max_tenants = max_tenants
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._num_lives = 0
        # Of every tenant: limits may come and go while they are open.
        self._streams: dict[str, int] = {}

    def admit(self, tenant: str, now: float) -> Verdict:
        """Decide on a request. "ok" opens a stream, which `release` ends; else nothing is spent."""
        account, streams = self._account(tenant, now), self._streams.get(tenant, 0)
        if account is None:
            self._streams[tenant] = streams + 1
            return Verdict("ok")
        reason, wait_s = _first_exhausted(account, streams, now)
        if reason == "ok":
            self._streams[tenant] = streams + 1
            if account.requests is not None:
                account.requests.charge(1, now)
                account.spent_requests += 1
        return Verdict(reason, wait_s, _state(account.requests, now), _state(account.tokens, now))

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Spend tokens of a request that was let in; less than nothing gives back."""
        account = self._account(tenant, now)
        if account is not None and account.tokens is not None:
            account.tokens.charge(num_tokens, now)
            account.spent_tokens += num_tokens

    def release(self, tenant: str) -> None:
        """A stream has ended."""
        left = self._streams.pop(tenant, 0) - 1
        if left > 0:
            self._streams[tenant] = left

    def claims(self, max_claims: int, now: float) -> tuple[Claim, ...]:
        """Say what is to be told to the other routers; `settle` follows if there is an answer.

        A budget that is not full is asked after too: the others may be spending it.
        """
        found = []
        for tenant, account in self._accounts.items():
            if self._is_idle(tenant, account) and account.is_full(now):
                continue
            found.append(account.claim(tenant, self._streams.get(tenant, 0)))
            if len(found) == max_claims:
                break
        for claim in found:  # the others are first next time
            self._accounts.move_to_end(claim.tenant)
        return tuple(found)

    def settle(self, claims: Sequence[Claim], answers: Sequence[Shared], now: float) -> None:
        """Learn what all routers have left."""
        for claim, shared in zip(claims, answers, strict=True):
            account = self._accounts.get(claim.tenant)
            if account is not None and account.life == claim.life:
                account.settle(claim, shared, now)

    def _account(self, tenant: str, now: float) -> _Account | None:
        limits = self._limits_of(tenant)
        account = self._accounts.get(tenant)
        if limits is None:
            self._accounts.pop(tenant, None)  # they were taken away
            return None
        if account is None:
            self._num_lives += 1
            account = _Account(limits, self._num_lives)
            account.shape(limits, now)
            self._accounts[tenant] = account
            self._forget_idle()
        elif account.limits != limits:
            account.shape(limits, now)
        return account

    def _forget_idle(self) -> None:
        if len(self._accounts) > self._max_tenants:
            for tenant, account in self._accounts.items():
                if self._is_idle(tenant, account):
                    del self._accounts[tenant]
                    return

    def _is_idle(self, tenant: str, account: _Account) -> bool:
        return account.is_told and tenant not in self._streams


def _refit(bucket: TokenBucket | None, level: float, now: float) -> None:
    if bucket is not None:
        # What the store says may be wrong; it must not lock a tenant out for days.
        bucket.refit(max(level, -_MAX_DEBT * bucket.burst), now)


def _first_exhausted(account: _Account, streams: int, now: float) -> tuple[Reason, float]:
    most = account.limits.max_streams
    if most and streams + account.other_streams >= most:
        return "streams", _STREAM_WAIT_S
    if account.requests is not None and (wait_s := account.requests.wait_s(1, now)):
        return "requests", wait_s
    if account.tokens is not None and (wait_s := account.tokens.wait_s(1, now)):
        return "tokens", wait_s
    return "ok", 0.0


def _state(bucket: TokenBucket | None, now: float) -> RateState | None:
    if bucket is None:
        return None
    level = bucket.level(now)
    return RateState(bucket.burst, max(0.0, level), bucket.wait_s(bucket.burst, now))
