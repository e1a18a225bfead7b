"""The policy file: how each pool is sized, and what both together must keep to.

The one source of the file's schema, of the CRD and of the documentation. Fields are named in snake
case here and in camel case in the file, by the names of the Kubernetes HPA wherever it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import ceil
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from services.autoscaler.cron import checked_cron, checked_zone
from services.autoscaler.quantity import PositiveQuantity, Quantity, parse_quantity
from services.common.settings import Section, setting

API_VERSION = "autoscaling.isthmus.dev/v1alpha1"
KIND = "PoolAutoscalingPolicy"


MAX_REPLICAS = 10_000
# Three seasons are kept in the store, and written at every tick.
MAX_SEASON_INTERVALS = 2_880

FAULTS = "faults"  # type of an error whose context has all faults of one section
FIELDS_ONLY = "fields only"  # context of a validation that asks no section for faults between them


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and where: below its section, as the file writes it."""

    path: str
    message: str


class PolicySection(Section):
    """Base of every part of the file: it tells all faults between its own fields at once."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    def faults(self) -> Iterator[Fault]:
        """What is wrong between fields that are right by themselves."""
        return iter(())

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        found = () if info.context == FIELDS_ONLY else tuple(self.faults())
        if found:
            told = "; ".join(f"{fault.path}: {fault.message}" for fault in found)
            raise PydanticCustomError(FAULTS, "{told}", {"told": told, FAULTS: found})
        return self


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
    value: PositiveQuantity | None = setting(None, "of the pool as a whole")
    average_value: PositiveQuantity | None = setting(None, "for each replica")
    average_utilization: int | None = setting(None, "mean over replicas", unit="%", ge=1, le=100)

    def faults(self) -> Iterator[Fault]:
        """Exactly the field of the type."""
        for target_type, field in TARGET_FIELDS.items():
            key, given = to_camel(field), getattr(self, field)
            if target_type is self.type and given is None:
                yield Fault(key, f"type {self.type} needs it")
            elif target_type is not self.type and given is not None:
                yield Fault(key, f"belongs to type {target_type}, not to {self.type}")

    @property
    def number(self) -> Decimal:
        """What is held; of type Utilization as a share of 1."""
        if self.type is TargetType.UTILIZATION:
            return Decimal(self.average_utilization or 0) / 100
        return parse_quantity(getattr(self, TARGET_FIELDS[self.type]))


TARGET_FIELDS = {
    TargetType.VALUE: "value",
    TargetType.AVERAGE_VALUE: "average_value",
    TargetType.UTILIZATION: "average_utilization",
}


class ExternalMetricName(PolicySection):
    """A metric by name."""

    # As Prometheus has them: it is part of a query.
    name: str = setting(
        ...,
        "name of the metric",
        public=True,
        max_length=253,
        pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$",
    )


class ExternalMetric(PolicySection):
    """A metric that others measure."""

    metric: ExternalMetricName


class Metric(PolicySection):
    """One reason to have more or fewer replicas; the largest proposal wins."""

    type: MetricType
    target: MetricTarget
    external: ExternalMetric | None = setting(None, "which one, of type External")

    def faults(self) -> Iterator[Fault]:
        """A target that fits what is measured, and a name for what others measure."""
        fitting = METRIC_TARGETS[self.type]
        if self.target.type not in fitting:
            words = " or ".join(fitting)
            yield Fault("target.type", f"{self.type} is held at a target of type {words}")
        if self.type is MetricType.EXTERNAL and self.external is None:
            yield Fault("external", "type External needs it")
        if self.type is not MetricType.EXTERNAL and self.external is not None:
            yield Fault("external", f"belongs to type External, not to {self.type}")

    @property
    def name(self) -> str:
        """Name of its reading: the type, or the external metric's own."""
        return self.type.value if self.external is None else self.external.metric.name


METRIC_TARGETS = {
    MetricType.TTFT: (TargetType.VALUE,),
    MetricType.ITL: (TargetType.VALUE,),
    MetricType.QUEUED_TOKENS: (TargetType.AVERAGE_VALUE, TargetType.VALUE),
    MetricType.KV_UTILIZATION: (TargetType.UTILIZATION,),
    MetricType.EXTERNAL: (TargetType.AVERAGE_VALUE, TargetType.VALUE),
}
METRIC_ROLES = {
    MetricType.TTFT: (Role.PREFILL,),
    MetricType.QUEUED_TOKENS: (Role.PREFILL,),
    MetricType.ITL: (Role.DECODE,),
    MetricType.KV_UTILIZATION: (Role.DECODE,),
    MetricType.EXTERNAL: (Role.PREFILL, Role.DECODE),
}


class Tolerance(PolicySection):
    """How far a metric may be off its target, as a share, before a size is changed."""

    scale_up: Quantity = setting("0.05", "above the target", public=True)
    scale_down: Quantity = setting("0.10", "below the target", public=True)

    def faults(self) -> Iterator[Fault]:
        """A share below the target that can be reached."""
        if parse_quantity(self.scale_down) >= 1:
            yield Fault("scaleDown", "must be below 1: nothing measured is less than 0")
        if parse_quantity(self.scale_up) > 10:
            yield Fault("scaleUp", "must be at most 10")


class RateType(StrEnum):
    """What a rate policy counts."""

    PERCENT = "Percent"
    PODS = "Pods"


class RatePolicy(PolicySection):
    """How much a size may change within a period."""

    type: RateType
    value: int = setting(..., "replicas, or percent of those there were", gt=0, le=MAX_REPLICAS)
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
    policies: tuple[RatePolicy, ...] = setting(
        (
            RatePolicy(type=RateType.PERCENT, value=100, period_seconds=15),
            RatePolicy(type=RateType.PODS, value=2, period_seconds=15),
        ),
        "how much at most",
        max_length=8,
    )
    panic: Panic = Panic()

    def faults(self) -> Iterator[Fault]:
        """A policy to select, where one is to be selected."""
        yield from _no_policy(self.select_policy, self.policies)


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
    policies: tuple[RatePolicy, ...] = setting(
        (RatePolicy(type=RateType.PODS, value=1, period_seconds=60),),
        "how much at most",
        max_length=8,
    )
    consolidation_check: ConsolidationCheck = ConsolidationCheck()

    def faults(self) -> Iterator[Fault]:
        """A policy to select, where one is to be selected."""
        yield from _no_policy(self.select_policy, self.policies)


def _no_policy(select: SelectPolicy, policies: tuple[RatePolicy, ...]) -> Iterator[Fault]:
    if not policies and select is not SelectPolicy.DISABLED:
        yield Fault("policies", f"must not be empty where selectPolicy is {select}")


class Behavior(PolicySection):
    """How fast, and how sure."""

    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()


class Startup(PolicySection):
    """What is known of a replica's start."""

    expected_seconds: int = setting(
        180, "from asking for one to its first work", unit="s", ge=0, le=86_400
    )
    count_pending_as_capacity: bool = setting(True, "whether those that start count")
    failure_deadline_seconds: int = setting(900, "given up after it", unit="s", gt=0, le=86_400)
    warm_up_seconds: int = setting(
        30, "a young replica's figures are left out of the capacity model", unit="s", ge=0, le=3600
    )

    def faults(self) -> Iterator[Fault]:
        """Nothing is given up before it is expected."""
        if self.failure_deadline_seconds < self.expected_seconds:
            yield Fault(
                "failureDeadlineSeconds",
                f"{self.failure_deadline_seconds} is less than expectedSeconds, "
                f"{self.expected_seconds}: every start would be given up",
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
    idle_seconds: int = setting(900, "without a request before it", unit="s", ge=1, le=604_800)
    activation: Literal["HoldAtRouter"] = "HoldAtRouter"
    activation_queue_limit: int = setting(256, "requests that wait at the router", ge=1, le=100_000)
    activation_timeout_seconds: int = setting(600, "so long at most", unit="s", ge=1, le=86_400)


class PoolSize(PolicySection):
    """How large a pool may be, and what a replica takes: all that other sections look at."""

    name: str = setting(
        ...,
        "unique in the file",
        public=True,
        max_length=63,
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    )
    role: Role
    min_replicas: int = setting(1, "never fewer", ge=0, le=MAX_REPLICAS)
    max_replicas: int = setting(..., "never more", ge=1, le=MAX_REPLICAS)
    initial_replicas: int | None = setting(
        None, "at the start; absent = the least", ge=0, le=MAX_REPLICAS
    )
    accelerators_per_replica: int = setting(1, "counted against the budget", ge=0, le=1024)
    startup: Startup = Startup()
    scale_to_zero: ScaleToZero = ScaleToZero()

    def faults(self) -> Iterator[Fault]:
        """Sizes in order, and a pool of size zero only where that is allowed."""
        least, most, first = self.min_replicas, self.max_replicas, self.initial_replicas
        if least > most:
            yield Fault("minReplicas", f"{least} is more than maxReplicas, {most}")
        elif first is not None and not least <= first <= most:
            yield Fault(
                "initialReplicas",
                f"{first} is not within minReplicas to maxReplicas, {least} to {most}",
            )
        zero = self.scale_to_zero
        if least == 0 and not zero.enabled:
            yield Fault("minReplicas", "0 needs scaleToZero.enabled")
        if zero.enabled and zero.activation_timeout_seconds < self.startup.expected_seconds:
            yield Fault(
                "scaleToZero.activationTimeoutSeconds",
                f"{zero.activation_timeout_seconds} is less than startup.expectedSeconds, "
                f"{self.startup.expected_seconds}: held requests would never see a replica",
            )


class Pool(PoolSize):
    """One pool on its own."""

    metrics: tuple[Metric, ...] = setting(
        ..., "each proposes a size; the largest wins", min_length=1, max_length=16
    )
    tolerance: Tolerance = Tolerance()
    behavior: Behavior = Behavior()
    drain: Drain = Drain()

    def faults(self) -> Iterator[Fault]:
        """Metrics that tell of this role, each once."""
        yield from super().faults()
        seen: set[str] = set()
        for i, metric in enumerate(self.metrics):
            roles = METRIC_ROLES[metric.type]
            if self.role not in roles:
                yield Fault(f"metrics[{i}].type", f"{metric.type} tells of role {roles[0]} only")
            if metric.name in seen:
                yield Fault(f"metrics[{i}]", f"{metric.name} is there twice")
            seen.add(metric.name)


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
    max_prefill_per_decode: PositiveQuantity = setting("4", "in mode Range", public=True)
    prefill_per_decode: PositiveQuantity | None = setting(None, "in mode Fixed")
    on_violation: OnRatioViolation = OnRatioViolation.RAISE_LOWER

    def faults(self) -> Iterator[Fault]:
        """A range with something in it, and a fixed ratio where one is held."""
        least = parse_quantity(self.min_prefill_per_decode)
        most = parse_quantity(self.max_prefill_per_decode)
        fixed = self.prefill_per_decode
        if least > most:
            yield Fault("minPrefillPerDecode", f"{least} is more than maxPrefillPerDecode, {most}")
        if (fixed is None) == (self.mode is RatioMode.FIXED):
            word = "needs it" if fixed is None else "does not read it: it belongs to mode Fixed"
            yield Fault("prefillPerDecode", f"mode {self.mode} {word}")
        has_range = self.model_fields_set & {"min_prefill_per_decode", "max_prefill_per_decode"}
        if fixed is not None and has_range and not least <= parse_quantity(fixed) <= most:
            yield Fault("prefillPerDecode", f"{fixed} is outside the range, {least} to {most}")

    @property
    def bounds(self) -> tuple[Decimal, Decimal] | None:
        """The least and the most prefill replicas for each of decode; None = any."""
        if self.mode is RatioMode.OFF:
            return None
        if self.prefill_per_decode is not None:
            return (parse_quantity(self.prefill_per_decode),) * 2
        least, most = self.min_prefill_per_decode, self.max_prefill_per_decode
        return parse_quantity(least), parse_quantity(most)


class Budget(PolicySection):
    """What both pools may take together."""

    max_accelerators: int | None = setting(None, "never more", ge=1, le=10_000_000)
    min_accelerators: int = setting(0, "never fewer", ge=0, le=10_000_000)
    max_cost_per_hour: PositiveQuantity | None = setting(None, "never more, by the price below")
    cost_per_accelerator_hour: PositiveQuantity | None = setting(None, "price of one")
    on_exceeded: Literal["ProportionalClamp"] = "ProportionalClamp"
    allow_rebalance_at_cap: bool = setting(
        True, "whether one pool may grow by what the other gives up in the same decision"
    )

    def faults(self) -> Iterator[Fault]:
        """A price where costs are capped, and a floor below the ceiling."""
        if self.max_cost_per_hour is not None and self.cost_per_accelerator_hour is None:
            yield Fault("costPerAcceleratorHour", "maxCostPerHour needs it")
        cap = self.accelerator_cap
        if cap is not None and self.min_accelerators > cap:
            yield Fault(
                "minAccelerators", f"{self.min_accelerators} is more than the most allowed, {cap}"
            )

    @property
    def accelerator_cap(self) -> int | None:
        """The most accelerators, by number and by cost; None = no cap."""
        caps = [] if self.max_accelerators is None else [self.max_accelerators]
        if self.max_cost_per_hour is not None and self.cost_per_accelerator_hour is not None:
            price = parse_quantity(self.cost_per_accelerator_hour)
            caps.append(int(parse_quantity(self.max_cost_per_hour) / price))
        return min(caps, default=None)


class ScheduledPool(PolicySection):
    """Limits of one pool while a schedule holds."""

    min_replicas: int | None = setting(None, "instead of the pool's own", ge=0, le=MAX_REPLICAS)
    max_replicas: int | None = setting(None, "instead of the pool's own", ge=1, le=MAX_REPLICAS)

    def faults(self) -> Iterator[Fault]:
        """Something other than the pool's own limits."""
        if self.min_replicas is None and self.max_replicas is None:
            yield Fault("minReplicas", "neither it nor maxReplicas is given")


class Schedule(PolicySection):
    """Other limits for some hours."""

    name: str = setting(..., "unique in the file", public=True, min_length=1, max_length=63)
    time_zone: Annotated[str, AfterValidator(checked_zone)] = setting(
        "UTC", "of the IANA database", public=True, max_length=64
    )
    start: Annotated[str, AfterValidator(checked_cron)] = setting(
        ..., "five cron fields: minute, hour, day, month, weekday", public=True, max_length=128
    )
    duration_seconds: int = setting(..., "from each start on", unit="s", ge=60, le=31 * 86_400)
    pools: dict[str, ScheduledPool] = setting(..., "by name of a pool", min_length=1, max_length=2)


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
    r: PositiveQuantity = setting("10", "variance of a measurement", public=True)
    min_points: int = setting(5, "measurements before it says anything", ge=2, le=10_000)


class HoltWinters(PolicySection):
    """A level, a trend and a season."""

    season_seconds: int = setting(86_400, "length of a season", unit="s", ge=60, le=31 * 86_400)


class Predictor(PolicySection):
    """How load is forecast, and with what."""

    type: PredictorType = PredictorType.KALMAN
    kalman: Kalman = Kalman()
    holt_winters: HoltWinters = HoltWinters()


class CapacityCorrection(PolicySection):
    """Of a stored profile by what is measured."""

    enabled: bool = True
    min: PositiveQuantity = setting("0.5", "least factor", public=True)
    max: PositiveQuantity = setting("2", "largest factor", public=True)

    def faults(self) -> Iterator[Fault]:
        """Factors in order."""
        least, most = parse_quantity(self.min), parse_quantity(self.max)
        if least > most:
            yield Fault("min", f"{least} is more than max, {most}")


class ProfileRef(PolicySection):
    """A stored performance model."""

    name: str = setting(
        ...,
        "NAME.json beside the policy file, as `isthmus profile` writes it, or else a model that "
        "comes with isthmus",
        public=True,
        min_length=1,
    )


class CapacityModel(PolicySection):
    """What one replica can carry."""

    source: Literal["Online", "Profile"] = "Online"
    profile_ref: ProfileRef | None = None
    correction: CapacityCorrection = CapacityCorrection()

    def faults(self) -> Iterator[Fault]:
        """A profile where one is read."""
        if self.source == "Profile" and self.profile_ref is None:
            yield Fault("profileRef", "source Profile needs it")


class Predictive(PolicySection):
    """A forecast sets a floor; reactive metrics act above it."""

    mode: PredictiveMode = PredictiveMode.OFF
    predictor: Predictor = Predictor()
    interval_seconds: int = setting(60, "between measurements", unit="s", ge=1, le=3600)
    look_ahead_seconds: int = setting(240, "at least the longest start", unit="s", ge=1, le=86_400)
    capacity_model: CapacityModel = CapacityModel()
    apply: Literal["AsFloor"] = "AsFloor"

    def faults(self) -> Iterator[Fault]:
        """A season of two measurements at least, and of no more than are kept."""
        season = self.predictor.holt_winters.season_seconds
        is_seasonal = self.predictor.type is PredictorType.HOLT_WINTERS
        if is_seasonal and season < 2 * self.interval_seconds:
            yield Fault(
                "predictor.holtWinters.seasonSeconds",
                f"{season} is less than two intervals of {self.interval_seconds} s",
            )
        if is_seasonal and season > MAX_SEASON_INTERVALS * self.interval_seconds:
            least = ceil(season / MAX_SEASON_INTERVALS)
            yield Fault(
                "intervalSeconds",
                f"a season of {season} s has more than {MAX_SEASON_INTERVALS} intervals of "
                f"{self.interval_seconds} s: {least} or more",
            )


class LatencySlo(PolicySection):
    """One latency to be kept."""

    percentile: Literal["p50", "p90", "p95", "p99"] = "p95"
    target_milliseconds: int = setting(..., "to be kept", unit="ms", gt=0, le=86_400_000)


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
    stale_after_seconds: int = setting(
        15, "older figures count as missing", unit="s", ge=1, le=3600
    )
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
    pools: tuple[Pool, ...] = setting(..., "one of each role", max_length=8)
    ratio: Ratio = Ratio()
    budget: Budget = Budget()
    schedules: tuple[Schedule, ...] = setting(
        (), "other limits for some hours; where several hold the highest win", max_length=64
    )
    predictive: Predictive = Predictive()


class Metadata(PolicySection):
    """Name of the policy."""

    name: str = setting(
        ...,
        "name of the policy",
        public=True,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    )
    namespace: str = setting("default", "of Kubernetes", public=True, min_length=1, max_length=63)
    labels: dict[str, str] = setting({}, "for Kubernetes, read by nothing here", max_length=64)
    annotations: dict[str, str] = setting({}, "likewise", max_length=64)


class PoolAutoscalingPolicy(PolicySection):
    """The whole file."""

    api_version: Literal["autoscaling.isthmus.dev/v1alpha1"]
    kind: Literal["PoolAutoscalingPolicy"]
    metadata: Metadata
    spec: PolicySpec
