"""Prefill replicas for each decode replica: pools that drift apart are held together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from services.autoscaler.policy import OnRatioViolation, Ratio, RatioMode, Role
from services.autoscaler.sizing import Sizing


@dataclass(frozen=True, slots=True)
class RatioVerdict:
    """Pools after the guard, and what it found: None = they kept to it."""

    sizings: list[Sizing]
    violation: str | None
    is_met: bool = True  # afterwards


def with_ratio(sizings: Sequence[Sizing], ratio: Ratio) -> RatioVerdict:
    """Raise the pool that has too few, or lower the one that has too many."""
    by_role = {s.pool.role: s for s in sizings}
    prefill, decode = by_role.get(Role.PREFILL), by_role.get(Role.DECODE)
    if ratio.bounds is None or prefill is None or decode is None:
        return RatioVerdict(list(sizings), None)
    if prefill.desired == 0 or decode.desired == 0 or _is_kept(prefill, decode, ratio):
        return RatioVerdict(list(sizings), None)
    low, high = ratio.bounds
    has_few_prefill = prefill.desired < low * decode.desired
    bound = low if has_few_prefill else high
    found = f"{prefill.desired}:{decode.desired} is {'below' if has_few_prefill else 'above'} "
    found += f"{float(bound):g} prefill for each decode"
    if ratio.on_violation is OnRatioViolation.RAISE_LOWER:
        if has_few_prefill:
            prefill = _raised(prefill, ceil(low * decode.desired), found)
        else:
            decode = _raised(decode, ceil(prefill.desired / high), found)
    elif ratio.on_violation is OnRatioViolation.CAP_HIGHER:
        if has_few_prefill:
            decode = _lowered(decode, floor(prefill.desired / low), found)
        else:
            prefill = _lowered(prefill, floor(high * decode.desired), found)
    changed = {prefill.pool.name: prefill, decode.pool.name: decode}
    return RatioVerdict(
        [changed.get(s.pool.name, s) for s in sizings], found, _is_kept(prefill, decode, ratio)
    )


def _is_kept(prefill: Sizing, decode: Sizing, ratio: Ratio) -> bool:
    if ratio.bounds is None:
        return True
    low, high = ratio.bounds
    if ratio.mode is RatioMode.RANGE:
        return low * decode.desired <= prefill.desired <= high * decode.desired
    # Whole replicas meet few ratios to the letter: one is met where either pool is the other's
    # share rounded up.
    return prefill.desired == ceil(low * decode.desired) or decode.desired == ceil(
        prefill.desired / low
    )


def _raised(sizing: Sizing, size: int, reason: str) -> Sizing:
    return sizing.moved(max(sizing.desired, min(size, sizing.limits.max_replicas)), "ratio", reason)


def _lowered(sizing: Sizing, size: int, reason: str) -> Sizing:
    least = sizing.floor if sizing.may_shrink else max(sizing.floor, sizing.before)
    return sizing.moved(min(sizing.desired, max(size, least)), "ratio", reason)
