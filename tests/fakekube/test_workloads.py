"""Controllers of the stand-in, on a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.clock import ManualClock
from tests.fakekube.api import Options, Target
from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Resource
from tests.fakekube.kube import FakeKube
from tests.fakekube.pods import GPU, PodPlan


def make_kube(**plan: Any) -> FakeKube:
    """One whose pods all go this way."""
    kube = FakeKube(ManualClock())
    kube.pods.plan = lambda _pod: PodPlan(**plan)
    return kube


def make_deployment(kube: FakeKube, replicas: int = 2, **spec: Any) -> None:
    """Have a Deployment."""
    labels = {"matchLabels": {"app": "web"}}
    spec = {"replicas": replicas, "selector": labels, "template": template("a:1"), **spec}
    kube.add("apps/v1", "Deployment", "web", "default", spec=spec)
    kube.settle()


def template(image: str, **container: Any) -> Resource:
    """Have pods of this image."""
    return {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "main", "image": image, **container}]},
    }


def change(kube: FakeKube, **spec: Any) -> None:
    """Change the Deployment's specification."""
    kind = kube.kinds.of(("apps", "deployments"))
    assert kind is not None
    sort = "application/merge-patch+json"
    kube.api.patch(Target(kind, "default", "web"), sort, {"spec": spec}, Options("test"))
    kube.settle()


def images(kube: FakeKube) -> list[str]:
    """Images of pods that are not on their way out, in order."""
    return sorted(
        pod["spec"]["containers"][0]["image"]
        for pod in kube.all("pods")
        if "deletionTimestamp" not in pod["metadata"]
    )


def conditions(kube: FakeKube) -> dict[str, tuple[str, str]]:
    """Status and reason of the Deployment's conditions."""
    found = kube.see("deployments.apps", "web")["status"]["conditions"]
    return {c["type"]: (c["status"], c["reason"]) for c in found}


def test_pods_serve_once_their_start_is_over() -> None:
    kube = make_kube(startup_s=60)
    make_deployment(kube)
    kube.advance(59)
    assert conditions(kube)["Available"] == ("False", "MinimumReplicasUnavailable")
    kube.advance(1)
    assert conditions(kube) == {
        "Available": ("True", "MinimumReplicasAvailable"),
        "Progressing": ("True", "NewReplicaSetAvailable"),
    }
    assert kube.see("deployments.apps", "web")["status"]["readyReplicas"] == 2


def test_a_rolling_update_keeps_as_many_serving_as_its_strategy_says() -> None:
    kube = make_kube(startup_s=60)
    rolling = {"maxSurge": 1, "maxUnavailable": 0}
    make_deployment(kube, 2, strategy={"type": "RollingUpdate", "rollingUpdate": rolling})
    kube.advance(60)
    change(kube, template=template("a:2"))
    assert images(kube) == ["a:1", "a:1", "a:2"]
    kube.advance(60)
    assert images(kube) == ["a:1", "a:2", "a:2"]
    kube.advance(60)
    assert images(kube) == ["a:2", "a:2"]
    assert conditions(kube)["Progressing"] == ("True", "NewReplicaSetAvailable")


def test_a_version_that_never_starts_leaves_the_old_one_serving_and_is_told_in_time() -> None:
    kube = make_kube()
    make_deployment(kube, 4)
    kube.pods.plan = lambda pod: PodPlan(
        never_starts="ImagePullBackOff" if pod["spec"]["containers"][0]["image"] == "a:2" else ""
    )
    change(kube, template=template("a:2"))
    assert images(kube) == ["a:1", "a:1", "a:1", "a:2", "a:2"]
    kube.advance(600)
    assert conditions(kube)["Progressing"] == ("False", "ProgressDeadlineExceeded")
    change(kube, template=template("a:1"))
    assert images(kube) == ["a:1"] * 4


def test_pods_of_old_versions_all_end_before_new_ones_come_where_they_are_recreated() -> None:
    kube = make_kube(shutdown_s=20)
    make_deployment(kube, 2, strategy={"type": "Recreate"})
    change(kube, template=template("a:2"))
    assert images(kube) == ["a:2", "a:2"]  # a pod that is on its way out counts no more


def test_pods_without_room_wait() -> None:
    kube = make_kube()
    kube.pods.capacity[GPU] = 1
    make_deployment(kube, 2, template=template("a:1", resources={"limits": {GPU: "1"}}))
    waiting = [pod for pod in kube.all("pods") if "nodeName" not in pod["spec"]]
    (condition,) = waiting[0]["status"]["conditions"]
    assert len(waiting) == 1
    assert condition["reason"] == "Unschedulable"
    kube.pods.capacity[GPU] = 2
    kube.settle()
    assert kube.see("deployments.apps", "web")["status"]["readyReplicas"] == 2


def test_a_smaller_size_ends_the_cheapest_of_those_that_serve() -> None:
    kube = make_kube(shutdown_s=20)
    make_deployment(kube, 3)
    kind, victim = kube.kinds.of(("", "pods")), kube.all("pods")[1]["metadata"]["name"]
    assert kind is not None
    notes = {"controller.kubernetes.io/pod-deletion-cost": "-5"}
    patch = {"metadata": {"annotations": notes}}
    sort = "application/merge-patch+json"
    kube.api.patch(Target(kind, "default", victim), sort, patch, Options("test"))
    change(kube, replicas=2)
    assert "deletionTimestamp" in kube.see("pods", victim)["metadata"]
    kube.advance(20)
    assert kube.find("pods", victim) is None


def test_a_pod_ends_with_its_grace_period_at_the_latest() -> None:
    kube = make_kube(shutdown_s=1_000)
    make_deployment(kube, 1)
    change(kube, replicas=0)
    kube.advance(29)
    assert len(kube.all("pods")) == 1
    kube.advance(1)
    assert kube.all("pods") == []


def test_a_crashed_pod_is_out_of_service_until_it_is_back() -> None:
    kube = make_kube()
    make_deployment(kube, 1)
    (pod,) = kube.all("pods")
    kube.pods.crash("default", pod["metadata"]["name"], down_s=10)
    kube.settle()
    assert conditions(kube)["Available"][0] == "False"
    kube.advance(10)
    assert conditions(kube)["Available"][0] == "True"
    (status,) = kube.see("pods", pod["metadata"]["name"])["status"]["containerStatuses"]
    assert status["restartCount"] == 1


def test_an_evicted_pod_is_replaced() -> None:
    kube = make_kube()
    make_deployment(kube, 1)
    (pod,) = kube.all("pods")
    kube.pods.fail("default", pod["metadata"]["name"])
    kube.settle()
    phases = sorted(found["status"]["phase"] for found in kube.all("pods"))
    assert phases == ["Failed", "Running"]


def test_a_job_tries_as_often_as_it_may() -> None:
    kube = make_kube(runs_s=5, exit_code=1)
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "a"}]}
    spec = {"template": {"spec": pod}, "backoffLimit": 1}
    kube.add("batch/v1", "Job", "once", "default", spec=spec)
    kube.advance(9)
    assert "conditions" not in kube.see("jobs.batch", "once")["status"]
    kube.advance(1)
    status = kube.see("jobs.batch", "once")["status"]
    assert (status["failed"], status["conditions"][0]["type"]) == (2, "Failed")


def test_replicas_of_a_stateful_set_come_one_after_the_other() -> None:
    kube = make_kube(startup_s=10)
    labels = {"matchLabels": {"app": "web"}}
    spec = {"replicas": 2, "selector": labels, "serviceName": "web", "template": template("a:1")}
    kube.add("apps/v1", "StatefulSet", "db", "default", spec=spec)
    kube.advance(5)
    assert [pod["metadata"]["name"] for pod in kube.all("pods")] == ["db-0"]
    kube.advance(15)
    assert kube.see("statefulsets.apps", "db")["status"]["readyReplicas"] == 2


def test_old_versions_are_kept_up_to_the_limit_of_history() -> None:
    kube = make_kube()
    make_deployment(kube, 1, revisionHistoryLimit=1)
    for image in ("a:2", "a:3", "a:4"):
        change(kube, template=template(image))
    assert len(kube.all("replicasets.apps")) == 2


def test_a_budget_keeps_pods_from_being_evicted() -> None:
    kube = make_kube()
    make_deployment(kube, 2)
    selector = {"matchLabels": {"app": "web"}}
    spec = {"maxUnavailable": 1, "selector": selector}
    kube.add("policy/v1", "PodDisruptionBudget", "web", "default", spec=spec)
    kube.settle()
    kind = kube.kinds.of(("", "pods"))
    assert kind is not None
    first, second = (pod["metadata"]["name"] for pod in kube.all("pods"))
    kube.pods.crash("default", first, down_s=1_000)
    kube.settle()
    with pytest.raises(ApiError) as refused:
        kube.api.create(Target(kind, "default", second, "eviction"), {}, Options())
    assert refused.value.status == 429


def test_what_belongs_to_somebody_goes_with_the_owner() -> None:
    kube = make_kube()
    make_deployment(kube, 2)
    owner = kube.see("deployments.apps", "web")
    kind = kube.kinds.of(("apps", "deployments"))
    assert kind is not None
    kube.api.end(kind, owner, {"propagationPolicy": "Foreground"})
    held = kube.find("deployments.apps", "web")
    assert held is not None
    assert held["metadata"]["finalizers"] == ["foregroundDeletion"]
    kube.settle()
    assert (kube.all("replicasets.apps"), kube.all("pods")) == ([], [])
    assert kube.find("deployments.apps", "web") is None


def test_a_namespace_takes_what_is_in_it_along() -> None:
    kube = make_kube()
    kube.add("v1", "Namespace", "mine")
    kube.add("v1", "ConfigMap", "one", "mine")
    kube.settle()
    kind = kube.kinds.of(("", "namespaces"))
    assert kind is not None
    kube.api.end(kind, kube.see("namespaces", "mine"), {})
    kube.settle()
    assert kube.find("namespaces", "mine") is None
    assert kube.all("configmaps", "mine") == []


def test_a_pod_waits_for_what_it_mounts() -> None:
    kube = make_kube()
    source = {"secretKeyRef": {"name": "keys", "key": "one"}}
    make_deployment(kube, 1, template=template("a:1", env=[{"name": "KEY", "valueFrom": source}]))
    (pod,) = kube.all("pods")
    (status,) = pod["status"]["containerStatuses"]
    assert status["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    kube.add("v1", "Secret", "keys", "default", stringData={"one": "1"})
    kube.settle()
    assert conditions(kube)["Available"][0] == "True"
