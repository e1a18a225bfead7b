"""Pods, and the one node they run on: how they start, why they do not, how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.clock import Clock
from tests.fakekube.kinds import Kind, Resource
from tests.fakekube.references import Reference, references
from tests.fakekube.store import Store

NODE = "node-1"
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What becomes of a pod."""

    startup_s: float = 0.0  # from its node to ready
    never_starts: str = ""  # the reason its containers wait for: ImagePullBackOff, ...
    runs_s: float = 0.0  # of one that is to end by itself
    exit_code: int = 0  # of the same
    shutdown_s: float = 0.0  # from the signal to its end; its grace period ends it before
    log: str = ""  # what kubectl logs shows


Plan = Callable[[Resource], PodPlan]


class Pods:
    """Moves pods on. Belongs to the event loop."""

    def __init__(self, store: Store, kind: Kind, clock: Clock) -> None:
        self.plan: Plan = lambda _pod: PodPlan()
        self.address: Callable[[Resource], str] = self._next_address
        self.capacity: dict[str, int] = {}  # of the node, of resources that are counted
        self._store = store
        self._kind = kind
        self._clock = clock
        self._count = 0
        self._since: dict[str, float] = {}  # in its present step, by uid
        self._crashed: dict[str, tuple[float, str]] = {}  # until when and why, by uid

    def step(self) -> float | None:
        """Move every pod as far as its time has come; when there is more to do."""
        pods = self._store.all_of(self._kind.key)
        alive = {pod["metadata"]["uid"] for pod in pods}
        self._since = {uid: at for uid, at in self._since.items() if uid in alive}
        self._crashed = {uid: why for uid, why in self._crashed.items() if uid in alive}
        dues = [due for pod in pods if (due := self._move(pod)) is not None]
        return min(dues, default=None)

    def crash(self, namespace: str, name: str, *, down_s: float, reason: str = "Error") -> None:
        """End a pod's container; it comes back after a while."""
        pod = self._store.get(self._kind, namespace, name)
        self._crashed[pod["metadata"]["uid"]] = (self._clock.now() + down_s, reason)
        restarts = _restarts(pod) + 1
        self._tell(pod, "Running", _waiting(pod, "CrashLoopBackOff", restarts), is_ready=False)

    def fail(self, namespace: str, name: str, reason: str = "Evicted") -> None:
        """Have a pod fail as a whole, as one does that its node evicts."""
        pod = self._store.get(self._kind, namespace, name)
        status = {**pod["status"], "phase": "Failed", "reason": reason, "containerStatuses": []}
        self._put(pod, {**pod, "status": status})

    def _move(self, pod: Resource) -> float | None:
        """Take one pod a step further, as often as time allows; when its next step is due."""
        uid, now = pod["metadata"]["uid"], self._clock.now()
        plan = self.plan(pod)
        if "deletionTimestamp" in pod["metadata"]:
            return self._end(pod, plan, now)
        phase = pod.get("status", {}).get("phase", "")
        if phase in ("Succeeded", "Failed"):
            return None
        if not pod["spec"].get("nodeName"):
            self._schedule(pod, now)
            return None
        if phase != "Running" and (reason := plan.never_starts or self._refusal(pod)):
            self._since[uid] = now
            self._tell(pod, "Pending", _waiting(pod, reason, 0), is_ready=False)
            return None
        crashed = self._crashed.get(uid)
        if crashed is not None and now < crashed[0]:
            return crashed[0]
        due = self._since[uid] + plan.startup_s
        if phase != "Running" and now < due:
            self._tell(pod, "Pending", _waiting(pod, "ContainerCreating", 0), is_ready=False)
            return due
        return self._run(pod, plan, now, due)

    def _run(self, pod: Resource, plan: PodPlan, now: float, started: float) -> float | None:
        ends = pod["spec"].get("restartPolicy") == "Never"
        if ends and now >= started + plan.runs_s:
            phase = "Succeeded" if plan.exit_code == 0 else "Failed"
            done = {"terminated": {"exitCode": plan.exit_code, "reason": "Completed"}}
            self._tell(pod, phase, _statuses(pod, done, _restarts(pod)), is_ready=False)
            return None
        running = {"running": {"startedAt": self._store.timestamp()}}
        if not _is_ready(pod):
            self._tell(pod, "Running", _statuses(pod, running, _restarts(pod), True), is_ready=True)
        return started + plan.runs_s if ends else None

    def _end(self, pod: Resource, plan: PodPlan, now: float) -> float | None:
        uid, meta = pod["metadata"]["uid"], pod["metadata"]
        if uid not in self._crashed or self._crashed[uid][1] != "ending":
            grace_s = float(meta.get("deletionGracePeriodSeconds") or 0)
            self._crashed[uid] = (now + min(plan.shutdown_s, grace_s), "ending")
        due = self._crashed[uid][0]
        if now < due:
            return due
        if not meta.get("finalizers"):
            self._store.remove(self._kind.key, pod)
        return None

    def _schedule(self, pod: Resource, now: float) -> None:
        short = self._shortage(pod)
        condition = {"type": "PodScheduled", "status": "True"}
        if short:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": f"0/1 nodes are available: 1 Insufficient {short}.",
            }
            self._set(pod, {"phase": "Pending", "conditions": [condition]})
            return
        uid = pod["metadata"]["uid"]
        self._since[uid] = now
        placed = {**pod, "spec": {**pod["spec"], "nodeName": NODE}}
        status = {
            "phase": "Pending",
            "conditions": [condition],
            "hostIP": "127.0.0.1",
            "podIP": self.address(pod),
            "startTime": self._store.timestamp(),
        }
        self._put(pod, {**placed, "status": status})

    def _shortage(self, pod: Resource) -> str:
        """Return the resource that the node has too little of."""
        wanted = _requests(pod)
        for name, there in self.capacity.items():
            taken = sum(
                _requests(other).get(name, 0)
                for other in self._store.all_of(self._kind.key)
                if other["spec"].get("nodeName")
                and other["status"]["phase"] not in ("Succeeded", "Failed")
            )
            if wanted.get(name, 0) > there - taken:
                return name
        return ""

    def _refusal(self, pod: Resource) -> str:
        """Say why containers cannot be made: what they need is not there."""
        space = pod["metadata"]["namespace"]
        has_all = all(self._has(space, need) for need in references(pod["spec"]))
        return "" if has_all else "CreateContainerConfigError"

    def _has(self, namespace: str, need: Reference) -> bool:
        found = self._store.find(("", need.plural), namespace, need.name)
        if found is None:
            return False
        data = {**(found.get("data") or {}), **(found.get("binaryData") or {})}
        return set(need.keys) <= data.keys()

    def _next_address(self, _pod: Resource) -> str:
        self._count += 1
        return f"10.{self._count >> 16 & 255}.{self._count >> 8 & 255}.{self._count & 255}"

    def _tell(self, pod: Resource, phase: str, statuses: list[Resource], *, is_ready: bool) -> None:
        old = {c["type"]: c for c in pod["status"].get("conditions", ())}
        ready = str(is_ready)
        conditions = [old["PodScheduled"]]
        for name in ("Initialized", "ContainersReady", "Ready"):
            value = "True" if name == "Initialized" else ready
            condition = {
                "type": name,
                "status": value,
                "lastTransitionTime": self._store.timestamp(),
            }
            known = old.get(name)
            conditions.append(known if known and known["status"] == value else condition)
        shown = {"phase": phase, "conditions": conditions, "containerStatuses": statuses}
        self._set(pod, shown)

    def _set(self, pod: Resource, status: Mapping[str, Any]) -> None:
        self._put(pod, {**pod, "status": {**pod.get("status", {}), **status}})

    def _put(self, before: Resource, after: Resource) -> None:
        self._store.update(self._kind, before, {**after, "metadata": {**after["metadata"]}})


def _requests(pod: Resource) -> dict[str, int]:
    """Return how many of a thing a pod takes, of things that are counted in whole numbers."""
    found: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        given = container.get("resources") or {}
        for name, amount in {
            **(given.get("limits") or {}),
            **(given.get("requests") or {}),
        }.items():
            if str(amount).isdigit():
                found[name] = found.get(name, 0) + int(amount)
    return found


def _restarts(pod: Resource) -> int:
    statuses: Iterable[Resource] = pod["status"].get("containerStatuses") or ()
    return max((status["restartCount"] for status in statuses), default=0)


def _is_ready(pod: Resource) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _waiting(pod: Resource, reason: str, restarts: int) -> list[Resource]:
    waiting = {"reason": reason}
    if reason != "ContainerCreating":
        waiting["message"] = f"{reason}, as the test asked for"
    return _statuses(pod, {"waiting": waiting}, restarts)


def _statuses(
    pod: Resource, state: Resource, restarts: int, is_ready: bool = False
) -> list[Resource]:
    return [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "ready": is_ready,
            "started": is_ready,
            "restartCount": restarts,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]
