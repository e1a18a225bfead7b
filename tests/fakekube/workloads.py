"""Controllers of workloads: what Deployments, StatefulSets and Jobs make of themselves.

They follow Kubernetes as it is documented: how a rolling update goes, which pods end first, what is
said in a status. Not followed: minReadySeconds, pod conditions of readiness gates, indexed Jobs.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.clock import Clock
from tests.fakekube.api import Api
from tests.fakekube.kinds import Kind, Kinds, Resource
from tests.fakekube.store import Store

_REVISION = "deployment.kubernetes.io/revision"
_COST = "controller.kubernetes.io/pod-deletion-cost"
_HASH = "pod-template-hash"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}
_ENDED = ("Succeeded", "Failed")


class Workloads:
    """Belongs to the event loop; every step looks at everything, as there is little of it."""

    def __init__(self, store: Store, kinds: Kinds, api: Api, clock: Clock) -> None:
        self._store = store
        self._api = api
        self._clock = clock
        self._progress: dict[str, tuple[float, object]] = {}  # since when the same, by uid
        self._pods = _kind(kinds, "", "pods")
        self._sets = _kind(kinds, "apps", "replicasets")
        self._deployments = _kind(kinds, "apps", "deployments")
        self._stateful = _kind(kinds, "apps", "statefulsets")
        self._jobs = _kind(kinds, "batch", "jobs")

    def step(self) -> float | None:
        """Take everything a step further; when there is more to do without anything happening."""
        dues = [self._deployment(item) for item in self._live(self._deployments)]
        for item in self._live(self._sets):
            self._replica_set(item)
        for item in self._live(self._stateful):
            self._stateful_set(item)
        for item in self._live(self._jobs):
            self._job(item)
        return min((due for due in dues if due is not None), default=None)

    def _live(self, kind: Kind) -> list[Resource]:
        found = self._store.all_of(kind.key)
        return [item for item in found if "deletionTimestamp" not in item["metadata"]]

    def _owned(self, kind: Kind, owner: Resource) -> list[Resource]:
        uid, space = owner["metadata"]["uid"], owner["metadata"]["namespace"]
        return [
            item
            for item in self._store.all_of(kind.key, space)
            if any(ref["uid"] == uid for ref in item["metadata"].get("ownerReferences") or ())
        ]

    # -- Deployments ---------------------------------------------------------------------------

    def _deployment(self, item: Resource) -> float | None:
        mark = _template_hash(item["spec"]["template"])
        sets = self._owned(self._sets, item)
        newest = next((s for s in sets if s["metadata"]["labels"].get(_HASH) == mark), None)
        if newest is None:
            newest = self._new_set(item, mark, sets)
        old = [s for s in sets if s["metadata"]["uid"] != newest["metadata"]["uid"]]
        self._number(item, newest, old)
        if not item["spec"].get("paused"):
            self._roll(item, newest, old)
        self._forget(item, old)
        return self._tell_deployment(item, newest["metadata"]["name"])

    def _new_set(self, item: Resource, mark: str, sets: Sequence[Resource]) -> Resource:
        template = copy.deepcopy(item["spec"]["template"])
        labels = {**(template.get("metadata", {}).get("labels") or {}), _HASH: mark}
        template.setdefault("metadata", {})["labels"] = labels
        selector = copy.deepcopy(item["spec"]["selector"])
        selector["matchLabels"] = {**(selector.get("matchLabels") or {}), _HASH: mark}
        first = item["spec"]["replicas"] if not sets else 0
        made = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": _owned_meta(item, f"{item['metadata']['name']}-{mark}", labels),
            "spec": {"replicas": first, "selector": selector, "template": template},
        }
        return self._store.create(self._sets, made)

    def _number(self, item: Resource, newest: Resource, old: Sequence[Resource]) -> None:
        last = max((_revision(s) for s in old), default=0)
        if _revision(newest) <= last:
            self._annotate(self._sets, newest, str(last + 1))
        current = self._store.get(
            self._sets, newest["metadata"]["namespace"], newest["metadata"]["name"]
        )
        self._annotate(self._deployments, item, str(_revision(current)))

    def _annotate(self, kind: Kind, item: Resource, revision: str) -> None:
        live = self._again(kind, item)
        notes = {**(live["metadata"].get("annotations") or {}), _REVISION: revision}
        self._store.update(
            kind, live, {**live, "metadata": {**live["metadata"], "annotations": notes}}
        )

    def _again(self, kind: Kind, item: Resource) -> Resource:
        return self._store.get(
            kind, item["metadata"].get("namespace", ""), item["metadata"]["name"]
        )

    def _roll(self, item: Resource, newest: Resource, old: Sequence[Resource]) -> None:
        """Move sizes from old versions to the new one, as far as the strategy lets us now."""
        wanted = item["spec"]["replicas"]
        olds = [self._again(self._sets, s) for s in old]
        newest = self._again(self._sets, newest)
        if item["spec"]["strategy"]["type"] == "Recreate":
            for each in olds:
                self._resize(each, 0)
            if not any(self._alive(each) for each in olds):
                self._resize(newest, wanted)
            return
        surge, missing = _bounds(item["spec"]["strategy"], wanted)
        size = newest["spec"]["replicas"]
        total = size + sum(s["spec"]["replicas"] for s in olds)
        if size > wanted:
            self._resize(newest, wanted)
        elif size < wanted:
            self._resize(newest, size + max(0, min(wanted - size, wanted + surge - total)))
        self._shrink(olds, newest, wanted - missing)

    def _shrink(self, olds: Sequence[Resource], newest: Resource, least: int) -> None:
        """Lower old versions: first by pods that do not serve, then as far as enough serve."""
        spare = self._num_ready(newest) + sum(map(self._num_ready, olds)) - least
        for each in olds:
            size = each["spec"]["replicas"]
            broken = max(0, size - self._num_ready(each))
            gone = min(size, broken + max(0, min(spare, size - broken)))
            spare -= gone - min(broken, gone)
            self._resize(each, size - gone)

    def _resize(self, item: Resource, size: int) -> None:
        live = self._again(self._sets, item)
        self._store.update(self._sets, live, {**live, "spec": {**live["spec"], "replicas": size}})

    def _forget(self, item: Resource, old: Sequence[Resource]) -> None:
        idle = [s for s in old if not s["spec"]["replicas"] and not self._alive(s)]
        idle.sort(key=_revision)
        for each in idle[: max(0, len(idle) - item["spec"]["revisionHistoryLimit"])]:
            self._api.end(self._sets, each, {})

    def _tell_deployment(self, item: Resource, newest: str) -> float | None:
        live = self._again(self._deployments, item)
        sets = self._owned(self._sets, item)
        alive = {s["metadata"]["name"]: self._alive(s) for s in sets}
        pods = [pod for found in alive.values() for pod in found]
        ready, updated = sum(map(_is_ready, pods)), len(alive[newest])
        wanted = item["spec"]["replicas"]
        counts = {
            "replicas": len(pods),
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(0, wanted - ready),
        }
        _, missing = _bounds(item["spec"]["strategy"], wanted)
        is_done = updated == len(pods) == wanted == ready
        reason, due = self._progressing(item, counts, newest, is_done)
        conditions = [
            _condition(
                "Available", ready >= wanted - missing,
                "MinimumReplicasAvailable" if ready >= wanted - missing
                else "MinimumReplicasUnavailable",
            ),
            _condition("Progressing", reason != "ProgressDeadlineExceeded", reason),
        ]  # fmt: skip
        status = {
            "observedGeneration": live["metadata"]["generation"],
            **{name: count for name, count in counts.items() if count},
            "conditions": self._timed(live, conditions),
        }
        self._store.update(self._deployments, live, {**live, "status": status})
        return due

    def _progressing(
        self, item: Resource, counts: Mapping[str, int], newest: str, is_done: bool
    ) -> tuple[str, float | None]:
        if is_done:
            self._progress.pop(item["metadata"]["uid"], None)
            return "NewReplicaSetAvailable", None
        uid, now, seen = item["metadata"]["uid"], self._clock.now(), (dict(counts), newest)
        since, known = self._progress.get(uid, (now, None))
        if known != seen:
            since = now
            self._progress[uid] = (now, seen)
        due = since + item["spec"]["progressDeadlineSeconds"]
        return ("ProgressDeadlineExceeded", None) if now >= due else ("ReplicaSetUpdated", due)

    def _timed(self, live: Resource, conditions: list[Resource]) -> list[Resource]:
        """Keep a condition's times where it says what it said."""
        now = self._store.timestamp()
        old = {c["type"]: c for c in live.get("status", {}).get("conditions") or ()}
        timed = []
        for condition in conditions:
            known = old.get(condition["type"], {})
            shared = {key: known.get(key) for key in condition}
            if shared == condition:
                timed.append(known)
                continue
            moved = known.get("status") != condition["status"]
            since = now if moved else known["lastTransitionTime"]
            timed.append({**condition, "lastUpdateTime": now, "lastTransitionTime": since})
        return timed

    # -- pods of an owner ----------------------------------------------------------------------

    def _alive(self, owner: Resource) -> list[Resource]:
        return [pod for pod in self._owned(self._pods, owner) if _is_alive(pod)]

    def _num_ready(self, owner: Resource) -> int:
        return sum(map(_is_ready, self._alive(owner)))

    def _replica_set(self, item: Resource) -> None:
        alive, wanted = self._alive(item), item["spec"]["replicas"]
        for _ in range(wanted - len(alive)):
            self._new_pod(item, "")
        for pod in sorted(alive, key=_goes_first)[: max(0, len(alive) - wanted)]:
            self._api.end(self._pods, pod, {})
        alive = self._alive(item)
        ready = sum(map(_is_ready, alive))
        counts = {"readyReplicas": ready, "availableReplicas": ready}
        self._counted(self._sets, item, len(alive), counts)

    def _counted(self, kind: Kind, item: Resource, size: int, counts: Mapping[str, Any]) -> None:
        live = self._again(kind, item)
        status = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": size,
            **{name: count for name, count in counts.items() if count},
        }
        self._store.update(kind, live, {**live, "status": status})

    def _new_pod(self, owner: Resource, name: str) -> Resource:
        template = copy.deepcopy(owner["spec"]["template"])
        meta = template.get("metadata") or {}
        own = _owned_meta(owner, name, meta.get("labels") or {})
        if meta.get("annotations"):
            own["annotations"] = meta["annotations"]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": template["spec"]}
        if not name:
            own["generateName"] = f"{owner['metadata']['name']}-"
            del own["name"]
        return self._api.make_pod(body)

    def _stateful_set(self, item: Resource) -> None:
        wanted, name = item["spec"]["replicas"], item["metadata"]["name"]
        mark = f"{name}-{_template_hash(item['spec']['template'])}"
        pods = {pod["metadata"]["name"]: pod for pod in self._owned(self._pods, item)}
        names = [f"{name}-{index}" for index in range(wanted)]
        for each in names:
            pod = pods.get(each)
            if pod is None:
                made = self._new_pod(item, each)
                labels = {**made["metadata"]["labels"], "controller-revision-hash": mark}
                meta = {**made["metadata"], "labels": labels}
                self._store.update(self._pods, made, {**made, "metadata": meta})
                break  # in order: the next one comes when this one is ready
            if pod["metadata"]["labels"].get("controller-revision-hash") != mark:
                self._api.end(self._pods, pod, {})
                break
            if not _is_ready(pod):
                break
        for extra in sorted(pods.keys() - set(names), reverse=True)[:1]:
            self._api.end(self._pods, pods[extra], {})
        alive = self._alive(item)
        ready = sum(map(_is_ready, alive))
        counts = {
            "readyReplicas": ready, "availableReplicas": ready, "currentReplicas": len(alive),
            "updatedReplicas": len(alive), "currentRevision": mark, "updateRevision": mark,
        }  # fmt: skip
        self._counted(self._stateful, item, len(alive), counts)

    # -- Jobs ----------------------------------------------------------------------------------

    def _job(self, item: Resource) -> None:
        if any(c["status"] == "True" for c in item.get("status", {}).get("conditions") or ()):
            return
        pods = self._owned(self._pods, item)
        phases = [pod.get("status", {}).get("phase") for pod in pods]
        succeeded, failed = phases.count("Succeeded"), phases.count("Failed")
        spec = item["spec"]
        active = len(phases) - succeeded - failed
        conditions = []
        if succeeded >= spec["completions"]:
            conditions = [_condition("Complete", True, "CompletionsReached")]
        elif failed > spec["backoffLimit"]:
            conditions = [_condition("Failed", True, "BackoffLimitExceeded")]
        else:
            for _ in range(min(spec["parallelism"], spec["completions"] - succeeded) - active):
                self._new_pod(item, "")
                active += 1
        live = self._again(self._jobs, item)
        status: Resource = {
            "startTime": live.get("status", {}).get("startTime", self._store.timestamp())
        }
        counts = {"active": active, "succeeded": succeeded, "failed": failed}
        status |= {name: count for name, count in counts.items() if count}
        if conditions:
            status["conditions"] = self._timed(live, conditions)
            if succeeded >= spec["completions"]:
                status["completionTime"] = self._store.timestamp()
        self._store.update(self._jobs, live, {**live, "status": status})


def _kind(kinds: Kinds, group: str, plural: str) -> Kind:
    found = kinds.of((group, plural))
    assert found is not None
    return found


def _owned_meta(owner: Resource, name: str, labels: Mapping[str, str]) -> Resource:
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    return {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": dict(labels),
        "ownerReferences": [reference],
    }


def _template_hash(template: Resource) -> str:
    text = json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _revision(replica_set: Resource) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(_REVISION, "0"))


def _bounds(strategy: Mapping[str, Any], wanted: int) -> tuple[int, int]:
    """Return how many pods may be there beyond the size, and how many may be missing."""
    if strategy["type"] == "Recreate":
        return 0, wanted
    rolling = strategy["rollingUpdate"]
    surge = _share(rolling["maxSurge"], wanted, up=True)
    missing = _share(rolling["maxUnavailable"], wanted, up=False)
    return surge, missing if surge or missing else 1


def _share(value: int | str, wanted: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    part = wanted * int(value.rstrip("%"))
    return -(-part // 100) if up else part // 100


def _condition(name: str, is_true: bool, reason: str) -> Resource:
    return {"type": name, "status": str(is_true), "reason": reason, "message": reason}


def _is_alive(pod: Resource) -> bool:
    ended = pod.get("status", {}).get("phase") in _ENDED
    return not ended and "deletionTimestamp" not in pod["metadata"]


def _is_ready(pod: Resource) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _goes_first(pod: Resource) -> tuple[bool, int, bool, int]:
    notes = pod["metadata"].get("annotations") or {}
    phase = _PHASES.get(pod.get("status", {}).get("phase", "Pending"), 1)
    cost = notes.get(_COST, "0")
    is_number = cost.lstrip("-").isdigit()
    return ("nodeName" in pod["spec"], phase, _is_ready(pod), int(cost) if is_number else 0)
