"""The results of runs, searches and comparisons, as `result.json` holds them and reports read them.

Every figure is in the unit its name ends with. `schema_version` rises when a reader of the older
form would misread the new one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Literal[1] = 1


class Form(BaseModel):
    """Base of everything in the file: unknown keys are errors, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Percentile(Form):
    """An exact nearest-rank percentile with the interval its order statistics give."""

    share: float  # 0.99 for p99
    value: float | None  # None: the sample cannot bear it, see `too_few`
    low: float | None = None  # of the interval, at the run's confidence
    high: float | None = None
    too_few: bool = False  # n (1 - share) < 10


class Distribution(Form):
    """One figure over all measured requests that have it."""

    count: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    percentiles: tuple[Percentile, ...]
    curve: tuple[float, ...] = ()  # values at equal steps of share, least to greatest; for plots


class Interval(Form):
    """A share with its Wilson interval."""

    value: float
    low: float
    high: float
    count: int


class Check(Form):
    """One question about the run itself: can its figures be trusted?"""

    name: str  # tokens, faults, littles_law, rate, dispatch, loop_lag, steady, saturation
    is_ok: bool
    value: float | None
    limit: float | None
    message: str

    @property
    def state(self) -> Literal["ok", "failed", "not judged"]:
        """What to call it: what had nothing to look at has no value."""
        if not self.is_ok:
            return "failed"
        return "not judged" if self.value is None else "ok"


class PoolPoint(Form):
    """One pool in an interval of the run, as its autoscaler told last."""

    desired: int
    ready: int
    pending: int
    draining: int
    limited_by: str = ""  # the step that kept it from the size that metrics ask for


class TimelinePoint(Form):
    """What happened in one interval of the run."""

    at_s: float
    sent: int
    finished: int
    failed: int
    in_flight: int  # at its end
    tokens: int
    ttft_p50_ms: float | None = None
    replicas: dict[str, int] = {}  # by pool, where the target tells
    queued: int | None = None
    pools: dict[str, PoolPoint] = {}  # where an autoscaler is at work and the target tells


class Group(Form):
    """Figures of a part of the requests: a kind, a tenant, cached or not."""

    name: str
    num_requests: int
    distributions: dict[str, Distribution]
    attainment: Interval | None = None


class FaultOutcome(Form):
    """A fault the run brought, and what became of the requests until the next one."""

    at_s: float
    action: str  # kill, freeze, restart
    process: str
    for_s: float | None = None  # of a freeze
    failure: str = ""  # why it could not be brought
    back_s: float | None  # until the process was ready again; None: it was not
    recovery_s: float | None  # until the SLO held again; None: not before the next one
    num_requests: int  # open then, or due later
    num_failed: int


class StageBand(Form):
    """Where the time to the first token went for requests of one part of its distribution.

    Means, because only they add up: the stages and `outside` together are `ttft_ms`.
    """

    name: str  # such as `slowest 1 %`
    num_requests: int
    ttft_ms: float
    stages_ms: dict[str, float]  # by the server, in the order they happen
    outside_ms: float  # no stage: the network, the client, and how late it sent


class RunResult(Form):
    """One run."""

    kind: Literal["run"] = "run"
    schema_version: Literal[1] = SCHEMA_VERSION
    scenario: dict[str, Any]  # the whole scenario as validated
    scenario_digest: str
    target: dict[str, Any]  # facts of the target
    machine: dict[str, Any]  # fingerprint of where the clients ran
    commit: str
    seed: int
    started_at: str  # ISO 8601, UTC
    duration_s: float
    verdict: Literal["OK", "CLIENT_BOUND", "UNSTEADY", "SATURATED", "FAILED", "INTERRUPTED"]
    verdict_reason: str
    counts: dict[str, int]  # by status, and `measured`
    errors: dict[str, int]  # by code
    rates: dict[str, float]  # offered_rps, achieved_rps, goodput_rps, output_tok_s, input_tok_s
    distributions: dict[str, Distribution]  # ttft_ms, ttft_sent_ms, tpot_ms, itl_ms, e2e_ms, ...
    attainment: Interval | None  # of the SLO; None: the scenario has none
    stages_ms: dict[str, Distribution]  # by the server
    ttft_bands: tuple[StageBand, ...] = ()
    groups: tuple[Group, ...] = ()
    figures: dict[
        str, float | str | None
    ] = {}  # what a scenario adds: hit ratio, interference, ...
    checks: tuple[Check, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    faults: tuple[FaultOutcome, ...] = ()
    notes: tuple[str, ...] = ()  # plain sentences about the run
    cost: dict[str, Any] | None = None
    raw_file: str = ""
    raw_sha256: str = ""


class Probe(Form):
    """What one rate gave: a point of the goodput curve."""

    offered_rps: float
    achieved_rps: float
    attainment: Interval
    state: Literal["met", "missed", "unresolved"]  # the target share, by the interval
    reason: str
    duration_s: float
    output_tok_s: float
    user_tok_s: float | None  # of one stream: 1 / median tpot
    gpus: int | None = None
    prefill_workers: int | None = None  # where the split is searched, too
    decode_workers: int | None = None
    distributions: dict[str, Distribution] = {}

    @property
    def goodput_rps(self) -> tuple[float, float, float]:
        """Good requests a second: low end of the interval, value, high end."""
        share = self.attainment
        return (
            self.achieved_rps * share.low,
            self.achieved_rps * share.value,
            self.achieved_rps * share.high,
        )


class SearchResult(Form):
    """The highest rate that keeps the SLO."""

    kind: Literal["search"] = "search"
    schema_version: Literal[1] = SCHEMA_VERSION
    scenario: dict[str, Any]
    scenario_digest: str
    target: dict[str, Any]
    machine: dict[str, Any]
    commit: str
    seed: int
    started_at: str
    duration_s: float
    target_share: float  # of requests that must be good
    verdict: Literal["FOUND", "UNRESOLVED", "NONE"]
    verdict_reason: str
    best_rps: float | None
    knee_rps: float | None  # from here on goodput grows slower than load
    probes: tuple[Probe, ...]  # in the order they ran
    verified: tuple[Probe, ...] = ()  # the best rate again
    cost: dict[str, Any] | None = None


class MetricChange(Form):
    """One metric of two arms."""

    name: str  # ttft_p99_ms, goodput_rps, ...
    a: float | None
    b: float | None
    change: float | None  # b - a, of pairs where there are some
    low: float | None  # of the interval of the change
    high: float | None
    threshold: float | None  # a smaller change does not matter
    p_value: float | None  # after correction for the number of metrics
    is_paired: bool
    is_better_lower: bool
    verdict: Literal["better", "worse", "inconclusive"]
    reason: str


class CompareResult(Form):
    """Two runs beside each other: is B better than A?"""

    kind: Literal["compare"] = "compare"
    schema_version: Literal[1] = SCHEMA_VERSION
    name_a: str
    name_b: str
    a: RunResult
    b: RunResult
    confidence: float
    metrics: tuple[MetricChange, ...]
    verdict: Literal["better", "worse", "inconclusive"]
    verdict_reason: str
    figures: dict[str, float | str | None] = {}  # what is told beyond metrics: interference
    warnings: tuple[str, ...] = ()  # what differs between the arms and should not
