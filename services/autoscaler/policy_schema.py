"""The policy's schema for those who check a file without this code: editors and Kubernetes.

Both are made from the one model. Rules between fields are written in CEL, as far as one resource
can be judged in it; `isthmus policy lint` tells the others too.
"""

from __future__ import annotations

from pydantic.alias_generators import to_camel

from services.autoscaler.policy import (
    API_VERSION,
    KIND,
    METRIC_ROLES,
    METRIC_TARGETS,
    TARGET_FIELDS,
    Budget,
    CapacityModel,
    Metric,
    MetricTarget,
    PolicySection,
    PolicySpec,
    Pool,
    PoolAutoscalingPolicy,
    Ratio,
    ScaleDown,
    ScaleUp,
    ScheduledPool,
    Startup,
)
from services.autoscaler.policy_status import PolicyStatus
from services.autoscaler.structural_schema import Definition, Rules, Schema, tidy, words

PLURAL = "poolautoscalingpolicies"
# Lists whose elements have a name: Kubernetes merges them by it.
_LIST_KEYS: dict[tuple[str, ...], str] = {("spec", "pools"): "name", ("spec", "schedules"): "name",
              ("status", "pools"): "name", ("status", "conditions"): "type"}  # fmt: skip


def json_schema() -> Schema:
    """Return the JSON Schema of a file."""
    schema = tidy(PoolAutoscalingPolicy.model_json_schema(by_alias=True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KIND, **schema}


def crd() -> Schema:
    """Return the CustomResourceDefinition."""
    definition = Definition(API_VERSION, KIND, PLURAL, "pap", _columns(), _LIST_KEYS, _RULES)
    return definition.crd(words(PoolAutoscalingPolicy), PolicySpec, PolicyStatus)


def _columns() -> list[Schema]:
    def column(name: str, path: str, kind: str = "string") -> Schema:
        return {"name": name, "type": kind, "jsonPath": path}

    def size(role: str, key: str) -> str:
        return f'.status.pools[?(@.role=="{role}")].{key}'

    return [
        column("Cluster", ".spec.clusterRef.name"),
        column("Mode", ".spec.mode"),
        column("Prefill", size("Prefill", "ready"), "integer"),
        column("Desired-Prefill", size("Prefill", "desired"), "integer"),
        column("Decode", size("Decode", "ready"), "integer"),
        column("Desired-Decode", size("Decode", "desired"), "integer"),
        column("Limited", '.status.conditions[?(@.type=="ScalingLimited")].status'),
        column("Schedule", ".status.activeSchedule"),
        column("Age", ".metadata.creationTimestamp", "date"),
    ]


def _any_of(values: tuple[str, ...], field: str) -> str:
    return f"{field} in [{', '.join(repr(str(value)) for value in values)}]"


def _or_default(kind: type[PolicySection], field: str) -> str:
    """Read a field that may be left out: defaults are the program's, Kubernetes fills none in."""
    name = f"self.{to_camel(field)}"
    return f"(has({name}) ? {name} : {kind.model_fields[field].default})"


def _target_rules() -> Rules:
    return tuple(
        (
            f"(self.type == '{kind}') == has(self.{to_camel(field)})",
            f"{to_camel(field)} belongs to type {kind}",
        )
        for kind, field in TARGET_FIELDS.items()
    )


def _metric_rules() -> Rules:
    """What a metric is held at, and that an external one has a name."""
    targets = tuple(
        (
            f"self.type != '{kind}' || {_any_of(fitting, 'self.target.type')}",
            f"{kind} is held at a target of type {' or '.join(fitting)}",
        )
        for kind, fitting in METRIC_TARGETS.items()
    )
    external = "(self.type == 'External') == has(self.external)"
    return (*targets, (external, "external belongs to type External"))


def _pool_rules() -> Rules:
    roles = tuple(
        (
            f"self.role == '{fitting[0]}' || self.metrics.all(m, m.type != '{kind}')",
            f"{kind} tells of role {fitting[0]} only",
        )
        for kind, fitting in METRIC_ROLES.items()
        if len(fitting) == 1
    )
    least = _or_default(Pool, "min_replicas")
    return (
        *roles,
        (f"{least} <= self.maxReplicas", "minReplicas is more than maxReplicas"),
        (
            f"!has(self.initialReplicas) || ({least} <= self.initialReplicas "
            "&& self.initialReplicas <= self.maxReplicas)",
            "initialReplicas is not within minReplicas to maxReplicas",
        ),
        (
            f"{least} > 0 || (has(self.scaleToZero) && has(self.scaleToZero.enabled) "
            "&& self.scaleToZero.enabled)",
            "minReplicas 0 needs scaleToZero.enabled",
        ),
    )


def _spec_rules() -> Rules:
    return (
        (
            "self.pools.size() == 2 && self.pools.exists(p, p.role == 'Prefill') "
            "&& self.pools.exists(p, p.role == 'Decode')",
            "pools must be one of role Prefill and one of role Decode",
        ),
        (
            "!has(self.schedules) || self.schedules.all(s, "
            "s.pools.all(name, self.pools.exists(p, p.name == name)))",
            "a schedule names a pool that is not there",
        ),
        (
            "self.pools.all(p, has(p.minReplicas) && p.minReplicas == 0) "
            "|| !self.pools.exists(p, has(p.minReplicas) && p.minReplicas == 0)",
            "minReplicas must be 0 for both pools or for none",
        ),
    )


_NOT_EMPTY: Rules = (
    (
        "!has(self.policies) || self.policies.size() > 0 "
        "|| (has(self.selectPolicy) && self.selectPolicy == 'Disabled')",
        "policies must not be empty where one is to be selected",
    ),
)
_RULES: dict[type[PolicySection], Rules] = {
    MetricTarget: _target_rules(),
    Metric: _metric_rules(),
    Pool: _pool_rules(),
    PolicySpec: _spec_rules(),
    ScaleUp: _NOT_EMPTY,
    ScaleDown: _NOT_EMPTY,
    Startup: (
        (
            f"{_or_default(Startup, 'failure_deadline_seconds')} "
            f">= {_or_default(Startup, 'expected_seconds')}",
            "failureDeadlineSeconds is less than expectedSeconds",
        ),
    ),
    Ratio: (
        (
            "(has(self.mode) && self.mode == 'Fixed') == has(self.prefillPerDecode)",
            "prefillPerDecode belongs to mode Fixed",
        ),
    ),
    Budget: (
        (
            "!has(self.maxCostPerHour) || has(self.costPerAcceleratorHour)",
            "maxCostPerHour needs costPerAcceleratorHour",
        ),
    ),
    ScheduledPool: (
        (
            "has(self.minReplicas) || has(self.maxReplicas)",
            "neither minReplicas nor maxReplicas is given",
        ),
        (
            "!has(self.minReplicas) || !has(self.maxReplicas) "
            "|| self.minReplicas <= self.maxReplicas",
            "minReplicas is more than maxReplicas",
        ),
    ),
    CapacityModel: (
        (
            "!has(self.source) || self.source != 'Profile' || has(self.profileRef)",
            "source Profile needs profileRef",
        ),
    ),
}
