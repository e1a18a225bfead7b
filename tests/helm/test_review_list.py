"""The chart by the list a reviewer goes through: one test for each row, named by its number.

What is looked at is what helm renders of every profile, and of values that turn on what no profile
has. Row 9, the verbs that accounts need, is proven by use in tests/fakekube as well.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm.rendering import (
    CHART,
    GATEWAY,
    MONITORING,
    PROFILES,
    RELEASE,
    ROOT,
    SETS,
    SPACE,
    Manifest,
    Pod,
    Refused,
    Rendered,
    helm,
    refusal,
    render,
    render_set,
)
from tools.gen_docs import pages

CHART_YAML: Manifest = yaml.safe_load((CHART / "Chart.yaml").read_text())
VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
POLICY: Manifest = yaml.safe_load((PROFILES / "values-production.yaml").read_text())["autoscaler"][
    "policy"
]
POOLS = ("prefill", "decode")
every_set = pytest.mark.parametrize("name", sorted(SETS))


def own_pods(rendered: Rendered) -> list[Pod]:
    """Pods that serve: not the test's."""
    return [pod for pod in rendered.pods if pod.component != "test"]


def containers(rendered: Rendered) -> Iterator[tuple[str, Manifest]]:
    for pod in rendered.pods:
        for container in pod.containers:
            yield f"{pod.component}/{container['name']}", container


def volume(pod: Pod, name: str) -> Manifest:
    (found,) = (each for each in pod.spec["volumes"] if each["name"] == name)
    return dict(found)


def env(pod: Pod) -> dict[str, Any]:
    given = pod.main.get("env", ())
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in given}


def config(rendered: Rendered, component: str) -> Manifest:
    text = rendered.of("ConfigMap", component)["data"]["isthmus.yaml"]
    found = yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def test_row_01_chart_says_what_it_is_and_what_it_needs() -> None:
    assert CHART_YAML["apiVersion"] == "v2"
    assert CHART_YAML["kubeVersion"] == ">=1.29.0-0"
    assert all(CHART_YAML[key] for key in ("appVersion", "icon", "sources", "maintainers", "home"))
    with pytest.raises(Refused, match=r"kubeVersion|incompatible"):
        helm("template", RELEASE, str(CHART), "--kube-version", "1.28.0", profiles=("cpu",))


def test_row_02_version_is_semver_and_changes_are_told() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", CHART_YAML["version"])
    changes = yaml.safe_load(CHART_YAML["annotations"]["artifacthub.io/changes"])
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert changes
    assert all(each["kind"] in kinds and each["description"] for each in changes)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{CHART_YAML["appVersion"]}"' in project


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"nameOverride": "n" * 40},
        {"fullnameOverride": "f" * 40},
        {"nameOverride": "chat", "monitoring": {"enabled": True}},
    ],
)
def test_row_03_names_can_be_given_and_are_never_too_long(values: Manifest) -> None:
    for release in ("r", "r" * 53):
        rendered = render(("production",), values, release=release)
        names = [each["metadata"]["name"] for each in rendered.manifests]
        assert all(len(name) <= 63 and re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
        ids = [(each["kind"], each["metadata"]["name"]) for each in rendered.manifests]
        assert len(ids) == len(set(ids))
        labels = [v for each in rendered.manifests for v in each["metadata"]["labels"].values()]
        assert all(len(label) <= 63 for label in labels)


@every_set
def test_row_04_labels_are_the_usual_ones_and_selectors_never_change(name: str) -> None:
    rendered = render_set(name)
    wanted = {"name", "instance", "version", "component", "part-of", "managed-by"}
    for each in rendered.manifests:
        labels = each["metadata"]["labels"]
        assert {f"app.kubernetes.io/{key}" for key in wanted} <= labels.keys(), each["kind"]
    stable = {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
    for each in rendered.all("Deployment"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert selector.keys() == stable
        assert selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    for each in rendered.all("Service"):
        assert each["spec"]["selector"].keys() == stable
    for pod in own_pods(rendered):
        assert pod.meta["labels"].get("isthmus.dev/pool", pod.component) in (*POOLS, pod.component)


def _objects(schema: Any, at: str = "") -> Iterator[tuple[str, Manifest]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield at, schema
        for key, inner in schema.items():
            yield from _objects(inner, f"{at}/{key}")


def _paths(values: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every mapping of the default values whose keys are the chart's own."""
    if isinstance(values, dict):
        yield at
        for key, inner in values.items():
            yield from _paths(inner, (*at, key))


# Mappings whose keys are the user's, or those of Kubernetes.
OPEN = re.compile(
    r"(global|.*(requests|limits|labels|Labels|annotations|Annotations|nodeSelector|env|affinity"
    r"|strategy|securityContext|podSecurityContext|capabilities|seccompProfile|policy"
    r"|matchLabels))"
)


def _inside(path: tuple[str, ...], value: Manifest) -> Manifest:
    for key in reversed(path):
        value = {key: value}
    return value


def test_row_05_schema_takes_no_key_it_does_not_know() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for at, each in _objects(schema):
        if at not in ("/$defs/pod", "/properties/global"):
            closed = each.get("additionalProperties") is False
            assert closed or each.get("unevaluatedProperties") is False, at
    assert schema["properties"]["pools"]["properties"]["prefill"] == {"$ref": "#/$defs/pool"}
    assert schema["properties"]["pools"]["properties"]["decode"] == {"$ref": "#/$defs/pool"}
    judge = jsonschema.Draft202012Validator(schema)
    assert judge.is_valid(VALUES)
    for path in _paths(VALUES):
        if not any(OPEN.fullmatch(key) for key in path):
            assert not judge.is_valid(_inside(path, {"bogusKey": 1})), path
    # Helm judges alike, through references and across what two of them say.
    for place in ((), ("router",), ("pools", "decode"), ("pools", "decode", "hpa")):
        assert "bogusKey" in refusal(_inside(place, {"bogusKey": 1}))


def test_row_05_schema_refuses_wrong_types_and_ranges() -> None:
    cases: tuple[Manifest, ...] = (
        {"router": {"replicas": "2"}},
        {"router": {"grpcPort": 70000}},
        {"pools": {"decode": {"device": "gpu"}}},
        {"pools": {"prefill": {"kvMemory": "8 GB"}}},
        {"transfer": {"planes": []}},
        {"config": {"models": {}}},
        {"redis": {"external": {"port": 0}}},
        {"monitoring": {"interval": "15"}},
        {"config": {"worker": {"max_num_seqz": 4}}},
        {"config": {"store": {"url": "redis://user:password@store"}}},  # a secret
        {"autoscaler": {"policy": {"pools": [{"name": "prefill", "minReplicaz": 1}]}}},
    )
    for wrong in cases:
        assert "schema" in refusal(wrong)


def test_row_06_images_have_registry_tag_and_digest_and_are_never_latest() -> None:
    assert render().pod("router").main["image"] == f"localhost/isthmus-control:{_app_version()}"
    digest = "sha256:" + "a" * 64
    pinned = render(values={"pools": {"decode": {"image": {"digest": digest}}}}).pod("decode")
    assert pinned.main["image"] == f"localhost/isthmus@{digest}"
    mirrored = render(values={"global": {"imageRegistry": "mirror.example"}})
    assert {c["image"].split("/")[0] for _, c in containers(mirrored)} == {"mirror.example"}
    tagged = render(values={"podDefaults": {"image": {"tag": "1.2.3", "pullPolicy": "Never"}}})
    assert tagged.pod("router").main["image"].endswith("isthmus-control:1.2.3")
    assert tagged.pod("router").main["imagePullPolicy"] == "Never"
    assert "schema" in refusal({"podDefaults": {"image": {"tag": "latest"}}})
    assert ":latest" not in "".join(render_set(name).text for name in SETS)


def _app_version() -> str:
    return str(CHART_YAML["appVersion"])


@every_set
def test_row_07_pull_secrets_are_in_every_pod(name: str) -> None:
    rendered = render(SETS[name], {"global": {"imagePullSecrets": [{"name": "pull"}]}})
    assert rendered.pods
    assert all(pod.spec["imagePullSecrets"] == [{"name": "pull"}] for pod in rendered.pods)


@every_set
def test_row_08_accounts_are_one_each_and_only_those_that_call_have_a_token(name: str) -> None:
    rendered = render_set(name)
    made = {each["metadata"]["name"] for each in rendered.all("ServiceAccount")}
    for pod in own_pods(rendered):
        assert pod.spec["serviceAccountName"] in made
        # The head of Ray has the autoscaler, and Ray's own, beside it.
        calls = pod.component in ("autoscaler", "operator") or "ray-head" in str(pod.spec)
        assert pod.spec["automountServiceAccountToken"] is calls, pod.component
    assert not any(each["automountServiceAccountToken"] for each in rendered.all("ServiceAccount"))


def test_row_08_accounts_can_be_somebody_elses() -> None:
    values = {"router": {"serviceAccount": {"create": False, "name": "theirs"}}}
    rendered = render(values=values)
    assert rendered.pod("router").spec["serviceAccountName"] == "theirs"
    names = {each["metadata"]["name"] for each in rendered.all("ServiceAccount")}
    assert f"{RELEASE}-isthmus-router" not in names
    noted = {"router": {"serviceAccount": {"annotations": {"role": "r"}}}}
    account = render(values=noted).of("ServiceAccount", "router")
    assert account["metadata"]["annotations"] == {"role": "r"}


def test_row_09_roles_are_those_of_the_drivers() -> None:
    rendered = render_set("production")
    rules = rendered.of("Role", "autoscaler")["rules"]
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": [f"{RELEASE}-isthmus-prefill", f"{RELEASE}-isthmus-decode"],
            "verbs": ["get", "update"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    ]
    binding = rendered.of("RoleBinding", "autoscaler")
    assert binding["subjects"][0]["namespace"] == SPACE
    assert not render_set("cpu").all("Role")
    direct = render(("cpu", "ray"), {"autoscaler": {"driver": "kuberay-direct"}})
    assert direct.of("Role", "autoscaler")["rules"] == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayclusters"],
            "resourceNames": [f"{RELEASE}-isthmus"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    assert not render_set("ray").all("Role")  # Ray's operator makes the one its autoscaler needs
    for name in SETS:
        assert not render_set(name).all("ClusterRole")


@every_set
def test_row_10_pods_keep_to_the_restricted_standard(name: str) -> None:
    for pod in render_set(name).pods:
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        assert not any("hostPath" in each for each in pod.spec.get("volumes", ()))


@every_set
def test_row_11_containers_can_write_nothing_and_gain_nothing(name: str) -> None:
    for pod in render_set(name).pods:
        for container in pod.containers:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            added = context["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if name == "rdma" and pod.component in POOLS else [])
        if pod.component in ("redis", "test"):
            continue
        mounts = {each["mountPath"] for each in pod.main["volumeMounts"]}
        assert {"/tmp", "/run/isthmus", "/etc/isthmus"} <= mounts
        assert env(pod)["HOME"] == "/tmp"  # where compiled kernels are kept


@every_set
def test_row_12_every_container_has_requests_and_a_limit_of_memory(name: str) -> None:
    for where, container in containers(render_set(name)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), where
        assert "memory" in resources["limits"], where
        assert "cpu" not in resources["limits"], where  # throttling shows as latency
        assert not any("/" in device for device in resources["requests"]), where


@pytest.mark.parametrize(
    ("accelerator", "device"),
    [
        ({"type": "nvidia", "count": 2}, {"nvidia.com/gpu": "2"}),
        ({"type": "nvidia", "mig": "1g.10gb"}, {"nvidia.com/mig-1g.10gb": "1"}),
        ({"type": "amd"}, {"amd.com/gpu": "1"}),
        ({"type": "intel"}, {"gpu.intel.com/i915": "1"}),
        ({"type": "tpu", "count": 4}, {"google.com/tpu": "4"}),
        ({"type": "nvidia", "resourceName": "vendor/shared"}, {"vendor/shared": "1"}),
    ],
)
def test_row_13_accelerators_by_type(accelerator: Manifest, device: Manifest) -> None:
    rendered = render(values={"pools": {"decode": {"accelerator": accelerator}}})
    limits = rendered.pod("decode").main["resources"]["limits"]
    assert {k: v for k, v in limits.items() if "/" in k} == device
    assert not any("/" in k for k in rendered.pod("prefill").main["resources"]["limits"])
    assert "mig is for" in refusal(
        {"pools": {"decode": {"accelerator": {"type": "amd", "mig": "1g.10gb"}}}}
    )


def test_row_14_devices_by_claims() -> None:
    values = {"pools": {"prefill": {"dra": {"enabled": True, "count": 2}}}}
    rendered = render(values=values)
    pod, claim = rendered.pod("prefill"), rendered.of("ResourceClaimTemplate", "prefill")
    name = claim["metadata"]["name"]
    assert pod.spec["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": name}]
    assert pod.main["resources"]["claims"] == [{"name": "devices"}]
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert request["exactly"]["count"] == 2
    both = {"pools": {"prefill": {"dra": {"enabled": True}, "accelerator": {"type": "nvidia"}}}}
    assert "not by both" in refusal(both)
    assert not render_set("cpu").all("ResourceClaimTemplate")


def test_row_15_rdma_has_devices_locked_memory_and_variables() -> None:
    rendered = render_set("rdma")
    for pool in POOLS:
        pod = rendered.pod(pool)
        assert pod.main["resources"]["limits"]["rdma/hca"] == "1"
        assert pod.main["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert env(pod)["NCCL_IB_HCA"] == "mlx5"
        assert env(pod)["UCX_TLS"] == "rc,cuda_copy,tcp"
    assert "IPC_LOCK" not in str(rendered.pod("router").spec)
    on_host = render(SETS["rdma"], {"transfer": {"rdma": {"hostNetwork": True}}}).pod("decode")
    assert on_host.spec["hostNetwork"] is True
    assert on_host.spec["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_row_16_shared_memory_is_memory_with_a_limit() -> None:
    for pool in POOLS:
        pod = render_set("h100").pod(pool)
        assert volume(pod, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        paths = {each["name"]: each["mountPath"] for each in pod.main["volumeMounts"]}
        assert paths["shm"] == "/dev/shm"


@every_set
def test_row_17_probes_are_three_and_the_start_may_take_ten_minutes(name: str) -> None:
    """RB-113: a worker that loads its model for as long as that is not killed."""
    for pod in own_pods(render_set(name)):
        for container in pod.spec["containers"]:
            if container["name"] in ("ray-head", "ray-worker"):
                continue  # KubeRay writes probes itself
            start, live = container["startupProbe"], container["livenessProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] >= 600, pod.component
            noticed_s = live["periodSeconds"] * live["failureThreshold"] + live["timeoutSeconds"]
            assert noticed_s <= 15, pod.component
            assert live["failureThreshold"] >= 2  # a process may be suspended for a moment
            assert container["readinessProbe"]["failureThreshold"] <= 3


def test_row_17_probes_ask_the_right_question() -> None:
    rendered = render_set("cpu")
    for pool in POOLS:
        worker = rendered.pod(pool).main
        assert worker["readinessProbe"]["grpc"] == {"port": 50061, "service": "readiness"}
        assert worker["livenessProbe"]["grpc"] == {"port": 50061, "service": "liveness"}
    router = rendered.pod("router").main
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert router["livenessProbe"]["httpGet"]["path"] == "/health"
    secure = render_set("default").pod("router").main
    assert secure["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for pool in POOLS:  # no TLS in gRPC probes: the metrics port answers, without a token
        worker = render_set("default").pod(pool).main
        assert worker["startupProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
        assert worker["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
        assert worker["livenessProbe"]["httpGet"] == {"path": "/live", "port": "metrics"}
    slower = {"podDefaults": {"probes": {"startup": {"failureThreshold": 300}}}}
    probe = render(values=slower).pod("decode").main["startupProbe"]
    assert probe["failureThreshold"] == 300
    assert probe["periodSeconds"] == 10


@every_set
def test_row_18_every_pod_waits_before_it_drains_and_has_time_for_both(name: str) -> None:
    for pod in own_pods(render_set(name)):
        wait, drain = _times(pod, render_set(name))
        assert wait > 0
        assert pod.spec["terminationGracePeriodSeconds"] > wait + drain + 5, pod.component


def _times(pod: Pod, rendered: Rendered) -> tuple[float, float]:
    """Seconds before SIGTERM, and those that the process itself may take afterwards."""
    command = pod.main["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    if pod.component in ("autoscaler", "operator", "redis"):
        return float(command[1]), 5.0
    settings = config(rendered, pod.component)
    section = settings["router" if pod.component == "router" else "worker"]
    return float(command[1]), float(section["drain_s"])


def test_row_19_every_component_has_a_disruption_budget() -> None:
    rendered = render_set("production")
    budgets = {each["metadata"]["name"] for each in rendered.all("PodDisruptionBudget")}
    components = ("router", "prefill", "decode", "autoscaler")
    assert budgets == {f"{RELEASE}-isthmus-{component}" for component in components}
    for each in rendered.all("PodDisruptionBudget"):
        assert each["spec"]["maxUnavailable"] == 1
    without = render(values={"router": {"pdb": {"enabled": False}}})
    assert f"{RELEASE}-isthmus-router" not in {
        each["metadata"]["name"] for each in without.all("PodDisruptionBudget")
    }


def test_row_20_pods_are_spread_and_can_be_placed() -> None:
    constraints = render_set("cpu").pod("decode").spec["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in constraints] == ["kubernetes.io/hostname"]
    zones = render_set("production").pod("decode").spec["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in zones] == [
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    ]
    for each in zones:
        assert each["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    values = {
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "t"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
    }
    placed = render(values={"router": values}).pod("router").spec
    assert {key: placed[key] for key in values} == values
    racks = render_set("rdma").pod("prefill").spec["affinity"]["podAffinity"]
    (term,) = racks["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/rack"
    (both,) = term["podAffinityTerm"]["labelSelector"]["matchExpressions"]
    assert both == {"key": "isthmus.dev/pool", "operator": "Exists"}


def test_row_21_classes_can_be_given() -> None:
    names = {"priorityClassName": "p", "runtimeClassName": "r", "schedulerName": "s"}
    spec = render(values={"pools": {"prefill": names}}).pod("prefill").spec
    assert {key: spec[key] for key in names} == names
    assert not names.keys() & render_set("cpu").pod("prefill").spec.keys()
    assert render_set("h100").pod("decode").spec["runtimeClassName"] == "nvidia"


def test_row_22_a_pod_with_an_accelerator_goes_before_the_next_comes() -> None:
    for pool in POOLS:
        strategy = render_set("h100").of("Deployment", pool)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        strategy = render_set("cpu").of("Deployment", pool)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    own = {"pools": {"prefill": {"strategy": {"type": "Recreate"}}}}
    assert render(values=own).of("Deployment", "prefill")["spec"]["strategy"] == {
        "type": "Recreate"
    }


HPA = {"enabled": True, "metrics": [{"type": "Resource", "resource": {"name": "cpu"}}]}


def test_row_23_replicas_are_not_written_where_somebody_else_sizes() -> None:
    assert render_set("cpu").of("Deployment", "decode")["spec"]["replicas"] == 2
    scaled = render_set("production")
    for pool in POOLS:
        assert "replicas" not in scaled.of("Deployment", pool)["spec"]
    assert scaled.of("Deployment", "router")["spec"]["replicas"] == 3
    for values in ({"hpa": HPA}, {"scaledExternally": True}):
        rendered = render(values={"pools": {"decode": values}})
        assert "replicas" not in rendered.of("Deployment", "decode")["spec"]
        assert rendered.of("Deployment", "prefill")["spec"]["replicas"] == 1
    router = render(values={"router": {"hpa": {"enabled": True}}})
    assert "replicas" not in router.of("Deployment", "router")["spec"]
    assert router.of("HorizontalPodAutoscaler", "router")["spec"]["maxReplicas"] == 10


def test_row_23_two_that_size_one_pool_are_refused() -> None:
    both = {"pools": {"decode": {"hpa": HPA}}}
    assert "only one of" in refusal(both, ("production",))
    assert "only one of" in refusal({"pools": {"decode": {"hpa": HPA, "scaledExternally": True}}})
    lws = {"pools": {"kind": "LeaderWorkerSet"}}
    assert "sizes Deployments" in refusal(lws, ("production",))


@every_set
def test_row_24_policies_deny_by_default(name: str) -> None:
    rendered = render_set(name)
    deny = rendered.of("NetworkPolicy", "default")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert [rule["ports"] for rule in deny["egress"]] == [
        [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    ]
    selector = deny["podSelector"]["matchLabels"]
    for pod in rendered.pods:
        assert selector.items() <= pod.meta["labels"].items()
    assert not render(SETS[name], {"networkPolicy": {"enabled": False}}).all("NetworkPolicy")


def test_row_25_monitors_where_the_cluster_knows_them() -> None:
    values = {
        "monitoring": {
            "labels": {"release": "prometheus"},
            "interval": "30s",
            "relabelings": [{"action": "drop"}],
            "metricRelabelings": [{"action": "keep"}],
        }
    }
    rendered = render(SETS["production"], values)
    monitor = rendered.of("ServiceMonitor", "router")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    ports = [each["port"] for each in monitor["spec"]["endpoints"]]
    assert ports == ["metrics", "metrics-1"]  # one for each process
    service = rendered.of("Service", "router-metrics")
    assert [each["name"] for each in service["spec"]["ports"]] == ports
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    for each in (*monitor["spec"]["endpoints"], *_pod_endpoints(rendered)):
        assert each["interval"] == "30s"
        assert each["relabelings"] == [{"action": "drop"}]
        assert each["metricRelabelings"] == [{"action": "keep"}]
    names = {each["metadata"]["name"] for each in rendered.all("PodMonitor")}
    assert names == {f"{RELEASE}-isthmus-workers", f"{RELEASE}-isthmus-autoscaler"}
    blind = render(SETS["production"], apis=())
    assert not blind.all("ServiceMonitor") + blind.all("PodMonitor") + blind.all("PrometheusRule")
    told = render(SETS["production"], {"monitoring": {"assumeApi": True}}, apis=())
    assert told.all("ServiceMonitor")


def _pod_endpoints(rendered: Rendered) -> list[Manifest]:
    return [
        end for each in rendered.all("PodMonitor") for end in each["spec"]["podMetricsEndpoints"]
    ]


def test_row_25_scrapes_bring_what_metrics_ask_for() -> None:
    rendered = render_set("production")
    (door, _) = rendered.of("ServiceMonitor", "router")["spec"]["endpoints"]
    assert door["authorization"]["credentials"]["name"] == "isthmus-monitor-key"
    (worker,) = rendered.of("PodMonitor", "workers")["spec"]["podMetricsEndpoints"]
    assert worker["authorization"]["credentials"] == {
        "name": "isthmus-metrics-token",
        "key": "token",
    }
    open_doors = render(values={"monitoring": {"enabled": True}})
    assert "authorization" not in str(
        open_doors.all("ServiceMonitor") + open_doors.all("PodMonitor")
    )


def _as_text(groups: Iterable[object]) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in groups)


def test_row_26_alerts_and_dashboards_are_packed(tmp_path: Path) -> None:
    chart = tmp_path / "isthmus"
    shutil.copytree(CHART, chart)
    (chart / "files" / "planted").mkdir(parents=True)
    rule = {"alert": "Planted", "expr": "up == 0", "annotations": {"summary": "{{ $value }} gone"}}
    planted = {"groups": [{"name": "planted", "rules": [rule]}]}
    (chart / "files" / "planted" / "more_alerts.yaml").write_text(yaml.safe_dump(planted))
    (chart / "files" / "planted" / "Board.json").write_text('{"title": "{{ instance }}"}')
    command = ("template", RELEASE, str(chart), "--namespace", SPACE, "--api-versions", MONITORING)
    rendered = Rendered(helm(*command, profiles=("production",)))
    files = sorted((chart / "files").rglob("*"))
    rules = [path for path in files if path.suffix in (".yml", ".yaml")]
    wanted = [yaml.safe_load(path.read_text())["groups"] for path in rules]
    packed = {
        each["metadata"]["name"]: each["spec"]["groups"] for each in rendered.all("PrometheusRule")
    }
    assert packed["rel-isthmus-more-alerts"] == planted["groups"]
    assert _as_text(packed.values()) == _as_text(wanted)
    boards = {
        name: json.loads(text)
        for each in rendered.all("ConfigMap")
        if each["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in each["data"].items()
    }
    assert boards == {p.name: json.loads(p.read_text()) for p in files if p.suffix == ".json"}
    for each in rendered.all("PrometheusRule"):
        assert each["metadata"]["labels"]["release"] == "prometheus"
    off = (
        "--set",
        "monitoring.rules.enabled=false",
        "--set",
        "monitoring.dashboards.enabled=false",
    )
    text = helm(*command, *off, profiles=("production",))
    assert "PrometheusRule" not in text
    assert "grafana_dashboard" not in text


def test_row_27_traces_go_where_values_say() -> None:
    values = {"otel": {"endpoint": "http://collector:4317", "sampleRatio": 0.5}}
    rendered = render(values=values)
    for component in ("router", *POOLS):
        telemetry = config(rendered, component)["telemetry"]
        assert telemetry["otlp_endpoint"] == "http://collector:4317"
        assert telemetry["sample_ratio"] == 0.5
    assert "otlp_endpoint" not in config(render(), "router")["telemetry"]


def test_row_28_doors_are_reached_by_ingress_or_routes() -> None:
    tls = [{"secretName": "s", "hosts": ["a.example"]}]
    values = {
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example"], "tls": tls},
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.example"]},
    }
    rendered = render(values=values)
    ingress = rendered.of("Ingress", "router")["spec"]
    assert ingress["tls"] == tls
    assert ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"] == {"name": "http"}
    ports = {"GRPCRoute": 50051, "HTTPRoute": 8000}
    for kind, port in ports.items():
        route = rendered.of(kind, "router")["spec"]
        assert route["parentRefs"] == [{"name": "g"}]
        assert route["hostnames"] == ["a.example"]
        assert route["rules"][0]["backendRefs"] == [
            {"name": f"{RELEASE}-isthmus-router", "port": port}
        ]
    assert not render(values=values, apis=()).all("HTTPRoute")
    one = copy.deepcopy(values) | {"gateway": {"enabled": True, "grpc": False}}
    assert not render(values=one).all("GRPCRoute")
    assert render(values=one).all("HTTPRoute")


def test_row_29_services_name_their_protocols_and_workers_are_headless() -> None:
    rendered = render_set("cpu")
    doors = {each["name"]: each for each in rendered.of("Service", "router")["spec"]["ports"]}
    assert doors["grpc"]["appProtocol"] == "kubernetes.io/h2c"
    assert doors["http"]["appProtocol"] == "http"
    secure = render_set("default").of("Service", "router")["spec"]["ports"]
    assert [each["appProtocol"] for each in secure] == ["grpc", "https"]
    for pool in POOLS:
        assert rendered.of("Service", pool)["spec"]["clusterIP"] == "None"
    values = {
        "type": "LoadBalancer",
        "annotations": {"a": "b"},
        "loadBalancerClass": "c",
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    service = render(values={"router": {"service": values}}).of("Service", "router")
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert {key: service["spec"][key] for key in values if key != "annotations"} == {
        key: value for key, value in values.items() if key != "annotations"
    }


@every_set
def test_row_30_secrets_are_named_and_never_held(name: str) -> None:
    rendered = render_set(name)
    assert not rendered.all("Secret")
    for pod in own_pods(rendered):
        address = env(pod).get("ISTHMUS_STORE__URL", "")
        assert isinstance(address, dict) or "@" not in address or "$(REDIS_PASSWORD)" in address
    for each in rendered.all("ConfigMap"):
        assert not re.search(r"redis://|rediss://|password", json.dumps(each["data"]))


def test_row_30_every_secret_can_be_ones_own() -> None:
    values = {
        "auth": {"existingSecret": "a", "metricsTokenSecret": "m", "tenantsSecret": "t"},
        "tls": {"doorsSecret": "d", "routerSecret": "r", "workerSecret": "w"},
        "transfer": {"existingSecret": "k"},
        "redis": {"external": {"existingSecret": "s", "caKey": "ca.pem"}},
    }
    rendered = render((), values)
    router, worker = rendered.pod("router"), rendered.pod("decode")
    assert _secrets(router) == {
        "keys": "a",
        "tenants": "t",
        "doors": "d",
        "cluster": "r",
        "store": "s",
    }
    assert _secrets(worker) == {"kv": "k", "metrics": "m", "cluster": "w", "store": "s"}
    assert env(worker)["ISTHMUS_STORE__URL"] == {"secretKeyRef": {"name": "s", "key": "url"}}


def _secrets(pod: Pod) -> dict[str, str]:
    return {
        each["name"]: each["secret"]["secretName"]
        for each in pod.spec["volumes"]
        if "secret" in each
    }


def test_row_31_certificates_are_made_or_given() -> None:
    issuer = {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    values = {"tls": {"mode": "certManager", "certManager": {"issuerRef": issuer}}}
    rendered = render((), values)
    made = {each["spec"]["secretName"]: each["spec"] for each in rendered.all("Certificate")}
    given = render((), {})
    assert not given.all("Certificate")
    assert _secrets(given.pod("router")) == _secrets(rendered.pod("router"))
    # The names that routers and workers ask of one another.
    assert made["isthmus-router-tls"]["dnsNames"] == ["isthmus-router"]
    assert made["isthmus-worker-tls"]["dnsNames"] == ["isthmus-worker"]
    assert f"{RELEASE}-isthmus-router.{SPACE}.svc" in made["isthmus-doors-tls"]["dnsNames"]
    assert all(each["issuerRef"] == issuer for each in made.values())
    for name in ("isthmus-router-tls", "isthmus-worker-tls"):
        assert made[name]["usages"] == ["server auth", "client auth"]
    assert "issuerRef.name" in refusal({"tls": {"mode": "certManager"}}, ())


def test_row_32_pods_are_replaced_when_their_settings_change() -> None:
    def sums(values: Manifest) -> dict[str, tuple[str, str]]:
        return {
            pod.component: (
                pod.meta["annotations"]["checksum/config"],
                pod.meta["annotations"]["checksum/secret"],
            )
            for pod in own_pods(render((), values))
        }

    base = sums({})
    router = sums({"router": {"config": {"admission": {"max_queued": 10}}}})
    assert router["router"] != base["router"]
    assert {pool: router[pool] for pool in POOLS} == {pool: base[pool] for pool in POOLS}
    other = sums({"transfer": {"existingSecret": "other"}})
    assert other["decode"] != base["decode"]
    assert other["router"] == base["router"]
    bumped = sums({"secretsRevision": "2"})
    assert all(bumped[component][1] != base[component][1] for component in base)
    assert all(bumped[component][0] == base[component][0] for component in base)


def test_row_33_settings_are_a_config_map_and_the_policy_a_file_and_a_resource() -> None:
    rendered = render_set("production")
    for component in ("router", *POOLS):
        mounted = volume(rendered.pod(component), "config")["configMap"]["name"]
        assert mounted == f"{RELEASE}-isthmus-{component}"
    data = rendered.of("ConfigMap", "autoscaler")["data"]
    file = yaml.safe_load(data["policy.yaml"])
    (resource,) = rendered.all("PoolAutoscalingPolicy")
    assert file["spec"] == resource["spec"]
    assert file["spec"].items() >= POLICY.items()
    args = rendered.pod("autoscaler").main["args"]
    assert args[args.index("--policy") + 1] == "/etc/isthmus/policy.yaml"
    typed = config(render(values={"model": {"name": "/models/m", "maxModelLen": 4096}}), "decode")
    assert typed["model"] == {"name": "/models/m", "max_model_len": 4096}


def test_row_34_everything_can_be_added_to() -> None:
    mount = {"name": "more", "mountPath": "/more"}
    values = {
        "extraEnv": [{"name": "A", "value": "1"}],
        "extraEnvFrom": [{"secretRef": {"name": "s"}}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [mount],
        "extraArgs": ["--log-level", "debug"],
        "initContainers": [{"name": "first", "image": "{{ .Release.Name }}"}],
        "sidecars": [{"name": "beside", "image": "{{ .Chart.Name }}"}],
        "podAnnotations": {"note": "x"},
        "podLabels": {"team": "y"},
    }
    for component in ("router", *POOLS):
        given: Manifest = (
            {component: values} if component == "router" else {"pools": {component: values}}
        )
        pod = render(values=given).pod(component)
        assert pod.main["env"][-1] == {"name": "A", "value": "1"}
        assert pod.main["envFrom"] == values["extraEnvFrom"]
        assert mount in pod.main["volumeMounts"]
        assert volume(pod, "more") == {"name": "more", "emptyDir": {}}
        assert pod.main["args"][-2:] == ["--log-level", "debug"]
        assert pod.spec["initContainers"][0]["image"] == RELEASE
        assert pod.spec["containers"][-1]["image"] == "isthmus"
        assert pod.meta["annotations"]["note"] == "x"
        assert pod.meta["labels"]["team"] == "y"
    text = (
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text', labels: {}}"
    )
    mapping = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-map"},
    }
    extra = render(values={"extraObjects": [text, mapping]})
    assert extra.one("ConfigMap", f"{RELEASE}-text")
    assert extra.one("ConfigMap", f"{RELEASE}-map")


def test_row_35_models_come_from_an_image_or_a_volume_never_from_a_hub() -> None:
    def models(**values: Any) -> Manifest:
        rendered = render(values={"model": {"volume": values}})
        for component in ("router", *POOLS):
            assert config(rendered, component)["model"]["cache_dir"] == "/models"
        return volume(rendered.pod("decode"), "models")

    assert "models" not in str(render().pod("decode").spec["volumes"])
    claim = models(type="existingClaim", existingClaim="c")["persistentVolumeClaim"]
    assert claim == {"claimName": "c", "readOnly": True}
    assert models(type="emptyDir", size="5Gi")["emptyDir"] == {"sizeLimit": "5Gi"}
    image = models(type="image", imageReference="r.example/m:1")["image"]
    assert image["reference"] == "r.example/m:1"
    made = {"type": "pvc", "size": "50Gi", "storageClass": "fast", "readOnly": False}
    assert models(**made)["persistentVolumeClaim"]["claimName"] == f"{RELEASE}-isthmus-models"
    rendered = render(values={"model": {"volume": made}})
    pvc = rendered.of("PersistentVolumeClaim", "models")
    assert pvc["spec"]["storageClassName"] == "fast"
    assert pvc["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert pvc["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "existingClaim" in refusal({"model": {"volume": {"type": "existingClaim"}}})


def test_row_36_pools_can_be_ray_or_leader_worker_sets() -> None:
    rendered = render_set("ray")
    (cluster,) = rendered.all("RayCluster")
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    assert groups.keys() == set(POOLS)
    assert groups["decode"]["rayStartParams"]["resources"] == "'{\"decode_slot\": 1}'"
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    head = cluster["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert [each["name"] for each in head["template"]["spec"]["containers"]] == [
        "ray-head",
        "autoscaler",
    ]
    assert not {f"{RELEASE}-isthmus-{pool}" for pool in POOLS} & {
        each["metadata"]["name"] for each in rendered.all("Deployment")
    }
    direct = render(("cpu", "ray"), {"autoscaler": {"driver": "kuberay-direct"}})
    assert direct.all("RayCluster")[0]["spec"]["enableInTreeAutoscaling"] is False
    sets = render(values={"pools": {"kind": "LeaderWorkerSet"}})
    for pool in POOLS:
        group = sets.of("LeaderWorkerSet", pool)["spec"]["leaderWorkerTemplate"]
        assert group["size"] == 1
        assert group["workerTemplate"] == render().of("Deployment", pool)["spec"]["template"]


def test_row_36_what_does_not_go_with_ray_is_refused() -> None:
    assert "autoscaler.driver" in refusal({"autoscaler": {"driver": "deployment"}}, ("cpu", "ray"))
    assert "set autoscaler.enabled" in refusal(
        {"ray": {"enabled": True}, "pools": {"prefill": {"drainSeconds": 120}}}
    )
    assert "one configuration" in refusal({"pools": {"decode": {"threads": 3}}}, ("cpu", "ray"))


def test_row_37_other_charts_are_not_pulled_in_and_the_store_is_external_first() -> None:
    assert not CHART_YAML.get("dependencies")
    assert not [pod for pod in render_set("default").pods if pod.component == "redis"]
    store = render_set("cpu").pod("redis")
    assert {"--maxmemory-policy", "noeviction", "128"} <= set(store.main["args"])
    assert "exactly one" in refusal({"redis": {"external": {"enabled": True}}})
    values = {"redis": {"bundled": {"existingSecret": "pw"}}}
    guarded = render(values=values)
    assert "--requirepass" in guarded.pod("redis").main["args"]
    assert env(guarded.pod("router"))["ISTHMUS_STORE__URL"].startswith(
        "redis://:$(REDIS_PASSWORD)@"
    )


def test_row_38_definitions_are_installed_once_and_upgraded_by_hand() -> None:
    kinds = {path.name for path in (CHART / "crds").glob("*.yaml")}
    generated = {path.name for path in pages() if path.parent.name == "crds"}
    assert kinds == generated
    for page in (CHART / "templates/NOTES.txt", ROOT / "docs/operations/kubernetes.md"):
        assert "kubectl apply --server-side -f helm/isthmus/crds/" in page.read_text()
    assert not render_set("production").all("CustomResourceDefinition")


def test_row_39_there_is_no_webhook_to_fail() -> None:
    for name in SETS:
        assert "admissionregistration" not in render_set(name).text


def test_row_40_operators_are_two_and_one_leads() -> None:
    rendered = render_set("operator")
    assert rendered.of("Deployment", "operator")["spec"]["replicas"] == 2
    assert rendered.of("PodDisruptionBudget", "operator")["spec"]["maxUnavailable"] == 1
    lease, *others = rendered.of("Role", "operator")["rules"]
    assert lease["resources"] == ["leases"]
    assert lease["verbs"] == ["get", "create", "update"]
    assert others
    wide = render(("cpu", "operator"), {"operator": {"clusterWide": True}})
    assert wide.of("Role", "operator")["rules"] == [lease]
    (role,), (binding,) = wide.all("ClusterRole"), wide.all("ClusterRoleBinding")
    assert role["rules"] == others
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == SPACE
    assert "--cluster-wide" in wide.pod("operator").main["args"]
    assert "--cluster-wide" not in rendered.pod("operator").main["args"]
    assert "needs operator.enabled" in refusal({"cluster": {"create": True}})


def test_row_41_notes_tell_what_to_do_and_a_test_pod_asks_a_router() -> None:
    command = ("install", RELEASE, str(CHART), "--dry-run=client", "--namespace", SPACE)
    told = helm(*command, profiles=("cpu",))
    assert "port-forward service/rel-isthmus-router" in told
    assert "WARNING: whoever reaches the doors" in told
    test = render_set("default").pod("test")
    assert test.meta["annotations"]["helm.sh/hook"] == "test"
    assert f"https://{RELEASE}-isthmus-router.{SPACE}.svc:8000/ready" in test.main["command"]
    ast.parse(test.main["command"][2])
    assert not render(values={"tests": {"enabled": False}}).all("Pod")


def test_row_42_every_row_has_a_test() -> None:
    text = (ROOT / "tests/helm/test_review_list.py").read_text()
    rows = {int(row) for row in re.findall(r"^def test_row_(\d\d)_", text, re.MULTILINE)}
    assert rows == set(range(1, 46))


def test_row_43_values_are_documented_by_a_generated_table() -> None:
    page = (CHART / "README.md").read_text()
    for section in VALUES:
        assert f"`{section}" in page, section
    assert "rendered, not run" in page.lower()


def test_row_44_profiles_are_there_and_lint() -> None:
    used = {name for profiles in SETS.values() for name in profiles}
    assert {path.stem.removeprefix("values-") for path in PROFILES.glob("*.yaml")} == used
    for name in SETS:
        assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), profiles=SETS[name])
    for name in ("h100", "h200", "rdma"):
        assert "Rendered, not" in (PROFILES / f"values-{name}.yaml").read_text()


@every_set
def test_row_45_everything_is_in_the_name_space_and_nothing_is_looked_up(
    name: str,
) -> None:
    for each in render_set(name).manifests:
        assert each["metadata"]["namespace"] == SPACE, each["kind"]
    for path in sorted((CHART / "templates").rglob("*")):
        if path.is_file():
            assert not re.search(r"\blookup\b", path.read_text()), path
    command = ["template", RELEASE, str(CHART), "--namespace", SPACE]
    for api in (MONITORING, GATEWAY):
        command += ["--api-versions", api]
    # Nothing is drawn or read from a clock.
    assert helm(*command, profiles=SETS[name]) == render_set(name).text
