"""The chart in the stand-in: what helm makes of it, and who may do what there."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.autoscaler.deployment_driver import DeploymentDriver
from services.autoscaler.kube_api import KubeApi
from services.autoscaler.kuberay_driver import KubeRayDirect
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.worker_calls import WorkerCalls
from services.common.clock import ManualClock, SystemClock
from tests.fakekube.access import Grant, service_account, unused
from tests.fakekube.kinds import Resource
from tests.fakekube.kube import FakeKube
from tests.fakekube.pods import PodPlan
from tests.fakekube.programs import Programs
from tests.fakekube.references import references
from tests.helm.rendering import CHART, PROFILES, SETS, Rendered, render, render_set
from tests.support.memory_driver import MemoryDriver

pytestmark = pytest.mark.integration
_WAIT = ("--wait", "--timeout", "180s")
_POLICY = CHART.parent.parent / "services" / "autoscaler" / "example.yaml"
_CRD = CHART / "crds" / "poolautoscalingpolicies.yaml"


def profiles(name: str) -> list[str | Path]:
    """Arguments for one of SETS."""
    files = [("--values", PROFILES / f"values-{each}.yaml") for each in SETS[name]]
    return [part for pair in files for part in pair]


SCALED: Mapping[str, Any] = {
    "autoscaler": {
        "enabled": True,
        "policy": {
            "mode": "Auto",
            "slo": {
                "ttft": {"percentile": "p95", "targetMilliseconds": 1000},
                "itl": {"percentile": "p95", "targetMilliseconds": 100},
            },
            "pools": [
                _pool | {"minReplicas": 1, "maxReplicas": 8}
                for _pool in (
                    {
                        "name": "prefill",
                        "role": "Prefill",
                        "metrics": [{"type": "TTFT", "target": {"type": "Value", "value": "1"}}],
                    },
                    {
                        "name": "decode",
                        "role": "Decode",
                        "metrics": [{"type": "ITL", "target": {"type": "Value", "value": "1"}}],
                    },
                )
            ],
        },
    }
}


@pytest.fixture
def scaled(tmp_path: Path) -> list[str | Path]:
    """Arguments for the trial profile with an autoscaler."""
    values = tmp_path / "scaled.yaml"
    values.write_text(json.dumps(SCALED))
    return [*profiles("cpu"), "--values", values]


def prepare(kube: FakeKube, rendered: Rendered) -> None:
    """Have what the chart's pods need and an administrator makes: Secrets and claims."""
    own = {(item["kind"], item["metadata"]["name"]) for item in rendered.manifests}
    wanted: dict[str, dict[str, str]] = {}
    for pod in rendered.pods:
        for need in references(pod.spec):
            if need.plural == "secrets" and ("Secret", need.name) not in own:
                wanted.setdefault(need.name, {}).update(dict.fromkeys(need.keys, "x"))
            elif (
                need.plural == "persistentvolumeclaims"
                and kube.find(need.plural, need.name) is None
            ):
                modes = {"accessModes": ["ReadWriteMany"], "resources": {}}
                kube.add("v1", "PersistentVolumeClaim", need.name, "default", spec=modes)
    for name, data in wanted.items():
        kube.add("v1", "Secret", name, "default", stringData=data)


def sizes(kube: FakeKube) -> dict[str, int]:
    """Sizes of both pools."""
    names = ("prefill", "decode")
    return {n: kube.see("deployments.apps", f"rel-isthmus-{n}")["spec"]["replicas"] for n in names}


class Calls(WorkerCalls):
    """Workers that drain when asked; no container runs in the stand-in."""

    async def drain(self, address: str) -> None:
        """Have it drain."""


def add_ray_pod(kube: FakeKube, group: str) -> str:
    """Have a pod as KubeRay would make one; nothing does so in the stand-in. Its name."""
    labels = {"ray.io/cluster": "rel-isthmus", "ray.io/group": group}
    meta = {"name": f"ray-{group}", "namespace": "default", "labels": labels}
    spec = {"containers": [{"name": "ray-worker", "image": "ray"}]}
    made = kube.post({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    kube.settle()
    return str(made["metadata"]["name"])


@asynccontextmanager
async def driving(kube: FakeKube, folder: Path) -> AsyncIterator[DeploymentDriver]:
    """Drive the pools as the chart's autoscaler: with its arguments, from its account."""
    template = kube.see("deployments.apps", "rel-isthmus-autoscaler")["spec"]["template"]["spec"]
    assert template["automountServiceAccountToken"] is True
    (container,) = template["containers"]
    named = [a.partition("=")[2] for a in container["args"] if a.startswith("--deployment=")]
    deployments = dict(pair.split("=") for pair in named)
    (port,) = [a.partition("=")[2] for a in container["args"] if a.startswith("--worker-port=")]
    api = KubeApi.in_cluster(*pod_account(kube, folder, template["serviceAccountName"]))
    driver = DeploymentDriver(api, deployments, Calls(), SystemClock(), int(port))
    try:
        yield driver
    finally:
        await driver.close()


def pod_account(kube: FakeKube, folder: Path, account: str) -> tuple[dict[str, str], Path]:
    """What a pod finds in its environment and in the folder of its account."""
    mounted = folder / f"account-{account}"
    mounted.mkdir()
    (mounted / "namespace").write_text("default")
    (mounted / "token").write_text(kube.token_of("default", account))
    shutil.copy(kube.ca_file, mounted / "ca.crt")
    host, port = kube.url.removeprefix("https://").split(":")
    return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, mounted


@pytest.mark.parametrize("name", sorted(SETS))
async def test_every_profile_installs_and_serves(
    name: str, kube: FakeKube, programs: Programs
) -> None:
    prepare(kube, render_set(name))
    await programs.helm("install", "rel", CHART, *profiles(name), *_WAIT)
    pods = kube.all("pods")
    assert pods
    assert {pod["status"]["phase"] for pod in pods} == {"Running"}


async def test_upgrades_rolls_back_tests_and_uninstalls(kube: FakeKube, programs: Programs) -> None:
    trial = profiles("cpu")

    def router() -> int:
        spec: Resource = kube.see("deployments.apps", "rel-isthmus-router")["spec"]
        return int(spec["replicas"])

    await programs.helm("install", "rel", CHART, *trial, *_WAIT)
    await programs.helm("upgrade", "rel", CHART, *trial, "--set", "router.replicas=3", *_WAIT)
    assert router() == 3
    await programs.helm("test", "rel", "--timeout", "180s")
    await programs.helm("rollback", "rel", "1", *_WAIT)
    assert router() == 1
    await programs.helm("uninstall", "rel", *_WAIT)
    left = await programs.kubectl("get", "all,configmaps,secrets,pdb,networkpolicies", "-o", "name")
    assert left == ""


async def test_no_release_of_the_chart_changes_a_selector(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    """RB-114: the version of the chart is in no field that never changes."""
    trial = profiles("cpu")
    await programs.helm("install", "rel", CHART, *trial, *_WAIT)
    before = {d["metadata"]["name"]: d["spec"]["selector"] for d in kube.all("deployments.apps")}
    newer = tmp_path / "newer"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    chart |= {"version": "99.0.0", "appVersion": "99.0.0"}
    (newer / "Chart.yaml").write_text(yaml.safe_dump(chart))
    labels = ("--set", "commonLabels.team=a,podDefaults.podLabels.tier=b")
    await programs.helm("upgrade", "rel", newer, *trial, *labels, *_WAIT)
    after = {d["metadata"]["name"]: d["spec"]["selector"] for d in kube.all("deployments.apps")}
    assert after == before
    router = kube.see("deployments.apps", "rel-isthmus-router")
    assert router["metadata"]["labels"]["team"] == "a"


async def test_upgrades_and_rollbacks_leave_sizes_to_the_autoscaler(
    kube: FakeKube, programs: Programs, tmp_path: Path, scaled: list[str | Path]
) -> None:
    await programs.helm("install", "rel", CHART, *scaled, *_WAIT)
    async with driving(kube, tmp_path) as driver:
        await driver.start("prefill", 2)
        await driver.start("decode", 3)
    assert sizes(kube) == {"prefill": 3, "decode": 4}
    changed = ("--set", "podDefaults.image.tag=other,router.replicas=2")
    await programs.helm("upgrade", "rel", CHART, *scaled, *changed, *_WAIT)
    assert sizes(kube) == {"prefill": 3, "decode": 4}
    await programs.helm("rollback", "rel", "1", *_WAIT)
    assert sizes(kube) == {"prefill": 3, "decode": 4}


async def test_a_size_that_helm_no_longer_gives_stays_if_it_was_handed_over(
    kube: FakeKube, programs: Programs, scaled: list[str | Path]
) -> None:
    """As docs/operations/kubernetes.md says to: otherwise Kubernetes puts its default, one."""
    fixed = ("--set", "pools.decode.replicas=4,pools.prefill.replicas=3")
    await programs.helm("install", "rel", CHART, *profiles("cpu"), *fixed, *_WAIT)
    kept = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "rel-isthmus-decode"},
        "spec": {"replicas": 4},
    }
    apply = ("apply", "--server-side", "--field-manager=handover", "-f", "-")
    await programs.kubectl(*apply, stdin=json.dumps(kept))
    await programs.helm("upgrade", "rel", CHART, *scaled, *_WAIT)
    assert sizes(kube) == {"prefill": 1, "decode": 4}


async def test_the_autoscalers_role_grants_what_it_uses_and_nothing_else(
    kube: FakeKube, programs: Programs, tmp_path: Path, scaled: list[str | Path]
) -> None:
    await programs.helm("install", "rel", CHART, *scaled, *_WAIT)
    user = service_account("default", "rel-isthmus-autoscaler")
    async with driving(kube, tmp_path) as driver:
        kube.pods.plan = lambda _pod: PodPlan(startup_s=3_600)
        await driver.start("prefill", 1)
        await driver.start("decode", 2)
        found = (await driver.replicas())["decode"]
        starting = [r.replica_id for r in found if r.state is ReplicaState.STARTING]
        await driver.cancel(starting)
        (ready,) = {r.replica_id for r in found} - set(starting)
        await driver.drain(ready, 10.0, OnDeadline.MIGRATE)
        await driver.stop(ready)
    assert sizes(kube)["decode"] == 0
    assert kube.access.refused(user) == set()
    assert unused(kube.access.rules_of(user), kube.access.calls_of(user)) == set()


async def test_the_role_for_kuberay_grants_what_its_driver_uses_and_nothing_else(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    direct = (*profiles("ray"), "--set", "autoscaler.driver=kuberay-direct")
    await programs.helm("install", "rel", CHART, *direct)
    (cluster,) = kube.all("rayclusters.ray.io")
    account = cluster["spec"]["headGroupSpec"]["template"]["spec"]["serviceAccountName"]
    actors = MemoryDriver(ManualClock())
    leaving, left = actors.add("decode"), add_ray_pod(kube, "decode")
    api = KubeApi.in_cluster(*pod_account(kube, tmp_path, account))
    groups = {"prefill": "prefill", "decode": "decode"}
    hosts = {leaving: kube.see("pods", left)["status"]["podIP"]}

    async def host_of(name: str) -> str | None:
        return hosts.get(name)

    driver = KubeRayDirect(actors, api, cluster["metadata"]["name"], groups, host_of)
    await driver.start("decode", 1)
    hosts[actors.ids("decode", ReplicaState.STARTING)[0]] = "10.9.9.9"
    actors.ready()
    await driver.stop(leaving)
    await driver.close()
    (group,) = [
        group
        for group in kube.all("rayclusters.ray.io")[0]["spec"]["workerGroupSpecs"]
        if group["groupName"] == "decode"
    ]
    assert (group["replicas"], group["scaleStrategy"]) == (1, {"workersToDelete": [left]})
    user = service_account("default", account)
    assert kube.access.refused(user) == set()
    assert unused(kube.access.rules_of(user), kube.access.calls_of(user)) == set()


async def test_a_verb_that_is_missing_shows_and_one_too_many_does(
    kube: FakeKube, programs: Programs, tmp_path: Path, scaled: list[str | Path]
) -> None:
    await programs.helm("install", "rel", CHART, *scaled, *_WAIT)
    user = service_account("default", "rel-isthmus-autoscaler")
    other = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get"]},
    ]
    patch = json.dumps({"rules": other})
    await programs.kubectl("patch", "role", "rel-isthmus-autoscaler", "--type=merge", "-p", patch)
    async with driving(kube, tmp_path) as driver:
        await driver.replicas()
        with pytest.raises(Exception, match="403"):
            await driver.start("decode", 1)
    (refused,) = kube.access.refused(user)
    assert (refused.verb, refused.resource) == ("update", "deployments/scale")
    left = unused(kube.access.rules_of(user), kube.access.calls_of(user))
    assert left == {Grant("delete", "", "pods")}


async def test_a_rollback_works_after_a_change_of_a_crd(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    trial = profiles("cpu")
    await programs.helm("install", "rel", CHART, *trial, *_WAIT)
    await programs.kubectl("apply", "-f", _POLICY)
    crd = yaml.safe_load(_CRD.read_text())
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    schema["note"] = {"type": "string", "default": "new"}
    newer = {**version, "name": "v1beta1", "storage": False}
    crd["spec"]["versions"].append(newer)
    changed = tmp_path / "crd.json"
    changed.write_text(json.dumps(crd))
    apply = ("apply", "--server-side", "--force-conflicts", "-f", changed)
    await programs.kubectl(*apply)
    await programs.helm("upgrade", "rel", CHART, *trial, "--set", "router.replicas=2", *_WAIT)
    await programs.helm("rollback", "rel", "1", *_WAIT)
    new = "poolautoscalingpolicies.v1beta1.autoscaling.isthmus.dev"
    shown = json.loads(await programs.kubectl("get", new, "chat", "-o", "json"))
    assert shown["spec"]["mode"] == "DryRun"
    await programs.kubectl("apply", "-f", _POLICY)
    history = json.loads(await programs.helm("history", "rel", "-o", "json"))
    assert history[-1]["status"] == "deployed"


async def test_kubectl_applies_the_example_policy_and_shows_it(
    kube: FakeKube, programs: Programs
) -> None:
    await programs.kubectl("apply", "-f", _CRD)
    await programs.kubectl("wait", "--for=condition=Established", "-f", _CRD, "--timeout=60s")
    assert "created" in await programs.kubectl("apply", "-f", _POLICY)
    head, row = (await programs.kubectl("get", "pap")).splitlines()
    assert head.split()[:3] == ["NAME", "CLUSTER", "MODE"]
    assert row.split()[:3] == ["chat", "chat", "DryRun"]
    wrong = _POLICY.read_text().replace("mode: DryRun", "mode: Sometimes")
    done = await programs.failing("kubectl", "apply", "-f", "-", stdin=wrong)
    assert "'Sometimes' is not one of" in done.err


async def test_kubectl_shows_the_cluster_that_the_chart_makes_for_its_operator(
    kube: FakeKube, programs: Programs
) -> None:
    operated = ("--set", "operator.enabled=true,cluster.create=true")
    await programs.helm("install", "rel", CHART, *profiles("cpu"), *operated)
    head, row = (await programs.kubectl("get", "isthmusclusters")).splitlines()
    assert head.split()[:3] == ["NAME", "MODEL", "AVAILABLE"]
    assert {"DEGRADED", "ROUTERS", "PREFILL", "DECODE", "AGE"} <= set(head.split())
    assert row.split()[:2] == ["rel-isthmus", "smollm2"]


def test_accounts_without_a_role_have_no_token_in_their_pods() -> None:
    for pod in render(values=SCALED).pods:
        mounted = pod.spec["automountServiceAccountToken"]
        assert mounted is (pod.component == "autoscaler"), pod.component
