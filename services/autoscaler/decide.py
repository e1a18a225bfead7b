"""One tick of the autoscaler: what is seen and remembered in, sizes with their reasons out. Pure.

The steps and their order: figures that may be believed, a proposal of each metric, the largest of
them, panic, the forecast's floor, the consolidation check, stabilisation windows, rate policies,
limits after schedules; then both pools together: zero, idle replicas given to the other pool, their
ratio, the budget; last, which replicas start, leave or change pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.autoscaler.backoff import with_lost, without_hopeless
from services.autoscaler.bounds import with_bounds
from services.autoscaler.budget import with_budget
from services.autoscaler.capacity import learn
from services.autoscaler.conditions import conditions_of
from services.autoscaler.consolidation import with_consolidation
from services.autoscaler.decision import Decision, Flip, PoolDecision
from services.autoscaler.flips import with_flips, with_idle_given
from services.autoscaler.forecast import with_forecast, with_load
from services.autoscaler.observation import Load, Observation, PoolSeen, ReplicaState
from services.autoscaler.panic import with_panic
from services.autoscaler.policy import MetricType, Mode, PolicySpec, Pool, Schedule
from services.autoscaler.proposals import load_share, with_proposals, with_single_steps
from services.autoscaler.rates import kept_changes, with_rates
from services.autoscaler.ratio import with_ratio
from services.autoscaler.readings import fresh_load
from services.autoscaler.schedules import active_schedules, limits_under
from services.autoscaler.sizing import Sizing, staff_of
from services.autoscaler.stabilization import with_stabilization
from services.autoscaler.staffing import Staffing, staffing_of, within_free
from services.autoscaler.state import Flipping, PoolState, State
from services.autoscaler.zero import with_zero

_NOTHING_SEEN = PoolSeen(replicas=(), readings={})


def decide(
    policy: PolicySpec, seen: Observation, state: State, now: float
) -> tuple[Decision, State]:
    """Return what to do now, and what to remember until the next tick.

    Args:
        policy: a checked one.
        seen: by the same clock as `now`.
        state: from the tick before; State() at the first.
        now: seconds of the Unix epoch.
    """
    active = active_schedules(policy.schedules, now)
    load = fresh_load(seen, policy.metrics, now)
    flips = _still_flipping(policy, seen, state, now)
    sizings = [
        _sized(_begun(pool, seen, state, flips, active, now), policy, seen, state, load, now)
        for pool in policy.pools
    ]
    sizings = with_zero(sizings, seen, load, policy.budget.min_accelerators)
    if seen.can_flip:
        sizings = with_idle_given(sizings, now)
    verdict = with_ratio(sizings, policy.ratio)
    sizings = with_budget(verdict.sizings, policy.budget)
    is_acted_on = policy.mode is Mode.AUTO
    if policy.mode is Mode.PAUSED:
        sizings = [s.moved(s.staff.num_live, "paused", "mode Paused") for s in sizings]
    plans = [staffing_of(s) for s in sizings]
    new_flips: tuple[Flip, ...] = ()
    if policy.mode is Mode.PAUSED:
        plans = [replace(p, cancel=(), drain=(), start=0) for p in plans]
    elif seen.can_flip:
        plans, new_flips = with_flips(plans)
    plans = within_free(without_hopeless(plans, now), policy.budget.accelerator_cap)
    decisions = tuple(_decision(p) for p in plans)
    decision = Decision(
        at=now,
        pools=decisions,
        flips=new_flips,
        conditions=conditions_of(policy, sizings, decisions, verdict.violation, now),
        active_schedule=", ".join(s.name for s in active) or None,
        is_acted_on=is_acted_on,
    )
    remembered = State(
        at=now,
        load_at=state.load_at if load is None else load.measured_at,
        pools={p.sizing.pool.name: _kept(p, new_flips, is_acted_on, now) for p in plans},
        flips=(*flips, *(Flipping(f.replica_id, f.source, f.target, now) for f in new_flips))
        if is_acted_on else flips,
    )  # fmt: skip
    return decision, remembered


def _begun(
    pool: Pool,
    seen: Observation,
    state: State,
    flips: Sequence[Flipping],
    active: Sequence[Schedule],
    now: float,
) -> Sizing:
    """Return a pool as it stands before any step."""
    known = state.pools.get(pool.name)
    pool_seen = seen.pools.get(pool.name, _NOTHING_SEEN)
    leaving = frozenset(f.replica_id for f in flips if f.source == pool.name)
    incoming = sum(1 for f in flips if f.target == pool.name)
    staff = staff_of(pool, pool_seen, leaving, incoming, now)
    size = None if known is None else known.size
    if size is None:
        # What is there already is what was decided by whoever was here before.
        initial = pool.min_replicas if pool.initial_replicas is None else pool.initial_replicas
        size = staff.num_live if staff.num_live or known is not None else initial
    return Sizing(
        pool=pool, seen=pool_seen, state=known or PoolState(), staff=staff,
        limits=limits_under(pool, active), before=size, desired=size, asked=size,
    )  # fmt: skip


def _sized(
    sizing: Sizing,
    policy: PolicySpec,
    seen: Observation,
    state: State,
    load: Load | None,
    now: float,
) -> Sizing:
    """Take one pool through the steps that it has to itself."""
    source, predictive = policy.metrics, policy.predictive
    if load is not None and (state.load_at is None or load.measured_at > state.load_at):
        sizing = _learned(sizing, policy, load, state.at, now)
    sizing = with_proposals(with_lost(sizing, now), source, seen, now)
    sizing = with_panic(sizing, now)
    sizing = with_forecast(sizing, predictive)
    sizing = with_consolidation(sizing, source, now)
    sizing = with_stabilization(sizing, now)
    sizing = with_single_steps(sizing, source, now)
    sizing = with_rates(sizing, now)
    return with_bounds(sizing)


def _learned(
    sizing: Sizing, policy: PolicySpec, load: Load, before_at: float | None, now: float
) -> Sizing:
    """Take what was done and what came in since the tick before."""
    num_ready = len(sizing.staff.ready)
    share = load_share(sizing, policy.metrics, num_ready, now, (MetricType.KV_UTILIZATION,))
    busy = sizing.state.busy
    if before_at is not None and now > before_at:
        busy = sizing.seen.busy_s / (now - before_at)
    known = replace(sizing.state, capacity=learn(sizing, share, policy.slo), busy=busy)
    return with_load(replace(sizing, state=known), load, policy.predictive)


def _still_flipping(
    policy: PolicySpec, seen: Observation, state: State, now: float
) -> tuple[Flipping, ...]:
    """Return the flips that have begun and can still be expected to end well."""
    pools = {p.name: p for p in policy.pools}
    draining = {
        (name, r.replica_id)
        for name, pool in seen.pools.items()
        for r in pool.replicas
        if r.state is ReplicaState.DRAINING
    }
    return tuple(
        f
        for f in state.flips
        if (f.source, f.replica_id) in draining
        and f.target in pools
        and f.source in pools
        and now - f.since
        <= pools[f.source].drain.deadline_seconds + pools[f.target].startup.expected_seconds
    )


def _decision(plan: Staffing) -> PoolDecision:
    sizing = plan.sizing
    staff = sizing.staff
    is_limited = sizing.clamps and sizing.desired != sizing.asked
    return PoolDecision(
        pool=sizing.pool.name,
        current=len(staff.ready) + len(staff.starting) + len(staff.failed),
        desired=sizing.desired,
        reason=_reason(sizing),
        proposals=sizing.proposals,
        clamps=sizing.clamps,
        limited_by=sizing.clamps[-1].step if is_limited else None,
        forecast=sizing.forecast,
        cancel=plan.cancel,
        drain=plan.drain,
        start=plan.start,
    )


def _reason(sizing: Sizing) -> str:
    if sizing.clamps:
        last = sizing.clamps[-1]
        return f"{last.step}: {last.reason}"
    leading = max(
        (p for p in sizing.proposals if p.value is not None),
        key=lambda p: p.replicas,
        default=None,
    )
    return "no figures" if leading is None else f"{leading.metric}: {leading.reason}"


def _kept(plan: Staffing, flips: Sequence[Flip], is_acted_on: bool, now: float) -> PoolState:
    """Return what to remember of a pool."""
    sizing = plan.sizing
    if not is_acted_on:
        return replace(sizing.state, size=None, changes=kept_changes(sizing, 0, now), leaving=())
    delta = sizing.desired - sizing.before
    flipped = (f.replica_id for f in flips if f.source == sizing.pool.name)
    return replace(
        sizing.state,
        size=sizing.desired,
        changed_at=now if delta else sizing.state.changed_at,
        changes=kept_changes(sizing, delta, now),
        leaving=(*plan.cancel, *flipped, *plan.drain),  # flips take the first of those that serve
    )
