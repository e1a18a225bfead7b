"""Decode workers that said HELLO, and identities that talk nonsense; pure, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

_MUTE_S = 60.0
_MAX_MUTED = 1024


@dataclass(slots=True)
class PeerInfo:
    """One life of a decode worker."""

    plane: str  # the best it may ask for
    last_heard: float


class PeerTable:
    """Peers by base; when full, the one idle for longest makes room."""

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._peers: dict[bytes, PeerInfo] = {}

    def get(self, base: bytes) -> PeerInfo | None:
        """Return a peer that said HELLO."""
        return self._peers.get(base)

    def heard(self, base: bytes, now: float) -> None:
        """Note a sign of life."""
        info = self._peers.get(base)
        if info is not None:
            info.last_heard = now

    def admit(self, base: bytes, plane: str, busy: Set[bytes], now: float) -> bool:
        """Take a peer in; False when every other one has a transfer open."""
        if base not in self._peers and len(self._peers) >= self._max_peers:
            idle = [(info.last_heard, b) for b, info in self._peers.items() if b not in busy]
            if not idle:
                return False
            del self._peers[min(idle)[1]]
        self._peers[base] = PeerInfo(plane, now)
        return True


class Mutes:
    """Counts bad frames of each connection; after a few, its frames are not even parsed."""

    def __init__(self, max_bad_frames: int) -> None:
        self._max_bad_frames = max_bad_frames
        self._counts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def add(self, route: bytes, now: float) -> bool:
        """Count a bad frame; True when it is the one that mutes the connection."""
        count = self._counts.pop(route, (0, 0.0))[0] + 1
        self._counts[route] = (count, now + _MUTE_S)
        if len(self._counts) > _MAX_MUTED:
            self._counts.popitem(last=False)
        return count == self._max_bad_frames

    def is_muted(self, route: bytes, now: float) -> bool:
        """Tell whether to drop what this connection sends."""
        entry = self._counts.get(route)
        if entry is None:
            return False
        count, until = entry
        if now >= until:
            del self._counts[route]
            return False
        return count >= self._max_bad_frames
