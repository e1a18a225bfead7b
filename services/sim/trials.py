"""One size of a cluster, tried on several loads: how many requests it serves well."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.common.clock import Clock
from services.common.progress import Progress
from services.common.shares import wilson_bounds
from services.sim.cluster import ClusterSpec
from services.sim.cost import PoolUsage, RunUsage, TenantUsage, standing_usd_per_h
from services.sim.performance import PerformanceModel
from services.sim.prices import Prices, Role
from services.sim.report import OK, Served, SimReport
from services.sim.simulate import simulate
from services.sim.workload import Workload

CONFIDENCE = 0.95
# Student's t of that confidence, by degrees of freedom from 1 on: few runs say little.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
WARM_UP = 0.1  # share of a run's requests that are not counted at least
ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")

Outcome = Literal["meets", "unresolved", "fails"]


class OutOfTime(Exception):
    """The search has used up its time."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to be good, and the share of requests that have to."""

    ttft_s: float
    tpot_s: float
    attain: float = 0.95


@dataclass(frozen=True, slots=True)
class Size:
    """Workers of two pools, or of one whose workers do both."""

    num_prefill: int = 0
    num_decode: int = 0
    num_aggregated: int = 0
    chunk_tokens: int = 0  # of a prompt in one step; 0 = as the performance model says

    def workers(self) -> dict[Role, int]:
        """Return the number of workers of each pool."""
        return {
            "prefill": self.num_prefill, "decode": self.num_decode,
            "aggregated": self.num_aggregated,
        }  # fmt: skip

    def usd_per_h(self, prices: Prices) -> float:
        """Return what its workers cost by being there, an hour of them."""
        return sum(n * standing_usd_per_h(role, prices) for role, n in self.workers().items())

    def __str__(self) -> str:
        if self.num_aggregated:
            chunks = f" with chunks of {self.chunk_tokens} tokens" if self.chunk_tokens else ""
            return f"one pool of {self.num_aggregated}{chunks}"
        return f"{self.num_prefill} prefill + {self.num_decode} decode"


@dataclass(frozen=True, slots=True)
class Run:
    """One load, and the seed of everything else that is drawn."""

    workload: Workload
    seed: int
    num_lead: int = 0  # its first requests, which came before it and fill the caches

    @property
    def num_uncounted(self) -> int:
        """Number of its first requests that say nothing: caches and queues fill."""
        return max(self.num_lead, int(len(self.workload.arrivals) * WARM_UP))

    @property
    def num_counted(self) -> int:
        """Number of the others."""
        return len(self.workload.arrivals) - self.num_uncounted


@dataclass(frozen=True, slots=True)
class Trial:
    """What one size made of all runs; requests are counted after the warm-up."""

    size: Size
    attain: float  # asked for
    by_run: tuple[float, ...]  # attainment of each run there was
    by_end: float  # attainment of the last third of every run: lower where queues only grow
    num_requests: int
    num_good: int
    num_late: int  # first token after its limit
    num_slow: int  # mean gap above its limit
    num_refused: int  # no worker could hold it
    usage: RunUsage  # of whole runs

    @property
    def attainment(self) -> float:
        """Share of requests that were good."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval of the attainment: of requests, or of runs where those differ by more.

        Requests of one run wait in the same queues, so runs may differ more than chance has it.
        """
        low, high = wilson_bounds(self.num_good, self.num_requests, CONFIDENCE)
        if len(self.by_run) < 2:
            return low, high
        quantile = _T[min(len(self.by_run) - 1, len(_T)) - 1]
        half = quantile * statistics.stdev(self.by_run) / math.sqrt(len(self.by_run))
        return max(0.0, min(low, self.attainment - half)), min(
            1.0, max(high, self.attainment + half)
        )

    @property
    def outcome(self) -> Outcome:
        """Whether it is enough: above the target for certain, and to the ends of the runs."""
        low, high = self.bounds
        if high < self.attain:
            return "fails"
        return "meets" if min(low, self.by_end) >= self.attain else "unresolved"

    @property
    def runs_met(self) -> int:
        """Number of runs that reached the target each on its own."""
        return sum(share >= self.attain for share in self.by_run)

    @property
    def limit(self) -> str:
        """Name what more requests miss: TTFT, TPOT or memory."""
        missed = {"TTFT": self.num_late, "TPOT": self.num_slow, "memory": self.num_refused}
        worst = max(missed, key=lambda name: missed[name])
        return worst if missed[worst] else "nothing"


@dataclass(slots=True)
class Trials:
    """All sizes tried so far on the same runs."""

    runs: tuple[Run, ...]
    model: PerformanceModel
    slo: Slo
    clock: Clock
    deadline: float  # of the clock
    tell: Progress
    what: str = "trying"
    tried: dict[Size, Trial] = field(default_factory=dict)

    def of(self, size: Size) -> Trial:
        """Try a size, once; runs that cannot change the outcome any more are left out.

        Raises:
            OutOfTime: too late to begin.
        """
        found = self.tried.get(size)
        if found is None:
            found = self.tried[size] = self._tried(size)
        return found

    def is_enough(self, size: Size) -> bool:
        """Whether a size meets the target for certain."""
        return self.of(size).outcome == "meets"

    def _tried(self, size: Size) -> Trial:
        reports: list[SimReport] = []
        spec = spec_of(size, self.model)
        for run in self.runs:
            if self.clock.now() >= self.deadline:
                raise OutOfTime(f"{size} could not be tried on {run.workload.name}")
            self.tell(f"{self.what} {size}", len(reports) / len(self.runs))
            reports.append(simulate(run.workload, spec, seed=run.seed))
            trial = _trial(size, self.slo, self.runs, reports)
            if self._is_hopeless(trial, len(reports)):
                break
        self.tell(f"{self.what} {size}: {trial.attainment:.3f}", 1.0)
        return trial

    def _is_hopeless(self, trial: Trial, num_runs: int) -> bool:
        """Whether the target is missed even if all that is left to run goes well."""
        left = sum(run.num_counted for run in self.runs[num_runs:])
        return trial.num_good + left < self.slo.attain * (trial.num_requests + left)


def spec_of(size: Size, model: PerformanceModel) -> ClusterSpec:
    """Describe a cluster of that size."""
    if size.chunk_tokens:
        model = model.model_copy(update={"chunk_tokens": size.chunk_tokens})
    return ClusterSpec(
        num_prefill=size.num_prefill,
        num_decode=size.num_decode,
        num_aggregated=size.num_aggregated,
        model=model,
    )


def _trial(size: Size, slo: Slo, runs: Sequence[Run], reports: Sequence[SimReport]) -> Trial:
    """Sum up the first runs, of which there are reports."""
    counted = [report.after(run.num_uncounted) for run, report in zip(runs, reports, strict=False)]
    requests = [request for report in counted for request in report.requests]
    last = [r.is_good(slo.ttft_s, slo.tpot_s) for c in counted for r in c.skip(2 / 3).requests]
    return Trial(
        size=size,
        attain=slo.attain,
        by_run=tuple(report.attainment(slo.ttft_s, slo.tpot_s) for report in counted),
        by_end=sum(last) / len(last),
        num_requests=len(requests),
        num_good=sum(r.is_good(slo.ttft_s, slo.tpot_s) for r in requests),
        num_late=sum(not r.is_good(slo.ttft_s, None) for r in requests if r.status == OK),
        num_slow=sum(not r.is_good(None, slo.tpot_s) for r in requests if r.status == OK),
        num_refused=sum(r.status != OK for r in requests),
        usage=usage_of(reports, slo),
    )


def usage_of(reports: Sequence[SimReport], slo: Slo) -> RunUsage:
    """Add up what was provisioned, busy and served in several runs of one cluster."""
    served = [r for report in reports for r in report.requests]
    answered = [r for r in served if r.status == OK]
    good = [r for r in answered if r.is_good(slo.ttft_s, slo.tpot_s)]
    return RunUsage(
        duration_s=sum(report.duration_s for report in reports),
        pools=tuple(
            _pool_usage(role, reports) for role in ROLES if all(role in r.pools for r in reports)
        ),
        tenants=(
            TenantUsage(
                tenant="all",
                input_tokens=sum(r.num_tokens for r in answered),
                cached_tokens=sum(r.cached_tokens for r in answered),
                output_tokens=sum(r.output_tokens for r in answered),
                good_tokens=sum(map(_tokens, good)),
            ),
        ),
        num_violated=len(answered) - len(good),
        num_refused=len(served) - len(answered),
    )


def _tokens(request: Served) -> int:
    return request.num_tokens + request.output_tokens


def _pool_usage(role: Role, reports: Sequence[SimReport]) -> PoolUsage:
    pools = [report.pools[role] for report in reports]
    return PoolUsage(
        role=role,
        provisioned_s=sum(pool.provisioned_s for pool in pools),
        busy_s=sum(pool.busy_s for pool in pools),
        prefill_busy_s=sum(pool.prefill_busy_s for pool in pools),
        decode_busy_s=sum(pool.decode_busy_s for pool in pools),
    )
