"""The Kubernetes HPA's rate policies: by how much a size may change within a period. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from services.autoscaler.policy import RatePolicy, RateType, SelectPolicy
from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Change


def with_rates(sizing: Sizing, now: float) -> Sizing:
    """Change no faster than allowed."""
    if sizing.desired > sizing.before:
        most = growth_limit(sizing, now)
        return sizing.moved(min(sizing.desired, most), "rate", f"no more than {most} by now")
    least = shrink_limit(sizing, now)
    return sizing.moved(max(sizing.desired, least), "rate", f"no fewer than {least} by now")


def growth_limit(sizing: Sizing, now: float) -> int:
    """Return the most there may be now."""
    rule, before = sizing.pool.behavior.scale_up, sizing.before
    if rule.select_policy is SelectPolicy.DISABLED:
        return before
    limits = [
        _grown(policy, before - _net(sizing.state.changes, policy, now)) for policy in rule.policies
    ]
    pick = min if rule.select_policy is SelectPolicy.MIN else max
    return max(pick(limits, default=before), before)


def shrink_limit(sizing: Sizing, now: float) -> int:
    """Return the least there may be now."""
    rule, before = sizing.pool.behavior.scale_down, sizing.before
    if rule.select_policy is SelectPolicy.DISABLED:
        return before
    limits = [
        _shrunk(policy, before - _net(sizing.state.changes, policy, now))
        for policy in rule.policies
    ]
    # Min and Max are of the change, not of what is left.
    pick = max if rule.select_policy is SelectPolicy.MIN else min
    return min(pick(limits, default=before), before)


def kept_changes(sizing: Sizing, delta: int, now: float) -> tuple[Change, ...]:
    """Return the changes that some policy looks back on, and the one of now."""
    behavior = sizing.pool.behavior
    longest_s = max(
        behavior.scale_down.stabilization_window_seconds,
        *(p.period_seconds for p in (*behavior.scale_up.policies, *behavior.scale_down.policies)),
    )
    kept = tuple(c for c in sizing.state.changes if c.at > now - longest_s)
    return (*kept, Change(now, delta)) if delta else kept


def _net(changes: Sequence[Change], policy: RatePolicy, now: float) -> int:
    """Return by how much the size changed in a policy's period: it began with that much less."""
    return sum(c.delta for c in changes if c.at > now - policy.period_seconds)


def _grown(policy: RatePolicy, start: int) -> int:
    if policy.type is RateType.PODS:
        return start + policy.value
    return ceil(start * (100 + policy.value) / 100)


def _shrunk(policy: RatePolicy, start: int) -> int:
    if policy.type is RateType.PODS:
        return start - policy.value
    return start * (100 - policy.value) // 100
