"""The meaning of limits.lua in Python, for one namespace."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.registry.limits import WORD_MS
from services.resilience.tenant_limiter import Claim, Shared


@dataclass
class Budget:
    """What one tenant has left, and who has streams."""

    requests: float
    tokens: float
    at_ms: float
    streams: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass
class LimitsTwin:
    """Budgets by tenant."""

    budgets: dict[str, Budget] = field(default_factory=dict)

    def share(self, router: str, name: str, claim: Claim, now_ms: float) -> Shared:
        """Spend a claim."""
        limits = claim.limits
        bursts = (limits.burst, limits.tokens_per_min)
        budget = self.budgets.setdefault(name, Budget(*bursts, now_ms))
        passed_s = max(0.0, now_ms - budget.at_ms) / 1000
        budget.requests = min(bursts[0], budget.requests + passed_s * limits.requests_per_s)
        budget.tokens = min(bursts[1], budget.tokens + passed_s * (limits.tokens_per_min / 60))
        budget.requests -= claim.requests
        budget.tokens -= claim.tokens
        budget.at_ms = max(now_ms, budget.at_ms)
        alive = {r: word for r, word in budget.streams.items() if word[1] >= now_ms}
        others = {r: word for r, word in alive.items() if r != router}
        budget.streams = {**others, router: (claim.streams, now_ms + WORD_MS)}
        return Shared(
            budget.requests,
            budget.tokens,
            sum(count for count, _ in others.values()),
            1 + len(others),
        )
