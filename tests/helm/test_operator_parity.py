"""Chart and operator each say once how a pod runs; both say the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from services.common.config import IsthmusConfig
from services.operator import resources
from services.operator.cluster import ClusterSpec, parse_spec
from services.operator.configuration import configuration, configuration_faults
from services.operator.observed import SERVING
from services.operator.rbac import AUTOSCALER_RULES, CLUSTER_RULES, LEASE_RULES, Rule
from tests.helm.rendering import SETS, Manifest, Pod, render

# Sets of profiles the chart renders pods of itself, and with cluster.create a cluster of.
BASES = ("cpu", "default")
EQUAL = (
    "image", "imagePullPolicy", "command", "args", "ports", "env", "startupProbe",
    "readinessProbe", "livenessProbe", "lifecycle", "resources", "securityContext", "volumeMounts",
)  # fmt: skip
POD_EQUAL = (
    "terminationGracePeriodSeconds", "securityContext", "enableServiceLinks",
    "automountServiceAccountToken", "imagePullSecrets", "nodeSelector", "tolerations", "affinity",
)  # fmt: skip
AUTOSCALED: Manifest = {"autoscaler": {"enabled": True, "policy": {"mode": "Auto"}}}


def cluster_of(base: str) -> Manifest:
    """The cluster the chart gives to the operator."""
    rendered = render((*SETS[base], "operator"), AUTOSCALED if base == "cpu" else {})
    (found,) = rendered.all("IsthmusCluster")
    return found


def spec_of(base: str) -> ClusterSpec:
    return parse_spec(cluster_of(base)["spec"])


def operator_pod(spec: ClusterSpec, component: str) -> Manifest:
    owner = resources.Owner("rel-isthmus", "u")
    (found,) = (
        r
        for r in resources.revision(owner, spec, "r")
        if r["kind"] == "Deployment" and r["metadata"]["name"] == f"rel-isthmus-{component}-r"
    )
    template: Manifest = found["spec"]["template"]
    return template


def chart_pod(base: str, component: str) -> Pod:
    return render(SETS[base]).pod(component)


def volumes(spec: Manifest) -> list[Manifest]:
    """Without the name of the ConfigMap, and which of its files is meant."""
    found = [{**volume} for volume in spec["volumes"]]
    assert found[0].pop("configMap")
    return sorted(found, key=lambda volume: str(volume["name"]))


def by_name(items: Iterable[Manifest]) -> list[Manifest]:
    return sorted(items, key=lambda item: str(item["name"]))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("component", SERVING)
def test_pods_are_the_same(base: str, component: str) -> None:
    chart = chart_pod(base, component)
    ours = operator_pod(spec_of(base), component)["spec"]
    (container,) = ours["containers"]
    for key in EQUAL:
        theirs, mine = chart.main.get(key), container.get(key)
        if key in ("env", "volumeMounts", "ports"):
            theirs, mine = by_name(theirs or ()), by_name(mine)
        assert mine == theirs, key
    for key in POD_EQUAL:
        assert ours.get(key) == chart.spec.get(key), key
    assert volumes(ours) == volumes(chart.spec)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("component", SERVING)
def test_settings_are_the_same(base: str, component: str) -> None:
    config_map = render(SETS[base]).of("ConfigMap", component)
    chart = yaml.safe_load(config_map["data"]["isthmus.yaml"])
    assert read(configuration(spec_of(base), component)) == read(chart)


def read(settings: dict[str, Any]) -> IsthmusConfig:
    """As a process reads it."""
    return IsthmusConfig.model_validate_json(json.dumps(settings))


@pytest.mark.parametrize("base", BASES)
def test_the_operator_takes_the_chart_s_cluster(base: str) -> None:
    assert list(configuration_faults(spec_of(base))) == []


def spelled(rules: Iterable[Manifest]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def ours(rules: Iterable[Rule]) -> set[tuple[str, str, str]]:
    return {(rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs}


def test_roles_are_those_the_operator_tells() -> None:
    rendered = render(SETS["operator"], AUTOSCALED)
    role = rendered.of("Role", "operator")
    assert spelled(role["rules"]) == ours((*CLUSTER_RULES, *LEASE_RULES))
    autoscaler = rendered.of("Role", "autoscaler")
    assert spelled(autoscaler["rules"]) == ours(AUTOSCALER_RULES)
    wide = render(SETS["operator"], {"operator": {"clusterWide": True}})
    (everywhere,) = wide.all("ClusterRole")
    assert spelled(everywhere["rules"]) == ours(CLUSTER_RULES)
    assert spelled(wide.of("Role", "operator")["rules"]) == ours(LEASE_RULES)
