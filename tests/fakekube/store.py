"""Objects with their versions, and what happened to them.

What is stored is never changed in place: a change puts a new object there, so that whoever holds
the old one, like an open watch, still sees what was.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from services.common.clock import Clock
from tests.fakekube.errors import ApiError, not_found
from tests.fakekube.kinds import Kind, KindKey, Resource

_ENDED_BY_OTHERS = (("", "pods"), ("", "namespaces"))  # what is marked, and goes when it is empty
_HISTORY = 4_096  # changes that a watch can still begin at


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to an object."""

    version: int
    what: str  # ADDED, MODIFIED, DELETED
    key: KindKey
    now: Resource  # as it was last, of one that is deleted
    before: Resource | None


class Store:
    """All objects, by kind, namespace and name."""

    def __init__(self, clock: Clock) -> None:
        self.version = 1
        self._clock = clock
        self._objects: dict[KindKey, dict[tuple[str, str], Resource]] = {}
        self._history: deque[Change] = deque(maxlen=_HISTORY)
        self._listeners: list[Callable[[Change], None]] = []

    def listen(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Have every change told; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def timestamp(self, unix_s: float | None = None) -> str:
        """The time, as objects write it."""
        now_s = self._clock.unix_ms() / 1000 if unix_s is None else unix_s
        return datetime.fromtimestamp(int(now_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def find(self, key: KindKey, namespace: str, name: str) -> Resource | None:
        """Return an object, not to be changed."""
        return self._objects.get(key, {}).get((namespace, name))

    def get(self, kind: Kind, namespace: str, name: str) -> Resource:
        """The same; ApiError if there is none."""
        found = self.find(kind.key, namespace, name)
        if found is None:
            raise not_found(kind.title, name)
        return found

    def all_of(self, key: KindKey, namespace: str | None = None) -> list[Resource]:
        """Return objects of a kind in order, of one namespace or of all."""
        return [
            found
            for (space, _), found in sorted(self._objects.get(key, {}).items())
            if namespace in (None, space)
        ]

    def everything(self) -> Iterator[tuple[KindKey, Resource]]:
        """Return all objects."""
        for key, objects in list(self._objects.items()):
            for found in list(objects.values()):
                yield key, found

    def create(self, kind: Kind, resource: Resource) -> Resource:
        """Add an object; ApiError if there is one of this name."""
        meta = resource["metadata"]
        place = (meta.get("namespace", ""), meta["name"])
        if place in self._objects.get(kind.key, {}):
            raise ApiError(
                409, f'{kind.title} "{meta["name"]}" already exists', reason="AlreadyExists"
            )
        own = {"uid": str(uuid.uuid4()), "creationTimestamp": self.timestamp(), "generation": 1}
        return self._put(kind.key, {**resource, "metadata": {**meta, **own}}, "ADDED", None)

    def update(self, kind: Kind, before: Resource, resource: Resource) -> Resource:
        """Put an object in place of one; the same object if nothing differs.

        A generation is counted for everything but metadata and status.
        """
        after = {**resource, "metadata": {**resource["metadata"]}}
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if after == before:
            return before
        if _wanted(after) != _wanted(before):
            after["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
        meta, ends = after["metadata"], kind.key not in _ENDED_BY_OTHERS
        if ends and meta.get("deletionTimestamp") and not meta.get("finalizers"):
            self._put(kind.key, after, "MODIFIED", before)
            return self.remove(kind.key, after)
        return self._put(kind.key, after, "MODIFIED", before)

    def remove(self, key: KindKey, resource: Resource) -> Resource:
        """Forget an object."""
        meta = resource["metadata"]
        before = self._objects[key].pop((meta.get("namespace", ""), meta["name"]))
        self.version += 1
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
        self._tell(Change(self.version, "DELETED", key, last, before))
        return last

    def since(self, version: int, key: KindKey) -> list[Change]:
        """Return later changes of a kind; ApiError where they are forgotten."""
        if self._history and version < self._history[0].version - 1:
            raise ApiError(410, f"too old resource version: {version} ({self.version})")
        return [c for c in self._history if c.version > version and c.key == key]

    def forget_history(self) -> None:
        """Have no watch begin at what has been."""
        self.version += 2
        self._history.clear()
        gone = Change(self.version, "BOOKMARK", ("", ""), {}, None)
        self._history.append(gone)

    def _put(
        self, key: KindKey, resource: Resource, what: str, before: Resource | None
    ) -> Resource:
        self.version += 1
        meta = {**resource["metadata"], "resourceVersion": str(self.version)}
        stored = {**resource, "metadata": meta}
        self._objects.setdefault(key, {})[meta.get("namespace", ""), meta["name"]] = stored
        self._tell(Change(self.version, what, key, stored, before))
        return stored

    def _tell(self, change: Change) -> None:
        self._history.append(change)
        for listener in list(self._listeners):
            listener(change)


def _wanted(resource: Resource) -> Resource:
    return {key: value for key, value in resource.items() if key not in ("metadata", "status")}
