"""What an autoscaler keeps in the store: what it remembers, and what it tells. Pure.

The one after it goes on with the same windows, drains and history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from services.autoscaler.decision import Decision, PoolDecision, Proposal
from services.autoscaler.drains import Drain
from services.autoscaler.observation import Observation, PoolSeen, ReplicaState
from services.autoscaler.policy import PoolAutoscalingPolicy
from services.autoscaler.policy_status import (
    MAX_HISTORY,
    MAX_MESSAGE,
    ConditionStatus,
    ForecastStatus,
    HistoryEntry,
    MetricStatus,
    PolicyStatus,
    PoolStatus,
)
from services.autoscaler.state import State
from services.registry.brief import AutoscalerBrief, Hold, PoolBrief

MAX_SKEW_S = 60.0  # a state from further ahead was written by another clock
_NO_POOL = PoolSeen(replicas=(), readings={})


@dataclass(frozen=True, slots=True)
class Resized:
    """A size that was changed."""

    at: float
    pool: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition, and since when it is as it is."""

    is_true: bool
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything."""

    format: Literal[1] = 1
    at: float = 0.0
    state: State = field(default_factory=State)
    drains: tuple[Drain, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # decided last, by pool
    history: tuple[Resized, ...] = ()  # newest first
    claims: Mapping[str, Claim] = field(default_factory=dict)  # by type

    def to_json(self) -> str:
        """Return what kept_from reads."""
        return _KEPT.dump_json(self).decode()


_KEPT = TypeAdapter(Kept)


def kept_from(text: str | None, now: float) -> Kept:
    """Read what the one before kept; nothing where it left nothing that can be used."""
    if text is None:
        return Kept()
    try:
        kept = _KEPT.validate_json(text)
    except ValidationError:
        return Kept()
    return kept if kept.at <= now + MAX_SKEW_S else Kept()


def after_tick(kept: Kept, decision: Decision, state: State, drains: Sequence[Drain]) -> Kept:
    """Return what is kept once a decision is made."""
    now = decision.at
    changes = tuple(
        Resized(now, pool.pool, kept.sizes.get(pool.pool, pool.current), pool.desired, pool.reason)
        for pool in decision.pools
        if kept.sizes.get(pool.pool, pool.current) != pool.desired
    )
    claims = {}
    for condition in decision.conditions:
        before = kept.claims.get(condition.type)
        is_same = before is not None and before.is_true == condition.is_true
        since = before.since if before is not None and is_same else now
        claims[condition.type] = Claim(condition.is_true, condition.reason, since)
    return Kept(
        at=now,
        state=state,
        drains=tuple(drains),
        sizes={pool.pool: pool.desired for pool in decision.pools},
        history=(*reversed(changes), *kept.history)[:MAX_HISTORY],
        claims=claims,
    )


# -- what is told ---------------------------------------------------------------------------------


def brief_of(
    policy: PoolAutoscalingPolicy, seen: Observation, decision: Decision, unix_ms: int
) -> AutoscalerBrief:
    """Return what routers are told."""
    spec = policy.spec
    zeros = [pool.scale_to_zero for pool in spec.pools if pool.scale_to_zero.enabled]
    hold = None
    if zeros:
        hold = Hold(
            limit=max(zero.activation_queue_limit for zero in zeros),
            timeout_s=float(max(zero.activation_timeout_seconds for zero in zeros)),
        )
    return AutoscalerBrief(
        policy=policy.metadata.name,
        mode=spec.mode.value,
        at_unix_ms=unix_ms,
        pools=tuple(_pool_brief(pool, seen) for pool in decision.pools),
        conditions=tuple(c.type for c in decision.conditions if c.is_true),
        hold=hold,
    )


def _pool_brief(plan: PoolDecision, seen: Observation) -> PoolBrief:
    counts = counts_of(seen.pools.get(plan.pool, _NO_POOL))
    return PoolBrief(
        pool=plan.pool,
        ready=counts[ReplicaState.READY],
        pending=counts[ReplicaState.STARTING],
        draining=counts[ReplicaState.DRAINING],
        desired=plan.desired,
        limited_by=plan.limited_by or "",
        reason=plan.reason[:200],
    )


def counts_of(pool: PoolSeen) -> dict[ReplicaState, int]:
    """Count the replicas of a pool by state."""
    states = [replica.state for replica in pool.replicas]
    return {state: states.count(state) for state in ReplicaState}


def status_of(
    policy: PoolAutoscalingPolicy, seen: Observation, decision: Decision, kept: Kept
) -> PolicyStatus:
    """Return the status of the policy, after a tick that ended with `kept`."""
    plans = {plan.pool: plan for plan in decision.pools}
    last_scaled = {change.pool: change.at for change in reversed(kept.history)}
    pools = []
    for pool in policy.spec.pools:
        plan = plans[pool.name]
        counts = counts_of(seen.pools.get(pool.name, _NO_POOL))
        at = last_scaled.get(pool.name)
        pools.append(
            PoolStatus(
                name=pool.name,
                role=pool.role,
                current=plan.current,
                ready=counts[ReplicaState.READY],
                pending=counts[ReplicaState.STARTING],
                draining=counts[ReplicaState.DRAINING],
                desired=plan.desired,
                limited_by=plan.limited_by,
                last_scale_time=None if at is None else rfc3339(at),
                metrics=tuple(map(_metric_status, plan.proposals[:16])),
            )
        )
    return PolicyStatus(
        pools=tuple(pools),
        active_schedule=decision.active_schedule,
        forecast=_forecast(policy, decision, seen, kept),
        history=tuple(
            HistoryEntry(
                at=rfc3339(change.at),
                pool=change.pool,
                from_replicas=change.before,
                to_replicas=change.after,
                reason=change.reason[:512],
            )
            for change in kept.history
        ),
        conditions=tuple(map(_condition_status, kept.claims.items())),
    )


def _metric_status(proposal: Proposal) -> MetricStatus:
    value = proposal.value
    return MetricStatus(
        name=proposal.metric,
        current=None if value is None else f"{value:.6g}",
        target=f"{proposal.target:.6g}",
        proposed=proposal.replicas,
    )


def _condition_status(item: tuple[str, Claim]) -> ConditionStatus:
    name, claim = item
    return ConditionStatus.model_validate(
        {
            "type": name,
            "status": "True" if claim.is_true else "False",
            "last_transition_time": rfc3339(claim.since),
            # One word, as Kubernetes asks for; the sentence is the message.
            "reason": "Holds" if claim.is_true else "DoesNotHold",
            "message": claim.reason[:MAX_MESSAGE],
        }
    )


def _forecast(
    policy: PoolAutoscalingPolicy, decision: Decision, seen: Observation, kept: Kept
) -> ForecastStatus | None:
    floors = {plan.pool: plan.forecast for plan in decision.pools}
    by_role = {pool.role.value: floors.get(pool.name) for pool in policy.spec.pools}
    prefill, decode = by_role.get("Prefill"), by_role.get("Decode")
    if prefill is None or decode is None:
        return None
    return ForecastStatus(
        at=rfc3339(decision.at + policy.spec.predictive.look_ahead_seconds),
        requests_per_second=f"{_requests_ahead(policy, seen, kept):.6g}",
        prefill_floor=prefill,
        decode_floor=decode,
    )


def _requests_ahead(policy: PoolAutoscalingPolicy, seen: Observation, kept: Kept) -> float:
    """Expect requests to grow as their tokens are expected to."""
    load = seen.load
    if load is None or load.span_s <= 0:
        return 0.0
    rate, growth = load.num_requests / load.span_s, 1.0
    for pool in policy.spec.pools:
        state = kept.state.pools.get(pool.name)
        if state is not None and state.series.ahead is not None and state.series.level > 0:
            growth = max(growth, state.series.ahead / state.series.level)
    return rate * growth


def rfc3339(at: float) -> str:
    """Write a moment, seconds of the Unix epoch, as Kubernetes does."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
