"""A policy on simulated pools: what became of a load, and why sizes changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.autoscaler.decision import PoolDecision
from services.autoscaler.policy import Mode, Pool, PoolAutoscalingPolicy, Role
from services.autoscaler.schedules import limits_at
from services.common.wording import counted
from services.sim.autoscaling.decided import DecidedPools
from services.sim.autoscaling.profile import Profile
from services.sim.cluster import DECODE, PREFILL, ClusterSpec
from services.sim.performance import PerformanceModel
from services.sim.report import Served, SimReport
from services.sim.simulate import simulate
from services.sim.workload import Workload

_SIM_POOL = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
_FIGURES: dict[str, Callable[[Served], float | None]] = {
    "ttft_s": lambda request: request.ttft_s,
    "tpot_s": lambda request: request.tpot_s,
}
_MOST_TOLD = 40  # changes in words; all are in the JSON


@dataclass(frozen=True, slots=True)
class Change:
    """A size that was decided to be another."""

    at_s: float
    pool: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run."""

    load: Workload
    policy: PoolAutoscalingPolicy  # with the limits that held
    model: PerformanceModel
    report: SimReport
    changes: tuple[Change, ...]
    sizes: dict[str, tuple[int, int, int]]  # by pool: at first, least and most

    @property
    def limits_s(self) -> tuple[float | None, float | None]:
        """Seconds to the first token, and between tokens; None = no limit."""
        slo = self.policy.spec.slo
        ttft, itl = (
            None if one is None else one.target_milliseconds / 1000 for one in (slo.ttft, slo.itl)
        )
        return ttft, itl


def simulated(
    policy: PoolAutoscalingPolicy, unix_s: float, load: Workload, model: PerformanceModel, seed: int
) -> Simulation:
    """Run a load through pools that the policy sizes, with the limits of one moment."""
    policy = _as_of(policy, unix_s)
    pools = {_SIM_POOL[pool.role]: pool for pool in policy.spec.pools}
    first = {name: _first_size(pool) for name, pool in pools.items()}
    spec = ClusterSpec(
        num_prefill=first[PREFILL],
        num_decode=first[DECODE],
        model=model,
        startup=lambda worker: _start_s(pools, worker),
        hold_s=max(_hold_s(pool) for pool in pools.values()),
        drain_s=float(max(pool.drain.deadline_seconds for pool in pools.values())),
    )
    controller = DecidedPools(policy, Profile(model))
    report = simulate(load, spec, seed=seed, controller=controller)
    changes, sizes = [], {pool.name: [first[name]] for name, pool in pools.items()}
    for decision in controller.decisions:
        for made in decision.pools:
            sizes[made.pool].append(made.desired)
            if made.desired != made.current:
                changes.append(_change(decision.at, made))
    told = {pool: (each[0], min(each), max(each)) for pool, each in sizes.items()}
    return Simulation(load, policy, model, report, tuple(changes), told)


def simulation_lines(found: Simulation) -> Iterator[str]:
    """Write it for people."""
    report, (ttft_s, itl_s) = found.report, found.limits_s
    yield (
        f"{found.load.name}: {len(found.load.arrivals)} requests over {report.duration_s:.0f} s, "
        f"pools sized by {found.policy.metadata.name}, {found.model.name}"
    )
    yield f"speed of workers: {found.model.source}"
    yield (
        f"in time {report.attainment(ttft_s, itl_s):.2%} (TTFT {_limit(ttft_s)}, "
        f"TPOT {_limit(itl_s)}), refused {report.refused_share:.2%}"
    )
    yield (
        f"TTFT p50 {_ms(report, 'ttft_s', 0.5)}, p95 {_ms(report, 'ttft_s', 0.95)}; "
        f"TPOT p50 {_ms(report, 'tpot_s', 0.5)}, p95 {_ms(report, 'tpot_s', 0.95)}"
    )
    for pool in found.policy.spec.pools:
        first, least, most = found.sizes[pool.name]
        use = report.pools[_SIM_POOL[pool.role]]
        busy = use.busy_s / use.provisioned_s if use.provisioned_s else 0.0
        yield (
            f"{pool.name}: {counted(first, 'replica')} at first, {least} to {most} wanted later, "
            f"{use.provisioned_s / 3600:.2f} replica-hours, busy {busy:.0%}"
        )
    yield counted(len(found.changes), "change")
    for change in found.changes[:_MOST_TOLD]:
        yield (
            f"  {change.at_s:8.0f} s  {change.pool} {change.before} -> {change.after}: "
            f"{change.reason}"
        )
    if len(found.changes) > _MOST_TOLD:
        yield f"  and {len(found.changes) - _MOST_TOLD} more (--json has all)"


def simulation_json(found: Simulation) -> dict[str, object]:
    """Return it as one JSON object, requests left out."""
    report, (ttft_s, itl_s) = found.report, found.limits_s
    latencies = {
        f"{key}_p{share * 100:.0f}": report.quantile(figure, share)
        for key, figure in _FIGURES.items()
        for share in (0.5, 0.95, 0.99)
    }
    return {
        "load": found.load.name,
        "num_requests": len(found.load.arrivals),
        "duration_s": report.duration_s,
        "policy": found.policy.metadata.name,
        "performance": found.model.model_dump(mode="json", exclude_none=True),
        "attainment": report.attainment(ttft_s, itl_s),
        "refused_share": report.refused_share,
        **latencies,
        "pools": {
            pool.name: {
                "first": found.sizes[pool.name][0],
                "least": found.sizes[pool.name][1],
                "most": found.sizes[pool.name][2],
                "replica_hours": report.pools[_SIM_POOL[pool.role]].provisioned_s / 3600,
                "busy_s": report.pools[_SIM_POOL[pool.role]].busy_s,
            }
            for pool in found.policy.spec.pools
        },
        "changes": [
            {"at_s": c.at_s, "pool": c.pool, "before": c.before, "after": c.after,
             "reason": c.reason}
            for c in found.changes
        ],
    }  # fmt: skip


def _as_of(policy: PoolAutoscalingPolicy, unix_s: float) -> PoolAutoscalingPolicy:
    """Have the limits of a moment instead of schedules: virtual time has no date."""
    spec = policy.spec
    pools = []
    for pool in spec.pools:
        now = limits_at(pool, spec.schedules, unix_s)
        size = {"min_replicas": now.min_replicas, "max_replicas": now.max_replicas}
        pools.append(pool.model_copy(update=size))
    changes = {"pools": tuple(pools), "schedules": (), "mode": Mode.AUTO}
    return policy.model_copy(update={"spec": spec.model_copy(update=changes)})


def _first_size(pool: Pool) -> int:
    """The simulator begins with a worker in each pool."""
    first = pool.min_replicas if pool.initial_replicas is None else pool.initial_replicas
    return max(1, min(max(first, pool.min_replicas), pool.max_replicas))


def _start_s(pools: dict[str, Pool], worker: str) -> float:
    pool = next(pool for name, pool in pools.items() if worker.startswith(name))
    return float(pool.startup.expected_seconds)


def _hold_s(pool: Pool) -> float:
    zero = pool.scale_to_zero
    return float(zero.activation_timeout_seconds) if zero.enabled else 0.0


def _change(at_s: float, made: PoolDecision) -> Change:
    return Change(at_s, made.pool, made.current, made.desired, made.reason)


def _limit(seconds: float | None) -> str:
    return "any" if seconds is None else f"within {seconds * 1000:g} ms"


def _ms(report: SimReport, figure: str, share: float) -> str:
    value = report.quantile(_FIGURES[figure], share)
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 10 else f"{value * 1000:.0f} ms"
