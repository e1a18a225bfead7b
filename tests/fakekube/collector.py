"""Clean-up after owners, namespaces and CRDs, and what else the control plane does by itself."""

from __future__ import annotations

from tests.fakekube.api import NAMESPACES, Api
from tests.fakekube.kinds import CRD, Kinds, Resource
from tests.fakekube.selectors import of_object
from tests.fakekube.store import Store

_FOREGROUND = "foregroundDeletion"
_CRD_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"


class Collector:
    """Belongs to the event loop."""

    def __init__(self, store: Store, kinds: Kinds, api: Api) -> None:
        self._store = store
        self._kinds = kinds
        self._api = api

    def step(self) -> None:
        """Do what is to be done now."""
        self._owners()
        for space in self._store.all_of(NAMESPACES):
            if "deletionTimestamp" in space["metadata"]:
                self._empty(space)
            else:
                self._set(NAMESPACES, space, {"phase": "Active"})
        for crd in self._store.all_of(CRD):
            self._crd(crd)
        for budget in self._store.all_of(("policy", "poddisruptionbudgets")):
            self._budget(budget)
        for claim in self._store.all_of(("", "persistentvolumeclaims")):
            self._set(("", "persistentvolumeclaims"), claim, {"phase": "Bound"})
        for number, service in enumerate(self._store.all_of(("", "services")), start=1):
            self._service(service, number)

    def _owners(self) -> None:
        everything = list(self._store.everything())
        there = {item["metadata"]["uid"]: item for _, item in everything}
        waiting: dict[str, int] = {}  # dependents of those that are to go after them
        for key, item in everything:
            owners = item["metadata"].get("ownerReferences") or ()
            present = [there[ref["uid"]] for ref in owners if ref["uid"] in there]
            going = [o for o in present if _FOREGROUND in (o["metadata"].get("finalizers") or ())]
            kind = self._kinds.of(key)
            if kind is None or not owners:
                continue
            for owner in going:
                waiting[owner["metadata"]["uid"]] = waiting.get(owner["metadata"]["uid"], 0) + 1
            if len(going) == len(present) and "deletionTimestamp" not in item["metadata"]:
                policy = "Foreground" if going else "Background"
                self._api.end(kind, item, {"propagationPolicy": policy})
        for key, item in everything:
            finalizers = item["metadata"].get("finalizers") or ()
            if _FOREGROUND in finalizers and not waiting.get(item["metadata"]["uid"]):
                self._release(key, item, _FOREGROUND)

    def _release(self, key: tuple[str, str], item: Resource, finalizer: str) -> None:
        meta, kind = item["metadata"], self._kinds.of(key)
        live = self._store.find(key, meta.get("namespace", ""), meta["name"])
        if live is None or kind is None:
            return
        left = [name for name in live["metadata"].get("finalizers") or () if name != finalizer]
        self._store.update(
            kind, live, {**live, "metadata": {**live["metadata"], "finalizers": left}}
        )

    def _empty(self, space: Resource) -> None:
        name = space["metadata"]["name"]
        inside = [
            (key, item)
            for key, item in self._store.everything()
            if item["metadata"].get("namespace") == name
        ]
        for key, item in inside:
            kind = self._kinds.of(key)
            if kind is not None and "deletionTimestamp" not in item["metadata"]:
                self._api.end(kind, item, {})
        if not inside:
            self._store.remove(NAMESPACES, space)

    def _crd(self, crd: Resource) -> None:
        key = (crd["spec"]["group"], crd["spec"]["names"]["plural"])
        if "deletionTimestamp" in crd["metadata"]:
            objects, kind = self._store.all_of(key), self._kinds.of(key)
            for item in objects:
                if kind is not None and "deletionTimestamp" not in item["metadata"]:
                    self._api.end(kind, item, {})
            if not objects:
                self._kinds.remove_crd(crd["metadata"]["name"])
                self._release(CRD, crd, _CRD_FINALIZER)
            return
        names = crd["spec"]["names"]
        conditions = [
            {"type": "NamesAccepted", "status": "True", "reason": "NoConflicts"},
            {"type": "Established", "status": "True", "reason": "InitialNamesAccepted"},
        ]
        stored = list((crd.get("status") or {}).get("storedVersions") or ())
        now = [v["name"] for v in crd["spec"]["versions"] if v["storage"]]
        accepted = {"listKind": f"{names['kind']}List", "singular": names["kind"].lower(), **names}
        status = {
            "conditions": [
                {**c, "message": "", "lastTransitionTime": crd["metadata"]["creationTimestamp"]}
                for c in conditions
            ],
            "acceptedNames": accepted,
            "storedVersions": stored + [name for name in now if name not in stored],
        }
        self._set(CRD, crd, status)

    def _budget(self, budget: Resource) -> None:
        matches = of_object(budget["spec"].get("selector") or {})
        pods = [
            pod
            for pod in self._store.all_of(("", "pods"), budget["metadata"]["namespace"])
            if matches(pod) and "deletionTimestamp" not in pod["metadata"]
        ]
        healthy = sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
            for pod in pods
            if "conditions" in pod.get("status", {})
        )
        spec, total = budget["spec"], len(pods)
        if "maxUnavailable" in spec:
            wanted = total - _count(spec["maxUnavailable"], total)
        else:
            wanted = _count(spec.get("minAvailable", 0), total)
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "currentHealthy": healthy,
            "desiredHealthy": max(0, wanted),
            "expectedPods": total,
            "disruptionsAllowed": max(0, healthy - max(0, wanted)),
        }
        self._set(("policy", "poddisruptionbudgets"), budget, status)

    def _service(self, service: Resource, number: int) -> None:
        if service["spec"].get("clusterIP") or service["spec"].get("type") == "ExternalName":
            return
        kind = self._kinds.of(("", "services"))
        assert kind is not None
        address = f"10.96.{number >> 8 & 255}.{number & 255}"
        spec = {**service["spec"], "clusterIP": address, "clusterIPs": [address]}
        self._store.update(kind, service, {**service, "spec": spec})

    def _set(self, key: tuple[str, str], item: Resource, status: Resource) -> None:
        kind = self._kinds.of(key)
        assert kind is not None
        self._store.update(kind, item, {**item, "status": {**item.get("status", {}), **status}})


def _count(value: int | str, total: int) -> int:
    if isinstance(value, int):
        return value
    return -(-total * int(value.rstrip("%")) // 100)
