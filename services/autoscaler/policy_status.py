"""What the autoscaler says of a policy: the status of its resource in Kubernetes."""

from __future__ import annotations

from typing import Literal

from services.autoscaler.policy import PolicySection, Role
from services.common.settings import setting

MAX_HISTORY = 20
MAX_MESSAGE = 1024  # characters


class MetricStatus(PolicySection):
    """What one metric asked for at the last tick."""

    name: str = setting(..., "its type, or the name of an external metric", max_length=253)
    current: str | None = setting(None, "measured; absent = stale or missing", max_length=32)
    target: str = setting(..., "held at", max_length=32)
    proposed: int = setting(..., "replicas asked for", ge=0)


class PoolStatus(PolicySection):
    """One pool at the last tick."""

    name: str = setting(..., "name of the pool", max_length=63)
    role: Role
    current: int = setting(..., "ready and starting", ge=0)
    ready: int = setting(..., "that serve", ge=0)
    pending: int = setting(..., "that start", ge=0)
    draining: int = setting(..., "that leave", ge=0)
    desired: int = setting(..., "decided", ge=0)
    limited_by: str | None = setting(
        None, "the last step that kept it from what metrics ask for", max_length=63
    )
    last_scale_time: str | None = setting(None, "RFC 3339", max_length=64)
    metrics: tuple[MetricStatus, ...] = setting((), "what each asked for", max_length=16)


class ForecastStatus(PolicySection):
    """What load is expected when the replicas of now would be ready."""

    at: str = setting(..., "RFC 3339", max_length=64)
    requests_per_second: str = setting(..., "expected", max_length=32)
    prefill_floor: int = setting(..., "replicas that it takes", ge=0)
    decode_floor: int = setting(..., "replicas that it takes", ge=0)


class HistoryEntry(PolicySection):
    """One change of a size."""

    at: str = setting(..., "RFC 3339", max_length=64)
    pool: str = setting(..., "name of the pool", max_length=63)
    from_replicas: int = setting(..., "before", ge=0)
    to_replicas: int = setting(..., "after", ge=0)
    reason: str = setting(..., "in one line", max_length=512)


class ConditionStatus(PolicySection):
    """A claim about the autoscaler, as Kubernetes has them."""

    type: Literal[
        "AbleToScale", "ScalingActive", "ScalingLimited", "BudgetLimited", "RatioLimited",
        "Predicting", "Draining", "Stale", "PolicyRefused",
    ]  # fmt: skip
    status: Literal["True", "False", "Unknown"]
    last_transition_time: str = setting(..., "RFC 3339", max_length=64)
    reason: str = setting(..., "one word", max_length=256)
    message: str = setting("", "in one line", max_length=MAX_MESSAGE)


class PolicyStatus(PolicySection):
    """All that is told of a policy."""

    observed_generation: int = setting(0, "of the resource that was decided by", ge=0)
    pools: tuple[PoolStatus, ...] = setting((), "one of each role", max_length=8)
    active_schedule: str | None = setting(None, "names of those that hold", max_length=4096)
    forecast: ForecastStatus | None = None
    history: tuple[HistoryEntry, ...] = setting(
        (), "last changes, newest first", max_length=MAX_HISTORY
    )
    conditions: tuple[ConditionStatus, ...] = setting((), "one of each type", max_length=16)
