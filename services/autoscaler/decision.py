"""What the autoscaler decides at a tick, and why. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one metric asks for."""

    metric: str
    value: float | None  # None = stale or missing
    target: float
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class Clamp:
    """One step that changed a size: which, from what to what, and why."""

    step: (
        str  # panic, forecast, consolidation, stabilization, rate, bounds, ratio, budget, stale ...
    )
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """One pool."""

    pool: str
    current: int  # ready and starting
    desired: int
    reason: str  # in one line
    proposals: tuple[Proposal, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    limited_by: str | None = None  # the last step that kept it from what metrics ask for
    forecast: int | None = None  # the floor that the forecast sets
    cancel: tuple[str, ...] = ()  # replicas that start and are not wanted, or never came up
    drain: tuple[str, ...] = ()  # replicas that serve and are to leave, in this order
    # new ones to ask for now; less than what is wanted where a flip brings one, or where the budget
    # is held by replicas that still leave
    start: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """A replica that changes its pool, in seconds, where a new one would take minutes."""

    replica_id: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A claim about the autoscaler, by the names of the Kubernetes HPA where it has one."""

    # AbleToScale, ScalingActive, ScalingLimited; BudgetLimited, RatioLimited, Predicting, Draining,
    # Stale; PolicyRefused, which the controller adds
    type: str
    is_true: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """All of a tick. `is_acted_on` is False in modes DryRun and Paused."""

    at: float
    pools: tuple[PoolDecision, ...]
    flips: tuple[Flip, ...]
    conditions: tuple[Condition, ...]
    active_schedule: str | None
    is_acted_on: bool
