"""The policy file: how each pool is sized, and what both together must keep to.

The one source of the file's schema, of the CRD and of the documentation. Fields are named in snake
case here and in camel case in the file, by the names of the Kubernetes HPA wherever it has one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from services.autoscaler.quantity import Quantity
from services.common.settings import Section, setting

API_VERSION = "autoscaling.isthmus.dev/v1alpha1"
KIND = "PoolAutoscalingPolicy"


class PolicySection(Section):
    """Base of every part of the file."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Mode(StrEnum):
    """Whether decisions are acted on."""

    AUTO = "Auto"
    DRY_RUN = "DryRun"  # decides and records, changes nothing
    PAUSED = "Paused"


class Role(StrEnum):
    """What the workers of a pool do."""

    PREFILL = "Prefill"
    DECODE = "Decode"


class MetricType(StrEnum):
    """What is measured."""

    TTFT = "TTFT"  # seconds, queue wait included
    ITL = "ITL"  # seconds between tokens
    QUEUED_TOKENS = "QueuedTokens"  # of prompts, less expected prefix-cache hits
    KV_UTILIZATION = "KVUtilization"  # (scheduled + queued KV tokens) / KV tokens there is room for
    EXTERNAL = "External"


class TargetType(StrEnum):
    """How a measurement is compared with its target."""

    VALUE = "Value"  # of the pool as a whole
    AVERAGE_VALUE = "AverageValue"  # for each replica
    UTILIZATION = "Utilization"  # percent


class MetricTarget(PolicySection):
    """What a metric is held at: exactly the one field that belongs to its type."""

    type: TargetType
    value: Quantity | None = setting(None, "of the pool as a whole")
    average_value: Quantity | None = setting(None, "for each replica")
    average_utilization: int | None = setting(None, "mean over replicas", unit="%", ge=1, le=100)


class ExternalMetricName(PolicySection):
    """A metric by name."""

    name: str = setting(..., "name of the metric", public=True, min_length=1, max_length=253)


class ExternalMetric(PolicySection):
    """A metric that others measure."""

    metric: ExternalMetricName


class Metric(PolicySection):
    """One reason to have more or fewer replicas; the largest proposal wins."""

    type: MetricType
    target: MetricTarget
    external: ExternalMetric | None = setting(None, "which one, of type External")


class Tolerance(PolicySection):
    """How far a metric may be off its target, as a share, before a size is changed."""

    scale_up: Quantity = setting("0.05", "above the target", public=True)
    scale_down: Quantity = setting("0.10", "below the target", public=True)


class RateType(StrEnum):
    """What a rate policy counts."""

    PERCENT = "Percent"
    PODS = "Pods"


class RatePolicy(PolicySection):
    """How much a size may change within a period."""

    type: RateType
    value: int = setting(..., "replicas, or percent of those there were", gt=0)
    period_seconds: int = setting(..., "the period looked back over", unit="s", ge=1, le=1800)


class SelectPolicy(StrEnum):
    """Which of several rate policies counts."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class Panic(PolicySection):
    """Grow at once where the last seconds alone ask for a multiple of what is there."""

    enabled: bool = setting(True, "whether it may")
    window_seconds: int = setting(6, "the last seconds looked at", unit="s", ge=1, le=600)
    threshold_percent: int = setting(200, "wanted, of what is ready", unit="%", gt=100, le=1000)
    hold_seconds: int = setting(60, "nothing shrinks until so long after", unit="s", ge=0, le=3600)


class ScaleUp(PolicySection):
    """Growing."""

    stabilization_window_seconds: int = setting(
        0, "the least proposal of this window counts", unit="s", ge=0, le=3600
    )
    select_policy: SelectPolicy = SelectPolicy.MAX
    policies: tuple[RatePolicy, ...] = (
        RatePolicy(type=RateType.PERCENT, value=100, period_seconds=15),
        RatePolicy(type=RateType.PODS, value=2, period_seconds=15),
    )
    panic: Panic = Panic()


class ConsolidationCheck(PolicySection):
    """Refuse to take one away where the others could not carry its load."""

    enabled: bool = setting(True, "whether to look")
    headroom_percent: int = setting(20, "to be left at the smaller size", unit="%", ge=0, le=200)


class ScaleDown(PolicySection):
    """Shrinking."""

    stabilization_window_seconds: int = setting(
        300, "the largest proposal of this window counts", unit="s", ge=0, le=3600
    )
    select_policy: SelectPolicy = SelectPolicy.MIN
    policies: tuple[RatePolicy, ...] = (RatePolicy(type=RateType.PODS, value=1, period_seconds=60),)
    consolidation_check: ConsolidationCheck = ConsolidationCheck()


class Behavior(PolicySection):
    """How fast, and how sure."""

    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()


class Startup(PolicySection):
    """What is known of a replica's start."""

    expected_seconds: int = setting(180, "from asking for one to its first work", unit="s", ge=0)
    count_pending_as_capacity: bool = setting(True, "whether those that start count")
    failure_deadline_seconds: int = setting(900, "given up after it", unit="s", gt=0)
    warm_up_seconds: int = setting(
        30, "a young replica's figures are left out of the capacity model", unit="s", ge=0
    )


class OnDeadline(StrEnum):
    """What becomes of requests that a draining replica still has."""

    MIGRATE = "Migrate"
    ABORT = "Abort"


class VictimPolicy(StrEnum):
    """Which replica leaves first, after those that start."""

    LEAST_KV_BLOCKS = "LeastKVBlocks"
    NEWEST = "Newest"


class Drain(PolicySection):
    """How a replica leaves."""

    deadline_seconds: int = setting(120, "for what it has in hand", unit="s", ge=1, le=86_400)
    on_deadline: OnDeadline = OnDeadline.MIGRATE
    victim_policy: VictimPolicy = VictimPolicy.LEAST_KV_BLOCKS


class ScaleToZero(PolicySection):
    """Both pools together, never one alone."""

    enabled: bool = setting(False, "whether a pool may have no replica")
    idle_seconds: int = setting(900, "without a request before it", unit="s", ge=1)
    activation: Literal["HoldAtRouter"] = "HoldAtRouter"
    activation_queue_limit: int = setting(256, "requests that wait at the router", ge=1)
    activation_timeout_seconds: int = setting(600, "so long at most", unit="s", ge=1)


class Pool(PolicySection):
    """One pool on its own."""

    name: str = setting(
        ..., "unique in the file", public=True, pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
    )
    role: Role
    min_replicas: int = setting(1, "never fewer", ge=0)
    max_replicas: int = setting(..., "never more", ge=1)
    initial_replicas: int | None = setting(None, "at the start; absent = the least", ge=0)
    accelerators_per_replica: int = setting(1, "counted against the budget", ge=0)
    metrics: tuple[Metric, ...] = setting(
        ..., "each proposes a size; the largest wins", min_length=1
    )
    tolerance: Tolerance = Tolerance()
    behavior: Behavior = Behavior()
    startup: Startup = Startup()
    drain: Drain = Drain()
    scale_to_zero: ScaleToZero = ScaleToZero()


class RatioMode(StrEnum):
    """Whether the pools are held to each other."""

    OFF = "Off"
    RANGE = "Range"
    FIXED = "Fixed"


class OnRatioViolation(StrEnum):
    """Which pool gives way."""

    RAISE_LOWER = "RaiseLower"  # the pool that has too few gets more
    CAP_HIGHER = "CapHigher"  # the pool that has too many gets fewer
    WARN = "Warn"


class Ratio(PolicySection):
    """Prefill replicas for each decode replica: after the pools' proposals, before the budget."""

    mode: RatioMode = RatioMode.OFF
    min_prefill_per_decode: Quantity = setting("0.25", "in mode Range", public=True)
    max_prefill_per_decode: Quantity = setting("4", "in mode Range", public=True)
    prefill_per_decode: Quantity | None = setting(None, "in mode Fixed")
    on_violation: OnRatioViolation = OnRatioViolation.RAISE_LOWER


class Budget(PolicySection):
    """What both pools may take together."""

    max_accelerators: int | None = setting(None, "never more", ge=1)
    min_accelerators: int = setting(0, "never fewer", ge=0)
    max_cost_per_hour: Quantity | None = setting(None, "never more, by the price below")
    cost_per_accelerator_hour: Quantity | None = setting(None, "price of one")
    on_exceeded: Literal["ProportionalClamp"] = "ProportionalClamp"
    allow_rebalance_at_cap: bool = setting(
        True, "whether one pool may grow by what the other gives up in the same decision"
    )


class ScheduledPool(PolicySection):
    """Limits of one pool while a schedule holds."""

    min_replicas: int | None = setting(None, "instead of the pool's own", ge=0)
    max_replicas: int | None = setting(None, "instead of the pool's own", ge=1)


class Schedule(PolicySection):
    """Other limits for some hours."""

    name: str = setting(..., "unique in the file", public=True, min_length=1, max_length=63)
    time_zone: str = setting("UTC", "of the IANA database", public=True)
    start: str = setting(..., "five cron fields: minute, hour, day, month, weekday", public=True)
    duration_seconds: int = setting(..., "from each start on", unit="s", ge=60, le=31 * 86_400)
    pools: dict[str, ScheduledPool] = setting(..., "by name of a pool", min_length=1)


class PredictiveMode(StrEnum):
    """Whether a forecast counts."""

    OFF = "Off"
    FORECAST = "Forecast"
    FORECAST_DRY_RUN = "ForecastDryRun"  # shown, not applied


class PredictorType(StrEnum):
    """How load is forecast."""

    CONSTANT = "Constant"  # what is goes on
    KALMAN = "Kalman"  # level and trend
    HOLT_WINTERS = "HoltWinters"  # level, trend and season
    ARIMA = "Arima"


class Kalman(PolicySection):
    """A level and a trend that wander."""

    q_level: Quantity = setting("1", "variance of the level a step", public=True)
    q_trend: Quantity = setting("0.1", "variance of the trend a step", public=True)
    r: Quantity = setting("10", "variance of a measurement", public=True)
    min_points: int = setting(5, "measurements before it says anything", ge=2)


class HoltWinters(PolicySection):
    """A level, a trend and a season."""

    season_seconds: int = setting(86_400, "length of a season", unit="s", ge=60)


class Predictor(PolicySection):
    """How load is forecast, and with what."""

    type: PredictorType = PredictorType.KALMAN
    kalman: Kalman = Kalman()
    holt_winters: HoltWinters = HoltWinters()


class CapacityCorrection(PolicySection):
    """Of a stored profile by what is measured."""

    enabled: bool = True
    min: Quantity = setting("0.5", "least factor", public=True)
    max: Quantity = setting("2", "largest factor", public=True)


class ProfileRef(PolicySection):
    """A stored performance model."""

    name: str = setting(..., "name of a performance model", public=True, min_length=1)


class CapacityModel(PolicySection):
    """What one replica can carry."""

    source: Literal["Online", "Profile"] = "Online"
    profile_ref: ProfileRef | None = None
    correction: CapacityCorrection = CapacityCorrection()


class Predictive(PolicySection):
    """A forecast sets a floor; reactive metrics act above it."""

    mode: PredictiveMode = PredictiveMode.OFF
    predictor: Predictor = Predictor()
    interval_seconds: int = setting(60, "between measurements", unit="s", ge=1, le=3600)
    look_ahead_seconds: int = setting(240, "at least the longest start", unit="s", ge=1, le=86_400)
    capacity_model: CapacityModel = CapacityModel()
    apply: Literal["AsFloor"] = "AsFloor"


class LatencySlo(PolicySection):
    """One latency to be kept."""

    percentile: Literal["p50", "p90", "p95", "p99"] = "p95"
    target_milliseconds: int = setting(..., "to be kept", unit="ms", gt=0)


class Slo(PolicySection):
    """Latencies to be kept."""

    ttft: LatencySlo | None = None
    itl: LatencySlo | None = None


class OnStale(StrEnum):
    """What to do without fresh figures."""

    HOLD_SCALE_DOWN = "HoldScaleDown"  # grow by what is fresh, never shrink
    HOLD = "Hold"  # change nothing


class MetricsSource(PolicySection):
    """Where figures come from, and how old they may be."""

    source: Literal["Router", "Prometheus"] = "Router"
    stale_after_seconds: int = setting(15, "older figures count as missing", unit="s", ge=1)
    on_stale: OnStale = OnStale.HOLD_SCALE_DOWN


class ClusterRef(PolicySection):
    """What is scaled."""

    name: str = setting(..., "name of the cluster", public=True, min_length=1, max_length=253)


class PolicySpec(PolicySection):
    """What is decided, every tick."""

    cluster_ref: ClusterRef
    mode: Mode = Mode.AUTO
    tick_seconds: int = setting(5, "between decisions", unit="s", ge=1, le=300)
    metrics: MetricsSource = MetricsSource()
    slo: Slo = Slo()
    pools: tuple[Pool, ...] = setting(..., "one of each role", min_length=1, max_length=8)
    ratio: Ratio = Ratio()
    budget: Budget = Budget()
    schedules: tuple[Schedule, ...] = ()
    predictive: Predictive = Predictive()


class Metadata(PolicySection):
    """Name of the policy."""

    name: str = setting(..., "name of the policy", public=True, min_length=1, max_length=253)
    namespace: str = setting("default", "of Kubernetes", public=True)


class PoolAutoscalingPolicy(PolicySection):
    """The whole file."""

    api_version: Literal["autoscaling.isthmus.dev/v1alpha1"]
    kind: Literal["PoolAutoscalingPolicy"]
    metadata: Metadata
    spec: PolicySpec
