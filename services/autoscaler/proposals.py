"""What each metric asks for: the rules of the Kubernetes HPA, save for latencies. Pure.

A latency says nothing of how many replicas are missing: one more is proposed, or the panic multiple
of those that are ready where it is off by that much, and then nothing until these work and a
latency is measured that they had a part in. Nor does a good one say how many are too many: it has
no objection, and whatever wants fewer gets them one at a time. A queue says how much was missing in
the past: where it is known what a replica can do, it never asks for much more than the load needs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil

from services.autoscaler.capacity import tokens_per_second
from services.autoscaler.decision import Proposal
from services.autoscaler.observation import Observation
from services.autoscaler.policy import Metric, MetricsSource, MetricType, OnStale, TargetType
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.readings import (
    LATENCIES,
    fresh_load,
    fresh_value,
    had_no_requests,
)
from services.autoscaler.sizing import Sizing, overdue_s

_MOST_OF_NEED = 1.5  # replicas that a queue may ask for, of those that the load needs
_NONE = "none serves yet"
_ROUNDING = 1e-9  # a need of 6.0000000000000009 replicas is one of 6


@dataclass(frozen=True, slots=True)
class _Measured:
    """A metric beside its target."""

    name: str
    value: float
    target: float
    measured_at: float
    is_total: bool = False  # of all replicas, against a target for each

    def ratio(self, size: int) -> float:
        """Return how far off the target it is with so many replicas."""
        return self.value / (self.target * max(size, 1) if self.is_total else self.target)

    def needed(self, num_ready: int) -> int:
        """Return how many replicas in all would bring it to the target, if it is proportional."""
        replicas = self.ratio(1) * (1 if self.is_total else max(num_ready, 1))
        return round_up(replicas)


def round_up(replicas: float) -> int:
    """Return the next whole number of replicas."""
    return ceil(replicas - _ROUNDING)


def with_proposals(sizing: Sizing, source: MetricsSource, seen: Observation, now: float) -> Sizing:
    """Take the largest proposal; never less than now, where a figure is stale or missing."""
    proposals = tuple(_propose(m, sizing, source, seen, now) for m in sizing.pool.metrics)
    wanted = [p.replicas for p in proposals if p.value is not None]
    asked = max(wanted, default=sizing.before)
    has_stale = len(wanted) < len(proposals)
    is_held = has_stale and (not wanted or source.on_stale is OnStale.HOLD)
    sizing = replace(
        sizing, desired=asked, asked=asked, proposals=proposals,
        may_shrink=not has_stale, is_held=is_held,
    )  # fmt: skip
    if is_held or (has_stale and asked < sizing.before):
        stale = ", ".join(p.metric for p in proposals if p.value is None)
        return sizing.moved(sizing.before, "stale", f"no fresh figure of {stale}")
    return sizing


def with_single_steps(sizing: Sizing, source: MetricsSource, now: float) -> Sizing:
    """Shrink one at a time by a latency, and only by one measured since the last change."""
    has_latency = any(
        p.value is not None
        for p, m in zip(sizing.proposals, sizing.pool.metrics, strict=True)
        if m.type in LATENCIES
    )
    if not has_latency or sizing.desired >= sizing.before:
        return sizing
    latencies = (m for m in sizing.pool.metrics if m.type in LATENCIES)
    measured = [m for m in (_measure(x, sizing, source, now) for x in latencies) if m is not None]
    changed_at = sizing.state.changed_at
    if changed_at is not None and any(m.measured_at <= changed_at for m in measured):
        return sizing.moved(sizing.before, "latency", "none was measured since the last change")
    return sizing.moved(
        max(sizing.desired, sizing.before - 1), "latency", "one at a time, by a latency"
    )


def load_share(
    sizing: Sizing, source: MetricsSource, size: int, now: float, kinds: Collection[MetricType]
) -> float | None:
    """Return the worst metric if `size` replicas had the load of now, as a share of its target.

    Args:
        sizing: the pool.
        source: how old a figure may be.
        size: replicas that share the load.
        now: the moment.
        kinds: of metrics that are looked at.

    None where no such figure is fresh.
    """
    spread = len(sizing.staff.ready) / max(size, 1)
    metrics = (m for m in sizing.pool.metrics if m.type in kinds)
    measured = (_measure(m, sizing, source, now) for m in metrics)
    return max(
        (m.ratio(size) * (1.0 if m.is_total else spread) for m in measured if m is not None),
        default=None,
    )


def _propose(
    metric: Metric, sizing: Sizing, source: MetricsSource, seen: Observation, now: float
) -> Proposal:
    name, target = metric.name, float(metric.target.number)
    measured = _measure(metric, sizing, source, now)
    if measured is None and metric.type in LATENCIES and had_no_requests(seen, source, now):
        measured = _Measured(name, 0.0, target, now)
    if measured is None:
        return Proposal(name, None, target, sizing.before, "stale or missing")
    step = _latency_step if metric.type in LATENCIES else _proportional
    replicas, reason = step(measured, sizing, now)
    if metric.type is MetricType.QUEUED_TOKENS:
        most = _most_for_load(sizing, source, seen, now)
        if most is not None and replicas > most:
            replicas = most
            reason += f", and the load needs no more than {most}"
    return Proposal(name, measured.value, target, replicas, reason)


def _measure(metric: Metric, sizing: Sizing, source: MetricsSource, now: float) -> _Measured | None:
    name, target = metric.name, float(metric.target.number)
    value = fresh_value(sizing.seen, name, source, now)
    measured_at = now if value is None else sizing.seen.readings[name].measured_at
    if metric.type is MetricType.TTFT:
        # Prompts that wait have no TTFT yet: it would look best where nothing gets through.
        wait_s = _queue_wait_s(sizing, source, now)
        if wait_s is not None and wait_s > (target if value is None else value):
            value, measured_at = wait_s, now
    if value is None or target <= 0:
        return None
    is_total = metric.target.type is TargetType.AVERAGE_VALUE
    return _Measured(name, value, target, measured_at, is_total)


def _queue_wait_s(sizing: Sizing, source: MetricsSource, now: float) -> float | None:
    queued = fresh_value(sizing.seen, MetricType.QUEUED_TOKENS.value, source, now)
    pace = tokens_per_second(sizing.state.capacity, None)
    num_ready = len(sizing.staff.ready)
    if queued is None or pace is None or num_ready == 0:
        return None
    return queued / (pace * num_ready)


def _most_for_load(
    sizing: Sizing, source: MetricsSource, seen: Observation, now: float
) -> int | None:
    load, pace = fresh_load(seen, source, now), tokens_per_second(sizing.state.capacity, None)
    if load is None or pace is None or load.span_s <= 0:
        return None
    rate = max(load.prompt_tokens / load.span_s, sizing.state.series.ahead or 0.0)
    needed = round_up(_MOST_OF_NEED * rate / pace)
    return max(needed + sizing.staff.num_late, sizing.before)


def _proportional(measured: _Measured, sizing: Sizing, now: float) -> tuple[int, str]:
    up, down = _tolerances(sizing)
    late, before = sizing.staff.num_late, sizing.before
    have = before - late
    ratio = measured.ratio(have)
    if not measured.is_total and ratio > 1 and sizing.pool.startup.count_pending_as_capacity:
        # Those that start will take their share: as if they did already, with nothing to do so far.
        ratio *= min(1.0, len(sizing.staff.ready) / max(have, 1)) if have else 1.0
        if ratio <= 1 + up:
            return before, "within tolerance, with those that start"
    if 1 - down <= ratio <= 1 + up:
        return before, "within tolerance"
    if ratio < 1 and not sizing.staff.ready:
        return before, _NONE
    needed = measured.needed(len(sizing.staff.ready))
    if ratio > 1:
        return max(before, needed + late), f"{ratio:.2f} of its target"
    return min(before, needed), f"{ratio:.2f} of its target"


def _latency_step(measured: _Measured, sizing: Sizing, now: float) -> tuple[int, str]:
    up, down = _tolerances(sizing)
    before, changed_at = sizing.before, sizing.state.changed_at
    ratio = measured.ratio(1)
    if 1 - down <= ratio <= 1 + up:
        return before, "within tolerance"
    if ratio < 1:
        is_served = bool(sizing.staff.ready)
        return (min(before, 1), f"{ratio:.2f} of its target") if is_served else (before, _NONE)
    if changed_at is not None and measured.measured_at <= changed_at:
        return before, "measured before the last change"
    panic = sizing.pool.behavior.scale_up.panic
    multiple = panic.threshold_percent / 100
    if panic.enabled and ratio >= multiple:
        wanted = round_up(multiple * sizing.staff.num_settled)
        if wanted > before:
            return wanted, f"{ratio:.2f} of its target: {multiple:g} times those that work"
    if sizing.pool.startup.count_pending_as_capacity and _is_coming(sizing, now):
        return before, f"{ratio:.2f} of its target, and more come"
    return before + 1, f"{ratio:.2f} of its target: one more"


def _is_coming(sizing: Sizing, now: float) -> bool:
    """Tell whether capacity was asked for that can still be expected."""
    if sizing.staff.num_coming > 0:
        return True
    changed_at = sizing.state.changed_at
    is_short = sizing.staff.num_live < sizing.before  # what runs replicas has not shown them yet
    return is_short and changed_at is not None and now - changed_at <= overdue_s(sizing.pool)


def _tolerances(sizing: Sizing) -> tuple[float, float]:
    tolerance = sizing.pool.tolerance
    return float(parse_quantity(tolerance.scale_up)), float(parse_quantity(tolerance.scale_down))
