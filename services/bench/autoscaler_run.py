"""One way to size pools on one load: simulated, and judged. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.autoscaler.policy import Pool, Role
from services.bench.autoscaler_cases import Case
from services.bench.result import Figure
from services.sim.autoscaling.decided import DecidedPools
from services.sim.autoscaling.foresight import Foreseen, by_rates, least_by_windows, schedule_of
from services.sim.autoscaling.hpa import Gauge, Hpa, HpaConfig, HpaPools, in_flight, queued_tokens
from services.sim.autoscaling.kpa import Kpa, KpaConfig, KpaPools
from services.sim.autoscaling.planner import Planner, PlannerConfig, Trend
from services.sim.autoscaling.profile import Profile
from services.sim.autoscaling.recorder import (
    Recorder,
    Sizes,
    direction_changes,
    most_within,
    peak,
)
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Controller
from services.sim.report import OK, REFUSED, Served, SimReport
from services.sim.simulate import simulate

GOAL = 0.95
SETTLING_TICKS = 3
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of a replica's rate, oracles plan by
_PLANNER_S = 60.0
_NAMES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
_GAUGES: Mapping[str, Gauge] = {PREFILL: queued_tokens, DECODE: in_flight}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a load."""

    attainment: float  # share of all requests that were in time, refused ones not
    admitted_attainment: float  # the same of those let in
    worker_hours: float  # of the pools that are sized, from asking for a worker until it is gone
    violating_s: float  # seconds that first tokens were late, added up
    turns: int  # most changes of direction within one stabilisation window, of any pool
    overshoot: float | None  # largest size over what a step needs
    settled: float | None  # share in time of those let in once a step should be dealt with
    refused_share: float

    def figures(self, prefix: str, oracle: Outcome | None) -> dict[str, Figure]:
        """Name them."""
        ratio = None if oracle is None else round(self.worker_hours / oracle.worker_hours, 4)
        told: dict[str, Figure] = {
            "attainment": round(self.attainment, 4),
            "admitted_attainment": round(self.admitted_attainment, 4),
            "worker_hours": round(self.worker_hours, 4),
            "hours_to_oracle": ratio,
            "violating_request_s": round(self.violating_s, 1),
            "turns_in_window": self.turns,
            "overshoot": None if self.overshoot is None else round(self.overshoot, 3),
            "settled_attainment": None if self.settled is None else round(self.settled, 4),
            "refused_share": round(self.refused_share, 4),
        }
        return {f"{prefix}.{key}": value for key, value in told.items()}


def run(case: Case, controller: Controller, seed: int) -> Outcome:
    """Simulate and judge."""
    recorder = Recorder(controller)
    report = simulate(case.workload, case.spec, seed=seed, controller=recorder)
    return _judged(case, report, recorder.trail)


def ours(case: Case) -> Controller:
    """Return the autoscaler on the case's policy."""
    return DecidedPools(case.policy, Profile(case.spec.model))


def hpa(case: Case, times: float = 1.0) -> Controller:
    """Return an HPA for each pool, at its target or a multiple of it."""
    return HpaPools(
        {
            name: (
                Hpa(HpaConfig(target * times, pool.min_replicas, pool.max_replicas)),
                _GAUGES[name],
            )
            for name, target, pool in _targets(case, case.hpa_targets)
        }
    )


def kpa(case: Case, times: float = 1.0) -> Controller:
    """Return a KPA for each pool, at its target or a multiple of it."""
    return KpaPools(
        {
            name: (Kpa(KpaConfig(target * times, pool.min_replicas, pool.max_replicas)), in_flight)
            for name, target, pool in _targets(case, case.kpa_targets)
        }
    )


def planner(case: Case) -> Controller:
    """Return a planner of both pools' SLA that carries on a trend."""
    pools = [pool for _, _, pool in _targets(case, case.hpa_targets)]
    config = PlannerConfig(
        ttft_s=case.ttft_s,
        itl_s=case.tpot_s or 1.0,
        min_replicas=min(pool.min_replicas for pool in pools),
        max_replicas=max(pool.max_replicas for pool in pools),
    )
    profile = Profile(case.spec.model)
    return Planner(config, profile, Trend(), pools=frozenset(case.pools), tick_s=_PLANNER_S)


def oracle(case: Case, seed: int) -> Outcome:
    """Return the tightest plan of one who knows the future and still keeps the SLO."""
    for share in _SHARES:
        plans = [_foreseen(case, pool, share) for pool in case.pools]
        sizes = {f"num_{plan.pool}": plan.initial for plan in plans}
        begun = replace(case, spec=replace(case.spec, **sizes))  # type: ignore[arg-type]
        outcome = run(begun, schedule_of(plans, case.startup_s), seed)
        if outcome.attainment >= GOAL:
            break
    return outcome


def needed_for_step(case: Case) -> int:
    """Return the prefill replicas that a step needs while it lasts, without any queue before it."""
    assert case.step is not None, "only a step has a need of its own"
    during = [a for a in case.workload.arrivals if case.step.begins_s <= a.at_s < case.step.ends_s]
    isl = sum(a.num_tokens for a in during) / len(during)
    return max(
        least_by_windows(
            during,
            tokens_s=Profile(case.spec.model).prefill_tokens_s(isl),
            ttft_s=case.ttft_s,
            window_s=case.step.ends_s,
            goal=GOAL,
        )
    )


def _targets(case: Case, targets: Mapping[str, float]) -> list[tuple[str, float, Pool]]:
    """Return each sized pool with its target, and the policy's pool for its bounds."""
    pools = {_NAMES[pool.role]: pool for pool in case.policy.spec.pools}
    return [(name, target, pools[name]) for name, target in targets.items()]


def _foreseen(case: Case, pool: str, share: float) -> Foreseen:
    arrivals, profile = case.workload.arrivals, Profile(case.spec.model)
    isl = sum(a.num_tokens for a in arrivals) / len(arrivals)
    osl = sum(a.output_tokens for a in arrivals) / len(arrivals)
    prompts_s = profile.prefill_tokens_s(isl) * share
    if not case.follows_rates:
        sizes = least_by_windows(
            arrivals,
            tokens_s=prompts_s,
            ttft_s=case.ttft_s,
            window_s=case.oracle_window_s,
            goal=GOAL,
        )
        return Foreseen(pool, sizes, case.oracle_window_s)
    if pool == PREFILL:
        work, tokens_s = [(a.at_s, float(a.num_tokens)) for a in arrivals], prompts_s
    else:
        itl_s = case.tpot_s or 1.0
        tokens_s = profile.decode_tokens_s(itl_s, isl + osl / 2) * share
        # An answer is written from its first token to its last: half of its time after its coming.
        work = [(a.at_s + a.output_tokens * itl_s / 2, float(a.output_tokens)) for a in arrivals]
    sizes = by_rates(
        work, tokens_s=tokens_s, window_s=case.oracle_window_s, duration_s=arrivals[-1].at_s
    )
    return Foreseen(pool, sizes, case.oracle_window_s)


def _judged(case: Case, report: SimReport, trail: Sequence[Sizes]) -> Outcome:
    requests = report.requests
    admitted = [r for r in requests if r.status != REFUSED]
    windows = {
        _NAMES[pool.role]: pool.behavior.scale_down.stabilization_window_seconds
        for pool in case.policy.spec.pools
    }
    return Outcome(
        attainment=_share(case, requests),
        admitted_attainment=_share(case, admitted),
        worker_hours=sum(report.pools[pool].provisioned_s for pool in case.pools) / 3600,
        violating_s=sum(_late_s(case, r) for r in admitted),
        turns=max(
            most_within(direction_changes(trail, pool), max(1.0, windows[pool]))
            for pool in case.pools
        ),
        overshoot=peak(trail, PREFILL) / needed_for_step(case) if case.step else None,
        settled=_settled(case, admitted),
        refused_share=1 - len(admitted) / len(requests),
    )


def _settled(case: Case, admitted: Sequence[Served]) -> float | None:
    if case.step is None:
        return None
    ticks_s = SETTLING_TICKS * case.policy.spec.tick_seconds
    from_s = case.step.begins_s + case.startup_s + ticks_s
    return _share(case, [r for r in admitted if from_s <= r.arrived_s < case.step.ends_s])


def _share(case: Case, requests: Sequence[Served]) -> float:
    good = sum(r.is_good(case.ttft_s, case.tpot_s) for r in requests)
    return good / len(requests) if requests else 0.0


def _late_s(case: Case, served: Served) -> float:
    assert served.status == OK, "nobody dies in these runs"
    return max(0.0, (served.ttft_s or 0.0) - case.ttft_s)
