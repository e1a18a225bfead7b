"""Open watches: what happens to objects of a kind, as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Kind, Resource
from tests.fakekube.selectors import Matches
from tests.fakekube.store import Change, Store

_QUEUE = 10_000  # events that a slow reader may be behind; the watch ends after that
_END = None

Event = Resource  # type and object


@dataclass(frozen=True, slots=True)
class Asked:
    """What a query says about a watch."""

    kind: Kind
    namespace: str
    matches: Matches
    since: str  # a version; "" or "0" = begin with what there is
    wants_initial: bool  # the same, with a bookmark once all of it is told
    wants_bookmarks: bool
    timeout_s: float


@dataclass(eq=False)
class Watch:
    """One of them."""

    asked: Asked
    queue: asyncio.Queue[Event | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=_QUEUE)
    )
    is_open: bool = True

    def tell(self, event: Event) -> None:
        """Add an event, or end the watch where there are too many."""
        if self.is_open and self.queue.qsize() < _QUEUE - 1:
            self.queue.put_nowait(event)
        else:
            self.close()

    def close(self) -> None:
        """Have the stream end after what it has still to say."""
        if self.is_open:
            self.is_open = False
            self.queue.put_nowait(_END)


class Watches:
    """All that are open. Belongs to the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: set[Watch] = set()
        store.listen(self._changed)

    def open(self, asked: Asked) -> Watch:
        """Begin one; what it has to say first is in its queue already."""
        watch = Watch(asked)
        for event in self._first(asked):
            watch.tell(event)
            if event["type"] == "ERROR":
                watch.close()
        self._open.add(watch)
        return watch

    def end(self, watch: Watch) -> None:
        """Forget one."""
        self._open.discard(watch)

    def drop_all(self) -> int:
        """Cut every open one; how many those were."""
        for watch in list(self._open):
            watch.close()
        return len(self._open)

    def bookmark(self, asked: Asked, *, is_initial: bool = False) -> Event:
        """Say up to which version everything is told."""
        meta: Resource = {"resourceVersion": str(self._store.version), "creationTimestamp": None}
        if is_initial:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        shown = {"apiVersion": asked.kind.api_version, "kind": asked.kind.kind, "metadata": meta}
        return {"type": "BOOKMARK", "object": shown}

    def _first(self, asked: Asked) -> Iterator[Event]:
        if asked.wants_initial or asked.since in ("", "0"):
            for item in self._store.all_of(asked.kind.key, asked.namespace or None):
                if asked.matches(item):
                    yield _event("ADDED", asked.kind, item)
            if asked.wants_initial:
                yield self.bookmark(asked, is_initial=True)
            return
        try:
            changes = self._store.since(int(asked.since), asked.kind.key)
        except ApiError as error:
            yield {"type": "ERROR", "object": error.body()}
            return
        yield from _events(asked, changes)

    def _changed(self, change: Change) -> None:
        for watch in self._open:
            if change.key == watch.asked.kind.key:
                for event in _events(watch.asked, (change,)):
                    watch.tell(event)


def _events(asked: Asked, changes: Iterable[Change]) -> Iterator[Event]:
    for change in changes:
        space = change.now["metadata"].get("namespace", "")
        if asked.namespace not in ("", space):
            continue
        was = change.before is not None and asked.matches(change.before)
        is_now = change.what != "DELETED" and asked.matches(change.now)
        if is_now:
            yield _event("MODIFIED" if was else "ADDED", asked.kind, change.now)
        elif was:
            yield _event("DELETED", asked.kind, change.now)


def _event(what: str, kind: Kind, item: Resource) -> Event:
    return {"type": what, "object": {**item, "apiVersion": kind.api_version}}
