"""The meaning of tell.lua, told.lua, lead.lua and keep.lua in Python: a ScalingStore in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.clock import Clock, ManualClock
from services.common.errors import StoreUnavailable
from services.registry.scaling import WORD_MS, Brief, Follower, Leadership, Word


@dataclass
class ScalingTwin:
    """Has the methods of ScalingStore; `is_down` makes every call fail."""

    clock: Clock = field(default_factory=ManualClock)  # for calls that name no time
    words: dict[str, tuple[int, str]] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    owner: str = ""
    token: int = 0
    until: int = 0
    is_down: bool = False

    def _now(self, now_ms: int | None) -> int:
        if self.is_down:
            raise StoreUnavailable("the twin is down")
        return round(self.clock.now() * 1000) if now_ms is None else now_ms

    async def tell(self, router_id: str, text: str, now_ms: int | None = None) -> Brief:
        """Take a router's word."""
        now = self._now(now_ms)
        if not text:
            self.words.pop(router_id, None)
        else:
            self.words[router_id] = (now, text)
        return Brief(self.fields.get("brief", ""), self.until >= now)

    async def told(self, now_ms: int | None = None) -> tuple[Word, ...]:
        """Return the words that are not too old."""
        now = self._now(now_ms)
        self.words = {r: w for r, w in self.words.items() if w[0] + WORD_MS >= now}
        return tuple(Word(r, text, (now - at) / 1000) for r, (at, text) in self.words.items())

    async def lead(
        self, owner: str, lease_ms: int, least_token: int, now_ms: int | None = None
    ) -> Leadership | Follower:
        """Take or renew the lease."""
        now, is_ours = self._now(now_ms), self.owner == owner
        if self.until >= now and not is_ours:
            return Follower(self.owner, (self.until - now) / 1000)
        if lease_ms == 0:
            self.until = 0 if is_ours else self.until
            return Follower("", 0.0)
        state = None
        if not is_ours or self.until < now:
            self.token = max(self.token, least_token) + 1
            state = self.fields.get("state")
        self.owner, self.until = owner, now + lease_ms
        return Leadership(self.token, state)

    async def keep(
        self, owner: str, token: int, fields: Mapping[str, str], now_ms: int | None = None
    ) -> bool:
        """Write for the lease's owner."""
        now = self._now(now_ms)
        if (self.owner, self.token) != (owner, token) or self.until < now:
            return False
        self.fields.update(fields)
        return True
