"""What pods, Deployments and policies say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from services.autoscaler.policy_file import EXAMPLE
from services.operator.drift import has_drifted, stamped
from services.operator.observed import PodFault, pod_fault, read_workload, tell_time
from services.operator.policies import policies_of

NOW_S = 1_800_000_000.0


def pod(waiting: str = "", restarts: int = 0, ended: Any = None, **status: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": waiting}} if waiting else {}
    container = {"state": state, "restartCount": restarts, "ready": False}
    if ended is not None:
        container["lastState"] = {"terminated": ended}
    return {
        "metadata": {
            "name": "p",
            "labels": {"app.kubernetes.io/component": "decode", "isthmus.dev/revision": "r"},
            "creationTimestamp": tell_time(NOW_S - 100),
        },
        "status": {"containerStatuses": [container], **status},
    }


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return pod(conditions=[condition], containerStatuses=[])


@pytest.mark.parametrize(
    ("resource", "reason", "is_hopeless"),
    [
        (pod("ImagePullBackOff"), "ImagePullFailed", False),
        (pod("InvalidImageName"), "ImagePullFailed", False),
        (pod("CreateContainerConfigError"), "ContainerConfigFailed", False),
        (pod("CrashLoopBackOff", 2, {"exitCode": 3}), "CrashLoop", False),
        (pod("CrashLoopBackOff", 5, {"exitCode": 3}), "CrashLoop", True),
        (pod("CrashLoopBackOff", 5, {"reason": "OOMKilled"}), "OutOfMemory", True),
        (unscheduled("0/3 nodes: 3 Insufficient nvidia.com/gpu."), "NoAccelerator", False),
        (unscheduled("0/3 nodes: 3 Insufficient memory."), "Unschedulable", False),
    ],
)
def test_a_pod_that_does_not_come_says_why(
    resource: dict[str, Any], reason: str, is_hopeless: bool
) -> None:
    fault = pod_fault(resource, NOW_S)
    assert fault is not None
    assert (fault.reason, fault.is_hopeless) == (reason, is_hopeless)
    assert (fault.pod, fault.component, fault.revision) == ("p", "decode", "r")


def test_hints_name_what_is_known() -> None:
    found = pod_fault(pod("CrashLoopBackOff", 2, {"exitCode": 3}), NOW_S)
    assert isinstance(found, PodFault)
    assert found.message == (
        "p: CrashLoop: exit status 3, 2 restarts: see `kubectl logs --previous`"
    )


def test_pods_that_start_or_end_are_no_fault() -> None:
    assert pod_fault(pod("ContainerCreating"), NOW_S) is None
    late = pod("CrashLoopBackOff", 9)
    late["metadata"]["deletionTimestamp"] = tell_time(NOW_S)
    assert pod_fault(late, NOW_S) is None
    young = unscheduled("0/3 nodes")
    young["metadata"]["creationTimestamp"] = tell_time(NOW_S - 5)
    assert pod_fault(young, NOW_S) is None


def test_ready_pods_of_an_older_template_do_not_count() -> None:
    status = {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1, "readyReplicas": 2}
    resource = {
        "metadata": {"name": "d", "generation": 2, "labels": {}},
        "spec": {"replicas": 2},
        "status": status,
    }
    mixed = read_workload(resource)
    assert (mixed.ready, mixed.serving, mixed.is_settled) == (0, 2, False)
    resource["status"] = {**status, "replicas": 2, "updatedReplicas": 2}
    settled = read_workload(resource)
    assert (settled.ready, settled.is_settled) == (2, True)
    resource["metadata"] = {"name": "d", "generation": 3, "labels": {}}
    assert not read_workload(resource).is_settled


WANTED = stamped(
    {
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"a": [{"b": 1, "off": False, "none": ""}], "resources": {"cpu": "1000m"}},
    }
)


def test_defaults_that_the_api_server_adds_are_no_drift() -> None:
    seen = {
        **WANTED,
        "spec": {"a": [{"b": 1, "c": "default"}], "resources": {"cpu": "1"}, "more": 2},
        "status": {},
    }
    assert not has_drifted(WANTED, seen)


@pytest.mark.parametrize(
    "spec", [{"a": [{"b": 2}]}, {"a": []}, {"a": [{"b": 1}, {"b": 1}]}, {}, {"a": "b"}]
)
def test_other_values_are_drift(spec: dict[str, Any]) -> None:
    assert has_drifted(WANTED, {**WANTED, "spec": spec})
    assert has_drifted(WANTED, None)


def test_what_is_left_out_now_is_drift() -> None:
    less = stamped({"kind": "Deployment", "metadata": {"name": "d"}, "spec": {}})
    assert has_drifted(less, WANTED)


def policy(name: str, created: str, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    found["metadata"] = {"name": name, "namespace": "n", "uid": "u", "creationTimestamp": created}
    found["spec"] |= {"clusterRef": {"name": "chat"}, **spec}
    return found


def test_the_oldest_policy_is_followed_and_others_are_told_of() -> None:
    newer, older = policy("b", "2026-01-02T00:00:00Z"), policy("c", "2026-01-01T00:00:00Z")
    others = {**newer, "spec": {**newer["spec"], "clusterRef": {"name": "other"}}}
    first, second = policies_of("chat", [newer, others, older])
    assert (first.name, first.fault) == ("c", "")
    assert set(first.pools) == {"prefill", "decode"}
    assert second.fault == "c names the cluster as well, and is older"


def test_a_policy_that_is_wrong_says_so() -> None:
    (found,) = policies_of("chat", [policy("a", "2026-01-01T00:00:00Z", tickSeconds=0)])
    assert "spec.tickSeconds" in found.fault
    assert found.pools == {}
