"""Connections of a sink to prefill workers: made when wanted, shared, watched, bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock
from services.telemetry.logs import get_logger
from services.transfer.config import TransferConfig
from services.transfer.device import Device
from services.transfer.handshake import LocalEnd
from services.transfer.key_ring import KeyWatch
from services.transfer.loop import Timers
from services.transfer.peer_link import LinkState, PeerLink
from services.transfer.receive import Receive
from services.transfer.renewer import Target
from services.transfer.zmq_plane import Poller, SinkContext

log = get_logger(__name__)


class LinkOwner(Protocol):
    """What the table tells the sink, on its thread."""

    def on_connected(self, receive: Receive) -> None:
        """The receive's connection is up."""
        ...

    def on_connect_failed(self, receive: Receive, code: str, message: str) -> None:
        """There will be no connection."""
        ...

    def on_peer_lost(self, target: Target, *, is_dead: bool, is_planned: bool = False) -> None:
        """An established connection is gone; `is_planned` if we cut it to make another."""
        ...

    def is_in_use(self, target: Target) -> bool:
        """Tell whether anything is received from this peer."""
        ...

    def on_plane_fallback(self, link: PeerLink) -> None:
        """A connection is up, but over a lesser plane than was agreed."""
        ...

    def on_link_closed(self, link: PeerLink) -> None:
        """A connection is closed, for whatever reason; nothing of it is in use any more."""
        ...


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What connections are made with and watched by."""

    context: SinkContext
    end: LocalEnd
    config: TransferConfig
    keys: KeyWatch | None
    poller: Poller
    timers: Timers
    clock: Clock
    device: Device | None = None


class LinkTable:
    """At most one connection a peer; belongs to the sink's thread but for `planes`."""

    def __init__(self, parts: LinkParts, owner: LinkOwner) -> None:
        self._parts = parts
        self._owner = owner
        self._links: OrderedDict[Target, PeerLink] = OrderedDict()
        self._waiting: dict[Target, list[Receive]] = {}
        self._lock = threading.Lock()  # guards _planes
        self._planes: dict[str, str] = {}

    def planes(self) -> dict[str, str]:
        """Peer worker id -> plane in use; any thread."""
        with self._lock:
            return dict(self._planes)

    def all(self) -> list[PeerLink]:
        """Return every connection."""
        return list(self._links.values())

    def connect(self, receive: Receive) -> None:
        """Give a receive its connection, now or when it is up."""
        parts, target = self._parts, receive.target
        link = self._links.get(target)
        if link is None:
            self._drop_idle()
            now = parts.clock.now()
            link = PeerLink(
                parts.context, target, parts.end, parts.config, parts.keys, parts.poller, now
            )
            link.device = parts.device
            self._links[target] = link
            parts.timers.at_latest(link, link.deadline)
        receive.link = link
        if link.state is LinkState.UP:
            self._connected(receive, link)
        else:
            self._waiting.setdefault(target, []).append(receive)
            self.settle(link)  # there may be no socket for it

    def settle(self, link: PeerLink) -> None:
        """Tell the receives that wait for a connection how it went."""
        if self._links.get(link.target) is not link:
            return
        if link.failure is not None:
            self._remove(link)
            self._fail_waiting(link, link.failure.code, link.failure.message)
        elif link.state is LinkState.UP and link.target in self._waiting:
            if link.plane != link.agreed_plane:
                self._owner.on_plane_fallback(link)
            self.publish_planes()
            self._watch(link)
            for receive in self._waiting.pop(link.target):
                self._connected(receive, link)

    def redial(self, link: PeerLink, why: str) -> bool:
        """Try again a connection that never came up, maybe with other keys; False: drop it."""
        if not link.redial(why, self._parts.clock.now()):
            return False
        self._parts.timers.at_latest(link, link.next_due())
        return True

    def cut(self, publics: Collection[bytes]) -> None:
        """Make the connections anew that rest on one of these keys."""
        for link in self.all():
            if link.uses(publics):
                self.drop(link, is_dead=False, is_planned=True)

    def drop(self, link: PeerLink, *, is_dead: bool, is_planned: bool = False) -> None:
        """Close a connection that broke."""
        if self._links.get(link.target) is not link:
            return
        self._remove(link)
        self._fail_waiting(link, "handoff_failed", "the connection to the prefill worker broke")
        self._owner.on_peer_lost(link.target, is_dead=is_dead, is_planned=is_planned)

    def check(self, link: PeerLink, now: float) -> None:
        """Do what is due: give up on a handshake, drop a peer that is silent."""
        if self._links.get(link.target) is not link:
            return
        link.on_time(now)
        self.settle(link)
        if link.state is not LinkState.UP:
            if self._links.get(link.target) is link:
                self._parts.timers.at_latest(link, link.next_due())
            return
        if not self._owner.is_in_use(link.target):
            link.last_heard = now  # nobody pings an idle peer
        elif now - link.last_heard > self._parts.config.peer_timeout_s:
            log.warning("transfer.peer_silent", peer=link.target.worker_id)
            self.drop(link, is_dead=False)
            return
        self._watch(link)

    def heard(self, target: Target, now: float) -> None:
        """Note a sign of life."""
        link = self._links.get(target)
        if link is not None:
            link.last_heard = max(link.last_heard, now)

    def close(self) -> None:
        """Close every connection."""
        for link in self._links.values():
            self._owner.on_link_closed(link)
            link.close()
        self._links.clear()

    def _connected(self, receive: Receive, link: PeerLink) -> None:
        receive.link, receive.pool, receive.plane = link, link.pool, link.plane
        receive.copy = link.copy
        self._links.move_to_end(link.target)
        self._owner.on_connected(receive)

    def _fail_waiting(self, link: PeerLink, code: str, message: str) -> None:
        for receive in self._waiting.pop(link.target, []):
            self._owner.on_connect_failed(receive, code, message)

    def _watch(self, link: PeerLink) -> None:
        parts = self._parts
        parts.timers.at_latest(link, parts.clock.now() + parts.config.ping_interval_s)

    def _remove(self, link: PeerLink) -> None:
        del self._links[link.target]
        self._parts.timers.discard(link)
        self._owner.on_link_closed(link)
        link.close()
        self.publish_planes()

    def _drop_idle(self) -> None:
        """Keep the number of connections bounded; one in use is never closed."""
        for target, link in list(self._links.items()):
            if len(self._links) < self._parts.config.max_peers:
                return
            if not self._owner.is_in_use(target):
                self._remove(link)

    def publish_planes(self) -> None:
        """Take note of the planes in use, for `planes`."""
        planes = {
            link.target.worker_id: link.plane
            for link in self._links.values()
            if link.state is LinkState.UP
        }
        with self._lock:
            self._planes = planes
