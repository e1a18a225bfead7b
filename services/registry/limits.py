"""Tenants' budgets that several routers share through the store."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.common.errors import StoreUnavailable
from services.common.ids import Incarnation, new_incarnation
from services.registry.schema import Keys
from services.registry.scripts import Arg, Invocation, load_script
from services.resilience.tenant_limiter import Claim, Shared

WORD_MS = 2_000  # a router that says nothing for so long has no streams
KEEP_MS = 60_000  # what it has told is known for so long after its last word
IDLE_MS = 300_000  # a budget nobody draws on is full again long before
# A budget is the tenant's, whichever models a router serves and in whatever order.
KEYS = Keys("limits")
_NUMBER = rb"(-?\d[\d.e+-]{0,31})"
_ANSWER = re.compile(_NUMBER + rb" " + _NUMBER + rb" (\d{1,9}) (\d{1,6})")


@dataclass(frozen=True, slots=True)
class LimitStore:
    """Tells the store what was spent, in one round trip for many tenants."""

    router_id: str
    run: Callable[[Invocation, float], Awaitable[object]]  # a script within so many seconds
    timeout_s: float = 0.25
    keys: Keys = KEYS
    incarnation: Incarnation = field(default_factory=new_incarnation)

    async def share(self, claims: Sequence[tuple[str, Claim]]) -> tuple[Shared, ...]:
        """Spend what is claimed under these names; raises StoreUnavailable."""
        call = limits_call(self.keys, (self.router_id, self.incarnation), claims)
        return parse_limits(await self.run(call, self.timeout_s), len(claims))


def limits_call(
    keys: Keys,
    router: tuple[str, Incarnation],
    claims: Sequence[tuple[str, Claim]],
    now_ms: int | None = None,
) -> Invocation:
    """Build the script's call; names are those under which tenants are known in the store."""
    router_id, incarnation = router
    args: list[Arg] = [router_id, WORD_MS, KEEP_MS, IDLE_MS]
    for _, claim in claims:
        limits = claim.limits
        args += [
            f"{incarnation:x}.{claim.life}", repr(claim.requests), repr(claim.tokens),
            repr(claim.told_requests), repr(claim.told_tokens), claim.streams,
            repr(limits.requests_per_s), repr(limits.burst),
            repr(limits.tokens_per_min / 60), repr(limits.tokens_per_min),
        ]  # fmt: skip
    args.append("" if now_ms is None else now_ms)
    names = tuple(f"{keys.prefix}lim:{name}" for name, _ in claims)
    return Invocation(load_script("limits"), names, tuple(args))


def parse_limits(answer: object, num_claims: int) -> tuple[Shared, ...]:
    """Read the answer; what is not one counts as none, for the store is not trusted."""
    entries = answer if isinstance(answer, list) else []
    found = [_ANSWER.fullmatch(entry) for entry in entries if isinstance(entry, bytes)]
    try:
        shared = tuple(
            Shared(float(match[1]), float(match[2]), int(match[3]), int(match[4]))
            for match in found
            if match is not None
        )
    except ValueError:
        shared = ()
    if len(shared) != num_claims:
        raise StoreUnavailable("the store gave no answer that could be read")
    return shared
