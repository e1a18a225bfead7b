"""The result of one run, as it is written to `result.json` and read by reports and comparisons.

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


class Interval(Form):
    """A share with its Wilson interval."""

    value: float
    low: float
    high: float
    count: int


class Check(Form):
    """One question about the run itself: can its figures be trusted?"""

    name: str  # littles_law, rate, dispatch, loop_lag, steady, saturation
    is_ok: bool
    value: float | None
    limit: float | None
    message: str


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


class Group(Form):
    """Figures of a part of the requests: a kind, a tenant, cached or not."""

    name: str
    num_requests: int
    distributions: dict[str, Distribution]
    attainment: Interval | None = None


class RunResult(Form):
    """One run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    scenario: dict[str, Any]  # the whole scenario as validated
    scenario_digest: str
    target: dict[str, Any]  # facts of the target
    machine: dict[str, Any]  # fingerprint of where the clients ran
    commit: str
    seed: int
    started_at: str  # ISO 8601, UTC
    duration_s: float
    verdict: Literal["OK", "CLIENT_BOUND", "UNSTEADY", "SATURATED", "FAILED"]
    verdict_reason: str
    counts: dict[str, int]  # by status, and `measured`
    errors: dict[str, int]  # by code
    rates: dict[str, float]  # offered_rps, achieved_rps, goodput_rps, output_tok_s, input_tok_s
    distributions: dict[str, Distribution]  # ttft_ms, ttft_sent_ms, tpot_ms, itl_ms, e2e_ms, ...
    attainment: Interval | None  # of the SLO; None: the scenario has none
    stages_ms: dict[str, Distribution]  # by the server
    groups: tuple[Group, ...] = ()
    figures: dict[
        str, float | str | None
    ] = {}  # what a scenario adds: hit ratio, interference, ...
    checks: tuple[Check, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    cost: dict[str, Any] | None = None
    raw_file: str = ""
    raw_sha256: str = ""
