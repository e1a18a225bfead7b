"""The meaning of limits.lua in Python, for one namespace."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.registry.limits import KEEP_MS, WORD_MS
from services.resilience.tenant_limiter import Claim, Shared


@dataclass
class Budget:
    """What one tenant has left, and what each router has said last."""

    requests: float
    tokens: float
    at_ms: float
    words: dict[str, tuple[float, Claim]] = field(default_factory=dict)  # with its end


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
        known = {r: word for r, word in budget.words.items() if word[0] + KEEP_MS >= now_ms}
        own = known[router][1] if router in known else None
        told = (claim.told_requests, claim.told_tokens)
        if own is not None and own.life == claim.life:
            told = (own.requests, own.tokens)
        budget.requests -= claim.requests - told[0]
        budget.tokens -= claim.tokens - told[1]
        budget.at_ms = max(now_ms, budget.at_ms)
        others = [c for r, (end, c) in known.items() if r != router and end >= now_ms]
        budget.words = {**known, router: (now_ms + WORD_MS, claim)}
        return Shared(
            budget.requests,
            budget.tokens,
            sum(other.streams for other in others),
            1 + len(others),
        )
