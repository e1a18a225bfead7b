"""A cluster of Kubernetes as far as the operator sees it: what is applied, pods, and time.

Nothing here knows how the operator decides. Every change it makes is judged at once: see `check`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import yaml

from services.operator.observed import (
    COMPONENT_LABEL,
    REVISION_LABEL,
    ROUTER,
    SERVING,
    Observed,
    Policy,
    observe,
    tell_time,
)
from services.operator.plan import Action, Apply, Delete, Finalize, Patch, Plan
from services.operator.reconcile import Cluster, read_cluster, reconcile

START_S = 1_800_000_000.0
GRACE_S = 30.0  # of pods that end, in this world

SPEC: dict[str, Any] = {
    "model": {"name": "one"},
    "redis": {"existingSecret": "store"},
    "router": {"replicas": 2},
    "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
    "auth": {"allowUnauthenticated": True, "allowPlaintext": True},
    "transfer": {"allowPlaintextKv": True},
    "rollout": {"progressDeadlineSeconds": 600, "drainDeadlineSeconds": 120},
}
POLICY = Policy("chat", {"kind": "PoolAutoscalingPolicy"}, {"prefill": 2, "decode": 3},
                {"prefill": "p", "decode": "d"})  # fmt: skip


@dataclass
class Pod:
    """One pod; its model is what its configuration said when it was made."""

    name: str
    deployment: str
    template: str
    model: str
    is_ready: bool = False
    ends_at_s: float | None = None
    reason: str = ""  # of a container that waits
    restarts: int = 0


@dataclass
class World:
    """What there is; `broken` are models whose pods never serve."""

    spec: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(SPEC))
    now_s: float = START_S
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    broken: set[str] = field(default_factory=set)
    finalizers: list[str] = field(default_factory=list)
    generation: int = 1
    deleted_at_s: float | None = None
    is_gone: bool = False
    _count: int = 0

    # what people do

    def edit(self, **changes: Any) -> None:
        """Change the spec, one section a keyword."""
        self.spec = {**self.spec, **changes}
        self.generation += 1

    def remove(self) -> None:
        """Delete the resource of the cluster."""
        if self.deleted_at_s is None:
            self.deleted_at_s = self.now_s
            self.generation += 1
            self._let_go()

    # what the operator does

    def cluster(self) -> Cluster:
        """Read the resource."""
        metadata: dict[str, Any] = {
            "name": "chat", "uid": "u1", "generation": self.generation,
            "finalizers": list(self.finalizers),
        }  # fmt: skip
        if self.deleted_at_s is not None:
            metadata["deletionTimestamp"] = tell_time(self.deleted_at_s)
        return read_cluster({"metadata": metadata, "spec": self.spec, "status": self.status})

    def observed(self) -> Observed:
        """Read everything of the cluster."""
        self._count_pods()
        policies = [] if self.policy is None else [self.policy]
        return observe(
            list(self.objects.values()),
            [self._told(p) for p in self.pods.values()],
            policies,
            self.now_s,
        )

    def plan(self) -> Plan:
        """Decide, and change nothing."""
        return reconcile(self.cluster(), self.observed(), self.now_s)

    def reconcile(self, stop_after: int | None = None) -> Plan:
        """Decide and act; `stop_after` so many actions the operator dies, before its status."""
        plan = self.plan()
        for action in plan.actions[:stop_after]:
            self.check(action)
            self.act(action)
        if stop_after is None or stop_after >= len(plan.actions):
            self.status = plan.status.model_dump(mode="json", by_alias=True)
        return plan

    def act(self, action: Action) -> None:
        """Do one thing as the API server would."""
        match action:
            case Apply(body):
                self._apply(copy.deepcopy(body))
            case Patch(name, body):
                deployment = self.objects.get(("Deployment", name))
                if deployment is not None:
                    _merge(deployment, body)
            case Delete(kind, name):
                self.objects.pop((kind, name), None)
            case Finalize(is_wanted):
                if is_wanted and self.deleted_at_s is None:
                    self.finalizers.append("isthmus.dev/drain")
                if not is_wanted:
                    self.finalizers.remove("isthmus.dev/drain")
                    self._let_go()

    def check(self, action: Action) -> None:
        """Judge an action before it is done: what the operator promises."""
        if self.deleted_at_s is not None:
            return
        match action:
            case Apply(body) if body["kind"] == "Service":
                self._check_front(body["spec"]["selector"][REVISION_LABEL])
            case Patch(name, body) if body["spec"]["replicas"] == 0:
                assert self._revision(name) != self.selected, f"{name} gets requests"
                self._check_workers(name)
            case Delete("Deployment", name):
                assert self._revision(name) in ("", *self.others), f"{name} gets requests"

    @property
    def selected(self) -> str:
        """The revision that gets requests."""
        service = self.objects.get(("Service", "chat-router"))
        return "" if service is None else str(service["spec"]["selector"][REVISION_LABEL])

    @property
    def others(self) -> set[str]:
        """Revisions that get none."""
        return {self._revision(n) for k, n in self.objects if k == "Deployment"} - {
            "",
            self.selected,
        }

    def ready(self, revision: str, component: str) -> int:
        """Pods that serve."""
        name = f"chat-{component}-{revision}"
        return sum(p.is_ready and p.deployment == name for p in self.pods.values())

    def _check_front(self, revision: str) -> None:
        """Requests move only to what serves all of them."""
        if self.selected in ("", revision):
            return
        for component in SERVING:
            wanted = self.objects["Deployment", f"chat-{component}-{revision}"]["spec"]["replicas"]
            assert self.ready(revision, component) >= wanted >= 1, (revision, component)

    def _check_workers(self, name: str) -> None:
        """Workers end after the routers that use them, or when those had their time."""
        deployment = self.objects["Deployment", name]
        component = deployment["metadata"]["labels"][COMPONENT_LABEL]
        router = self.objects.get(("Deployment", f"chat-router-{self._revision(name)}"))
        if component == ROUTER or router is None:
            return
        left = [p for p in self.pods.values() if p.deployment == router["metadata"]["name"]]
        retired = router["metadata"]["annotations"].get("isthmus.dev/retired-at")
        is_late = retired is not None and tell_time(self.now_s - 120) >= retired
        assert not left or is_late, f"{name}: routers are left"

    # what Kubernetes does

    def run(self, seconds: float = 10.0) -> None:
        """Let time pass, and have Deployments and pods do what they do."""
        self.now_s += seconds
        for name, pod in list(self.pods.items()):
            if pod.ends_at_s is not None and pod.ends_at_s <= self.now_s:
                del self.pods[name]
            elif pod.ends_at_s is None and not pod.reason:
                pod.is_ready = pod.model not in self.broken
        for kind, name in list(self.objects):
            if kind == "Deployment":
                self._roll(name)
        for pod in self.pods.values():
            if ("Deployment", pod.deployment) not in self.objects:
                self._end(pod)
        self.check_models()

    def check_models(self) -> None:
        """No two pods of one revision have different models."""
        models: dict[str, set[str]] = {}
        for pod in self.pods.values():
            models.setdefault(pod.deployment.rpartition("-")[2], set()).add(pod.model)
        assert all(len(found) == 1 for found in models.values()), models

    def _roll(self, name: str) -> None:
        deployment = self.objects["Deployment", name]
        if not self._revision(name):
            return
        template = deployment["metadata"]["annotations"]["isthmus.dev/applied"]
        wanted = int(deployment["spec"].get("replicas", 1))
        mine = [p for p in self.pods.values() if p.deployment == name and p.ends_at_s is None]
        new = [p for p in mine if p.template == template]
        old = [p for p in mine if p.template != template]
        room = wanted - len(new) if not old else min(1, wanted - len(new))
        for _ in range(room):
            self._start(name, template)
        if old and (sum(p.is_ready for p in mine) > wanted or not wanted):
            self._end(old[0])
        if not wanted:
            for pod in mine:
                self._end(pod)
        elif len(new) > wanted:
            for pod in new[wanted:]:
                self._end(pod)

    def _start(self, deployment: str, template: str) -> None:
        self._count += 1
        name, revision = f"{deployment}-{self._count}", self._revision(deployment)
        component = deployment.removeprefix("chat-").partition("-")[0]
        data = self.objects["ConfigMap", f"chat-{revision}"]["data"]
        model = yaml.safe_load(data[f"{component}.yaml"])["model"]["name"]
        self.pods[name] = Pod(name, deployment, template, model)

    def _end(self, pod: Pod) -> None:
        pod.is_ready = False
        if pod.ends_at_s is None:
            pod.ends_at_s = self.now_s + GRACE_S

    def _count_pods(self) -> None:
        for (kind, name), deployment in self.objects.items():
            if kind != "Deployment":
                continue
            mine = [p for p in self.pods.values() if p.deployment == name and p.ends_at_s is None]
            template = deployment["metadata"]["annotations"]["isthmus.dev/applied"]
            deployment["status"] = {
                "observedGeneration": deployment["metadata"]["generation"],
                "replicas": len(mine),
                "updatedReplicas": sum(p.template == template for p in mine),
                "readyReplicas": sum(p.is_ready for p in mine),
            }

    def _told(self, pod: Pod) -> dict[str, Any]:
        deployment = pod.deployment.removeprefix("chat-")
        component, _, revision = deployment.partition("-")
        waiting = {"waiting": {"reason": pod.reason}} if pod.reason else {}
        ended = {"deletionTimestamp": tell_time(pod.ends_at_s)} if pod.ends_at_s else {}
        return {
            "metadata": {
                "name": pod.name,
                "labels": {COMPONENT_LABEL: component, REVISION_LABEL: revision},
                "creationTimestamp": tell_time(START_S),
                **ended,
            },
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {"state": waiting, "restartCount": pod.restarts, "ready": pod.is_ready}
                ],
            },
        }

    def _apply(self, body: dict[str, Any]) -> None:
        key = (body["kind"], body["metadata"]["name"])
        old = self.objects.get(key)
        if old is None:
            body["metadata"]["generation"] = 1
            if body["kind"] == "Deployment":
                body["spec"].setdefault("replicas", 1)
            self.objects[key] = body
            return
        assert "replicas" not in body.get("spec", {}) or "autoscaler" in key[1]
        notes = {**old["metadata"].get("annotations", {}), **body["metadata"]["annotations"]}
        kept = {"replicas": old["spec"]["replicas"]} if body["kind"] == "Deployment" else {}
        metadata = {**body["metadata"], "annotations": notes,
                    "generation": old["metadata"]["generation"] + 1}  # fmt: skip
        if body["kind"] == "Deployment":
            assert body["spec"]["selector"] == old["spec"]["selector"], "selectors never change"
        self.objects[key] = {**body, "metadata": metadata}
        if kept:
            self.objects[key]["spec"] = {**kept, **body["spec"]}

    def _let_go(self) -> None:
        """Remove what nothing holds any more, and what belongs to it."""
        if self.deleted_at_s is not None and not self.finalizers:
            self.is_gone = True
            self.objects.clear()

    def _revision(self, name: str) -> str:
        labels = self.objects["Deployment", name]["metadata"]["labels"]
        return str(labels.get(REVISION_LABEL, ""))


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
