"""What a policy does, in words and numbers, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

from services.autoscaler.policy import (
    Metric,
    MetricType,
    Mode,
    OnDeadline,
    OnRatioViolation,
    OnStale,
    PolicySpec,
    Pool,
    PoolAutoscalingPolicy,
    PredictiveMode,
    RatePolicy,
    RateType,
    RatioMode,
    Schedule,
    SelectPolicy,
    TargetType,
    VictimPolicy,
)
from services.autoscaler.policy_notes import policy_notes
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.schedules import (
    active_schedules,
    limits_at,
    limits_under,
    next_start,
    window_start,
)
from services.common.wording import counted

_MODES = {
    Mode.AUTO: "acts on what it decides",
    Mode.DRY_RUN: "records what it decides and changes nothing",
    Mode.PAUSED: "changes nothing until mode is another",
}
_STALE = {
    OnStale.HOLD_SCALE_DOWN: "grows by the figures that are fresh, shrinks nothing",
    OnStale.HOLD: "changes nothing",
}
_REST = {OnDeadline.MIGRATE: "moved to others", OnDeadline.ABORT: "aborted"}
_VICTIMS = {
    VictimPolicy.LEAST_KV_BLOCKS: "then who holds the least KV",
    VictimPolicy.NEWEST: "then the newest",
}
_VIOLATED = {
    OnRatioViolation.RAISE_LOWER: "the pool that has too few gets more",
    OnRatioViolation.CAP_HIGHER: "the pool that has too many gets fewer",
    OnRatioViolation.WARN: "it is told and nothing else",
}


def policy_lines(policy: PoolAutoscalingPolicy, unix_s: float) -> Iterator[str]:
    """Write a policy for people, as of a moment."""
    spec = policy.spec
    yield (
        f"{policy.metadata.name}: sizes the pools of {spec.cluster_ref.name} every "
        f"{spec.tick_seconds} s; {_MODES[spec.mode]} (mode {spec.mode})"
    )
    for pool in spec.pools:
        yield ""
        yield from _pool_lines(pool, spec, unix_s)
    yield ""
    yield _row("SLO", _slo(spec))
    yield _row("ratio", _ratio(spec))
    yield _row("budget", _budget(spec))
    for i, schedule in enumerate(spec.schedules):
        yield _row("" if i else "schedules", _schedule(schedule, spec, unix_s))
    yield _row("forecast", _forecast(spec))
    yield _row(
        "no figures",
        f"for {spec.metrics.stale_after_seconds} s, from {spec.metrics.source}: "
        f"{_STALE[spec.metrics.on_stale]}",
    )
    for note in policy_notes(spec, unix_s):
        yield _row("note", f"{note.path}: {note.message}")


def policy_json(policy: PoolAutoscalingPolicy, unix_s: float) -> dict[str, object]:
    """Return the policy with all of its defaults, and what holds at a moment."""
    spec = policy.spec
    limits = {pool.name: limits_at(pool, spec.schedules, unix_s) for pool in spec.pools}
    return {
        "at": datetime.fromtimestamp(unix_s, UTC).isoformat(),
        "limits": {
            name: {"minReplicas": now.min_replicas, "maxReplicas": now.max_replicas}
            for name, now in limits.items()
        },
        "activeSchedules": [s.name for s in active_schedules(spec.schedules, unix_s)],
        "acceleratorCap": spec.budget.accelerator_cap,
        "notes": [{"path": n.path, "message": n.message} for n in policy_notes(spec, unix_s)],
        "policy": policy.model_dump(mode="json", by_alias=True),
    }


def _row(title: str, text: str) -> str:
    return f"  {title:<11} {text}"


def _pool_lines(pool: Pool, spec: PolicySpec, unix_s: float) -> Iterator[str]:
    now = limits_at(pool, spec.schedules, unix_s)
    why = f", by {', '.join(now.schedules)}" if now.schedules else ""
    first = pool.min_replicas if pool.initial_replicas is None else pool.initial_replicas
    yield (
        f"{pool.name} ({pool.role}): {now.min_replicas} to {now.max_replicas} replicas now{why}; "
        f"{first} at first, each with {counted(pool.accelerators_per_replica, 'accelerator')}"
    )
    for i, metric in enumerate(pool.metrics):
        yield _row("" if i else "grows", _metric(metric, pool, spec))
    yield from _growing(pool)
    yield from _shrinking(pool)
    start = pool.startup
    counts = "counts at once" if start.count_pending_as_capacity else "does not count until then"
    yield _row(
        "a start",
        f"is to take {start.expected_seconds} s and {counts}; given up after "
        f"{start.failure_deadline_seconds} s",
    )
    drain = pool.drain
    yield _row(
        "leaving",
        f"first those that start, {_VICTIMS[drain.victim_policy]}; "
        f"{drain.deadline_seconds} s for what it has, the rest is {_REST[drain.on_deadline]}",
    )
    if pool.scale_to_zero.enabled:
        zero = pool.scale_to_zero
        yield _row(
            "zero",
            f"both pools, after {zero.idle_seconds} s without a request; then up to "
            f"{zero.activation_queue_limit} wait at the router, "
            f"{zero.activation_timeout_seconds} s at most",
        )


def _metric(metric: Metric, pool: Pool, spec: PolicySpec) -> str:
    """Above which value, and how far."""
    target = metric.target.number
    edge = target * (1 + parse_quantity(pool.tolerance.scale_up))
    name = _measured(metric, spec)
    if metric.type in (MetricType.TTFT, MetricType.ITL):
        limit = f"{_seconds(edge)} (target {_seconds(target)})"
        return f"by one, or in panic by a multiple, where {name} is above {limit}"
    if metric.target.type is TargetType.UTILIZATION:
        return f"in proportion where {name} is above {_percent(edge)} (target {_percent(target)})"
    each = " a replica" if metric.target.type is TargetType.AVERAGE_VALUE else " in all"
    return f"in proportion where {name} is above {_number(edge)}{each} (target {_number(target)})"


def _measured(metric: Metric, spec: PolicySpec) -> str:
    slo = {MetricType.TTFT: spec.slo.ttft, MetricType.ITL: spec.slo.itl}.get(metric.type)
    if metric.type not in (MetricType.TTFT, MetricType.ITL):
        return metric.name
    return f"{metric.name} {'p95' if slo is None else slo.percentile}"


def _growing(pool: Pool) -> Iterator[str]:
    up = pool.behavior.scale_up
    if up.select_policy is SelectPolicy.DISABLED:
        yield _row("", "never: selectPolicy is Disabled")
        return
    wait = up.stabilization_window_seconds
    after = f", after {wait} s" if wait else ""
    yield _row("", f"at most {_rates(up.policies, up.select_policy)}{after}")
    if up.panic.enabled:
        yield _row(
            "",
            f"in panic where the last {up.panic.window_seconds} s ask for "
            f"{up.panic.threshold_percent} % of what is ready: nothing waits, and nothing shrinks "
            f"for {up.panic.hold_seconds} s after",
        )


def _shrinking(pool: Pool) -> Iterator[str]:
    down = pool.behavior.scale_down
    if down.select_policy is SelectPolicy.DISABLED:
        yield _row("shrinks", "never: selectPolicy is Disabled")
        return
    share = _percent(parse_quantity(pool.tolerance.scale_down))
    yield _row(
        "shrinks",
        f"where all metrics are more than {share} below target for "
        f"{down.stabilization_window_seconds} s; at most "
        f"{_rates(down.policies, down.select_policy)}",
    )
    if down.consolidation_check.enabled:
        left = down.consolidation_check.headroom_percent
        yield _row("", f"not where the others would have less than {left} % of room to the target")


def _rates(policies: tuple[RatePolicy, ...], select: SelectPolicy) -> str:
    told = [
        f"{p.value} % in {p.period_seconds} s"
        if p.type is RateType.PERCENT
        else f"{counted(p.value, 'replica')} in {p.period_seconds} s"
        for p in policies
    ]
    if len(told) == 1:
        return told[0]
    return f"{' or '.join(told)}, whichever is {'more' if select is SelectPolicy.MAX else 'less'}"


def _slo(spec: PolicySpec) -> str:
    held = (("TTFT", spec.slo.ttft), ("ITL", spec.slo.itl))
    told = (f"{n} {s.percentile} {s.target_milliseconds} ms" for n, s in held if s is not None)
    return ", ".join(told) or "none"


def _ratio(spec: PolicySpec) -> str:
    ratio, bounds = spec.ratio, spec.ratio.bounds
    if bounds is None:
        return "any"
    low, high = bounds
    held = f"{_number(low)} to {_number(high)}" if ratio.mode is RatioMode.RANGE else _number(low)
    return f"{held} prefill replicas for each of decode; else {_VIOLATED[ratio.on_violation]}"


def _budget(spec: PolicySpec) -> str:
    budget, cap = spec.budget, spec.budget.accelerator_cap
    least, most = (
        sum(getattr(pool, key) * pool.accelerators_per_replica for pool in spec.pools)
        for key in ("min_replicas", "max_replicas")
    )
    sizes = f"the least sizes take {least}, the largest {most}"
    if cap is None:
        return f"none; {sizes}"
    price = budget.cost_per_accelerator_hour
    cost = f", {_number(parse_quantity(price) * cap)} an hour" if price is not None else ""
    floor = f", at least {budget.min_accelerators}" if budget.min_accelerators else ""
    return f"at most {counted(cap, 'accelerator')} together{cost}{floor}; {sizes}"


def _schedule(schedule: Schedule, spec: PolicySpec, unix_s: float) -> str:
    limits = [
        f"{pool.name} {now.min_replicas} to {now.max_replicas}"
        for pool in spec.pools
        if (now := limits_under(pool, [schedule])).schedules
    ]
    start = window_start(schedule, unix_s)
    if start is not None:
        when = f"since {_local(start, schedule)}"
    else:
        when = f"next {_local(next_start(schedule, unix_s), schedule)}"
    hours = schedule.duration_seconds / 3600
    return (
        f"{schedule.name}: {', '.join(limits)} for {hours:g} h from "
        f"{schedule.start!r} {schedule.time_zone}, {when}"
    )


def _local(unix_s: float, schedule: Schedule) -> str:
    return f"{datetime.fromtimestamp(unix_s, ZoneInfo(schedule.time_zone)):%a %Y-%m-%d %H:%M}"


def _forecast(spec: PolicySpec) -> str:
    predictive = spec.predictive
    if predictive.mode is PredictiveMode.OFF:
        return "off"
    said = (
        f"{predictive.predictor.type}, every {predictive.interval_seconds} s, "
        f"{predictive.look_ahead_seconds} s ahead"
    )
    shown = "sets a floor" if predictive.mode is PredictiveMode.FORECAST else "shown, not applied"
    return f"{said}; {shown}"


def _seconds(value: Decimal) -> str:
    return f"{_number(value * 1000)} ms" if value < 1 else f"{_number(value)} s"


def _percent(share: Decimal) -> str:
    return f"{_number(share * 100)} %"


def _number(value: Decimal) -> str:
    return f"{value.normalize():,f}"
