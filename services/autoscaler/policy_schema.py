"""The policy's schema for those who check a file without this code: editors and Kubernetes.

Both are made from the one model. Kubernetes takes only structural schemas: no references, every
place has a type, and nothing is said twice. Rules between fields are written in CEL, as far as one
resource can be judged in it; `isthmus policy lint` tells the others too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

# Any: JSON Schema is nested mappings of whatever.
Schema = dict[str, Any]

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "poolautoscalingpolicies"
_Rules = tuple[tuple[str, str], ...]  # expression, what is said where it is not true

# Lists whose elements have a name: Kubernetes merges them by it.
_LIST_KEYS: dict[tuple[str, ...], str] = {("spec", "pools"): "name", ("spec", "schedules"): "name",
              ("status", "pools"): "name", ("status", "conditions"): "type"}  # fmt: skip


def json_schema() -> Schema:
    """Return the JSON Schema of a file."""
    schema = PoolAutoscalingPolicy.model_json_schema(by_alias=True)
    tidy: Schema = _tidy(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KIND, **tidy}


def crd() -> Schema:
    """Return the CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _resource_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pap"],
            },
            "versions": [version],
        },
    }


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


def _resource_schema() -> Schema:
    return {
        "type": "object",
        "description": _words(PoolAutoscalingPolicy),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _structural(PolicySpec, ("spec",)),
            "status": _structural(PolicyStatus, ("status",)),
        },
    }


def _structural(kind: type[PolicySection], at: tuple[str, ...]) -> Schema:
    schema = kind.model_json_schema(by_alias=True)
    found: Schema = _inlined(schema, schema.get("$defs", {}), at)
    return found


def _inlined(node: Schema, sections: Mapping[str, Schema], at: tuple[str, ...]) -> Schema:
    """Rewrite one node: its place in the resource says which lists have keys."""
    node, is_nullable = _without_null(node)
    node = _resolved(node, sections)
    found: Schema = {}
    if node.get("description"):
        found["description"] = _described(node)
    if "anyOf" in node:  # a quantity
        found |= {"anyOf": node["anyOf"], "pattern": node["pattern"]}
        found["x-kubernetes-int-or-string"] = True
    else:
        found["type"] = node["type"]
    found |= _bounds(node)
    if node.get("type") == "array":
        found["items"] = _inlined(node["items"], sections, at)
        key = _LIST_KEYS.get(at)
        found["x-kubernetes-list-type"] = "map" if key else "atomic"
        if key:
            found["x-kubernetes-list-map-keys"] = [key]
    if node.get("type") == "object":
        found |= _object(node, sections, at)
    if is_nullable:
        found["nullable"] = True
    return found


def _object(node: Schema, sections: Mapping[str, Schema], at: tuple[str, ...]) -> Schema:
    if "properties" not in node:
        return {"additionalProperties": _inlined(node["additionalProperties"], sections, at)}
    found: Schema = {
        "properties": {
            key: _inlined(child, sections, (*at, key)) for key, child in node["properties"].items()
        }
    }
    if node.get("required"):
        found["required"] = node["required"]
    rules = {kind.__name__: rules for kind, rules in _RULES.items()}.get(node["title"], ())
    if rules:
        found["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in rules
        ]
    return found


def _resolved(node: Schema, sections: Mapping[str, Schema]) -> Schema:
    if "$ref" not in node:
        return node
    target = sections[node["$ref"].rpartition("/")[2]]
    own: Schema = {key: node[key] for key in ("description", "unit") if key in node}
    return {**target, **own}


def _without_null(node: Schema) -> tuple[Schema, bool]:
    kinds = node.get("anyOf", [])
    if {"type": "null"} not in kinds:
        return node, False
    (inner,) = (kind for kind in kinds if kind != {"type": "null"})
    return {**{key: value for key, value in node.items() if key != "anyOf"}, **inner}, True


def _bounds(node: Schema) -> Schema:
    """Return what limits a value; exclusive bounds are of whole numbers here."""
    kept = ("enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
            "minProperties", "maxProperties", "pattern")  # fmt: skip
    found = {key: node[key] for key in kept if key in node}
    if "const" in node:
        found["enum"] = [node["const"]]
    if "exclusiveMinimum" in node:
        found["minimum"] = node["exclusiveMinimum"] + 1
    return found


def _described(node: Schema) -> str:
    words = " ".join(node["description"].split())
    return f"{words} ({node['unit']})" if node.get("unit") else words


def _words(kind: type[PolicySection]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _tidy(node: Any) -> Any:
    """Drop what is for our own pages, and titles, which repeat the key."""
    if isinstance(node, list):
        return [_tidy(part) for part in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if key in ("public", "unit") or (key == "title" and isinstance(value, str)):
            continue
        is_names = key in ("properties", "$defs")  # of fields and sections: any may be called so
        found[key] = {n: _tidy(v) for n, v in value.items()} if is_names else _tidy(value)
    if isinstance(node.get("description"), str):
        found["description"] = _described(node)
    return found


def _any_of(values: tuple[str, ...], field: str) -> str:
    return f"{field} in [{', '.join(repr(str(value)) for value in values)}]"


def _or_default(kind: type[PolicySection], field: str) -> str:
    """Read a field that may be left out: defaults are the program's, Kubernetes fills none in."""
    name = f"self.{to_camel(field)}"
    return f"(has({name}) ? {name} : {kind.model_fields[field].default})"


def _target_rules() -> _Rules:
    return tuple(
        (
            f"(self.type == '{kind}') == has(self.{to_camel(field)})",
            f"{to_camel(field)} belongs to type {kind}",
        )
        for kind, field in TARGET_FIELDS.items()
    )


def _metric_rules() -> _Rules:
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


def _pool_rules() -> _Rules:
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


def _spec_rules() -> _Rules:
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


_NOT_EMPTY: _Rules = (
    (
        "!has(self.policies) || self.policies.size() > 0 "
        "|| (has(self.selectPolicy) && self.selectPolicy == 'Disabled')",
        "policies must not be empty where one is to be selected",
    ),
)
_RULES: dict[type[PolicySection], _Rules] = {
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
