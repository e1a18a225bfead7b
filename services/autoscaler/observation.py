"""What the autoscaler sees at a tick. Frozen values, every measurement with its age.

Built from routers and workers by the controller, by the simulator from simulated ones. The
controller's clock tells seconds of the Unix epoch: schedules have time zones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    """What a replica does."""

    STARTING = "starting"  # asked for, not serving yet
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker of a pool, as its driver and its lease tell."""

    replica_id: str
    state: ReplicaState
    since: float  # in this state, seconds of the controller's clock
    kv_tokens_used: int = 0  # what leaving would move or lose


@dataclass(frozen=True, slots=True)
class Reading:
    """A measurement and when it was made, seconds of the controller's clock."""

    value: float
    measured_at: float


@dataclass(frozen=True, slots=True)
class Load:
    """What came in and was done since the tick before, summed over routers."""

    num_requests: int
    prompt_tokens: int  # to be computed, less cached ones
    output_tokens: int
    measured_at: float
    span_s: float  # that it was counted over


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step of one decode replica at a tick: a token for each of its answers."""

    num_answers: float
    step_s: float


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool at a tick.

    `readings` has a pool-wide value by name of a metric's type ("TTFT", in seconds at the SLO's
    percentile, queue wait included; "ITL", in seconds; "QueuedTokens", all of the pool;
    "KVUtilization", 0 to 1 and above where tokens queue) or of an external metric. Those of
    workers that warm up are left out where they would mislead (TTFT, ITL).
    """

    replicas: tuple[Replica, ...]
    readings: Mapping[str, Reading]
    work_tokens: int = 0  # done by ready, warm replicas since the tick before: prompts or outputs
    busy_s: float = 0.0  # worker-seconds they took for it
    # One replica's by the profile that the policy names: prefill without a pause, decode as full as
    # the SLO's ITL allows.
    profile_tokens_s: float | None = None
    # Of warm decode replicas with answers, and how many of such answers the KV of one has room for.
    steps: tuple[StepSeen, ...] = ()
    most_answers: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """Both pools at a tick."""

    pools: Mapping[str, PoolSeen]  # by the pool's name in the policy
    load: Load | None  # None = no router told any
    num_held: int = 0  # requests that wait at routers for a pool of size zero
    idle_s: float = 0.0  # since the last request, wherever
    can_flip: bool = True  # what runs the replicas can move one to the other pool in place
