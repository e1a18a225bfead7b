"""Manifests against Kubernetes: its schemas, what it never lets change, who may talk to whom."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.rendering import (
    CHART,
    RELEASE,
    SETS,
    SPACE,
    Manifest,
    Rendered,
    helm,
    render,
    render_set,
)

VERSIONS = ("1.29", "1.35")
# Kinds of others: no schema of Kubernetes tells of them.
FOREIGN = (
    "monitoring.coreos.com",
    "gateway.networking.k8s.io",
    "cert-manager.io",
    "ray.io",
    "leaderworkerset.x-k8s.io",
    "isthmus.dev",
)
every_set = pytest.mark.parametrize("name", sorted(SETS))


@every_set
def test_manifests_fit_the_schemas(name: str) -> None:
    for manifest in render_set(name).manifests:
        if not manifest["apiVersion"].split("/")[0].endswith(FOREIGN):
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_manifests_of_no_profile_fit_the_schemas() -> None:
    hpa = {"enabled": True, "metrics": [_cpu_metric()]}
    values = {
        "router": {"hpa": {"enabled": True}, "service": {"type": "LoadBalancer"}},
        "pools": {"prefill": {"hpa": hpa}, "decode": {"scaledExternally": True}},
        "ingress": {"enabled": True, "className": "c", "hosts": ["a.example"]},
        "model": {"volume": {"type": "pvc"}},
        "monitoring": {"enabled": True},
    }
    rendered = render(values=values)
    kinds = {manifest["kind"] for manifest in rendered.manifests}
    assert {"HorizontalPodAutoscaler", "Ingress", "PersistentVolumeClaim"} <= kinds
    for manifest in rendered.manifests:
        if not manifest["apiVersion"].split("/")[0].endswith(FOREIGN):
            kubernetes_validate.validate(manifest, "1.35", strict=True)
    claims = render(values={"pools": {"prefill": {"dra": {"enabled": True}}}})
    kubernetes_validate.validate(claims.of("ResourceClaimTemplate", "prefill"), "1.35", strict=True)
    kubernetes_validate.validate(claims.of("Deployment", "prefill"), "1.35", strict=True)


def _cpu_metric() -> Manifest:
    target = {"type": "Utilization", "averageUtilization": 80}
    return {"type": "Resource", "resource": {"name": "cpu", "target": target}}


def _immutable(rendered: Rendered) -> dict[tuple[str, str], Any]:
    """What Kubernetes refuses to change of a resource that is there."""
    found: dict[tuple[str, str], Any] = {}
    for each in rendered.manifests:
        spec, key = each.get("spec", {}), (each["kind"], each["metadata"]["name"])
        if each["kind"] in ("Deployment", "PodDisruptionBudget"):
            found[key] = spec["selector"]
        elif each["kind"] == "Service":
            found[key] = (spec.get("clusterIP"), spec["selector"])
        elif each["kind"] == "PersistentVolumeClaim":
            found[key] = spec
        elif each["kind"] == "RoleBinding":
            found[key] = each["roleRef"]
    return found


def test_nothing_that_must_not_change_has_the_charts_version(tmp_path: Path) -> None:
    """RB-114: an upgrade to another version, with other labels, changes no selector."""
    newer = tmp_path / "isthmus"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    chart |= {"version": "9.8.7", "appVersion": "9.8.7"}
    (newer / "Chart.yaml").write_text(yaml.safe_dump(chart))
    labels = tmp_path / "labels.yaml"
    labels.write_text(yaml.safe_dump({"commonLabels": {"team": "new"}}))
    for name, profiles in SETS.items():
        volume = {"model": {"volume": {"type": "pvc"}}}
        after = helm("template", RELEASE, str(newer), "--namespace", SPACE, "--set",
                     "model.volume.type=pvc", "-f", str(labels), profiles=profiles)  # fmt: skip
        before = _immutable(render(profiles, volume, apis=()))
        assert before
        assert _immutable(Rendered(after)) == before, name


Flow = tuple[str, str, int]  # component, component, port


def _matches(selector: Manifest, labels: Manifest) -> bool:
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "Exists"
        if rule["key"] not in labels:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _opened(rules: list[Manifest], side: str, labels: Manifest) -> Iterator[int]:
    """Ports that rules open to pods of our own with these labels."""
    for rule in rules:
        peers = rule.get(side)
        is_open = peers is None or any(
            "namespaceSelector" not in peer and _matches(peer["podSelector"], labels)
            for peer in peers
        )
        for port in rule.get("ports", ()) if is_open else ():
            yield from range(port["port"], min(port.get("endPort", port["port"]), 2**16) + 1)


def flows(rendered: Rendered) -> set[Flow]:
    """Connections between pods of the release that both ends let through."""
    pods = {pod.component: pod.meta["labels"] for pod in rendered.pods}
    policies = [each["spec"] for each in rendered.all("NetworkPolicy")]
    found: set[Flow] = set()
    for (source, own), (target, other) in itertools.product(pods.items(), repeat=2):
        out, into = set[int](), set[int]()
        for policy in policies:
            if _matches(policy["podSelector"], own):
                out |= set(_opened(policy.get("egress", []), "to", other))
            if _matches(policy["podSelector"], other):
                into |= set(_opened(policy.get("ingress", []), "from", own))
        found |= {(source, target, port) for port in out & into}
    return found


def test_pods_reach_exactly_what_they_need() -> None:
    values = {
        "autoscaler": {"enabled": True, "policy": {"mode": "Auto"}},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"is": "client"}}}]},
    }
    workers = ("prefill", "decode")
    wanted = {
        *((source, target, 50061) for source in ("router", "autoscaler") for target in workers),
        *((source, target, 50071) for source in workers for target in workers),
        *((source, "redis", 6379) for source in ("router", "autoscaler", *workers)),
        ("test", "router", 8000),
    }
    assert flows(render(values=values)) == wanted


def test_clients_and_scrapes_reach_their_doors_alone() -> None:
    rendered = render(values={"monitoring": {"enabled": True}, "router": {"processes": 3}})
    policy = rendered.of("NetworkPolicy", "router")["spec"]
    clients, scrapes = policy["ingress"]
    assert clients["ports"] == [{"port": 50051}, {"port": 8000}]
    assert clients["from"] == [{"podSelector": {}}]
    assert scrapes["ports"] == [{"port": 9400, "endPort": 9402}]
    assert "namespaceSelector" in scrapes["from"][0]
    quiet = render_set("cpu").of("NetworkPolicy", "router")["spec"]["ingress"]
    assert [rule["ports"] for rule in quiet] == [clients["ports"]]


def test_only_who_calls_the_api_server_may_reach_it() -> None:
    rendered = render_set("production")
    named = {
        each["metadata"]["name"]
        for each in rendered.all("NetworkPolicy")
        if any({"port": 6443} in rule["ports"] for rule in each["spec"].get("egress", ()))
    }
    assert named == {f"{RELEASE}-isthmus-autoscaler"}
    (rule,) = (
        rule
        for rule in rendered.of("NetworkPolicy", "autoscaler")["spec"]["egress"]
        if {"port": 6443} in rule["ports"]
    )
    assert "to" not in rule
    peer = {"ipBlock": {"cidr": "10.0.0.1/32"}}
    bound = render(SETS["production"], {"networkPolicy": {"apiServer": [peer]}})
    assert str(peer) in str(bound.of("NetworkPolicy", "autoscaler"))


def test_planes_that_draw_ports_have_them() -> None:
    spec = render_set("rdma").of("NetworkPolicy", "workers")["spec"]
    assert {"port": 1024, "endPort": 65535} in [p for rule in spec["egress"] for p in rule["ports"]]
