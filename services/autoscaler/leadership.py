"""Being the one autoscaler of a cluster: a lease in the store that is renewed while we live.

What is begun under the lease has to end with it. The time left is counted by our own monotonic
clock from before the call that renewed it, so it ends here before it ends in the store, whatever
stood still meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock
from services.registry.scaling import Follower, Leadership

LEASE_S = 10.0
_OURS = 0.8  # of the lease: clocks may run at slightly different speeds


class LeaseStore(Protocol):
    """The part of ScalingStore that is used here."""

    async def lead(self, owner: str, lease_ms: int, least_token: int) -> Leadership | Follower:
        """Take or renew the lease; raises StoreUnavailable."""
        ...

    async def keep(self, owner: str, token: int, fields: Mapping[str, str]) -> bool:
        """Write what the owner keeps; False = fenced off; raises StoreUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """We lead from now on. `state` is what was left by whoever led before."""

    token: int
    state: str | None


class Lease:
    """Belongs to the event loop."""

    def __init__(
        self, store: LeaseStore, owner: str, clock: Clock, lease_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._owner = owner
        self._clock = clock
        self.lease_s = lease_s
        self._ends_at = float("-inf")
        self._token = 0  # the last one we had, ours or not any more
        self._is_ours = False
        self.leader = ""  # somebody else, as far as is known

    @property
    def left_s(self) -> float:
        """Seconds in which we may act; 0 = we do not lead."""
        if not self._is_ours:
            return 0.0
        return max(0.0, self._ends_at - self._clock.now())

    @property
    def token(self) -> int:
        """Of the lease that we have, or had last."""
        return self._token

    async def renew(self) -> Taken | None:
        """Take or keep the lease; something is returned when it is new. Raises StoreUnavailable."""
        asked_at = self._clock.now()
        lease_ms = round(self.lease_s * 1000)
        answer = await self._store.lead(self._owner, lease_ms, self._token)
        if isinstance(answer, Follower):
            self._is_ours = False
            self.leader = answer.owner
            return None
        # A token that grew: others may have led meanwhile.
        is_new = not self._is_ours or answer.token != self._token
        self._is_ours, self._token, self.leader = True, answer.token, ""
        self._ends_at = asked_at + self.lease_s * _OURS
        return Taken(answer.token, answer.state) if is_new else None

    async def keep(self, fields: Mapping[str, str]) -> bool:
        """Write under our token; False = we do not lead any more. Raises StoreUnavailable."""
        if not self.left_s:
            return False
        is_ours = await self._store.keep(self._owner, self._token, fields)
        self._is_ours = self._is_ours and is_ours
        return is_ours

    async def give_back(self) -> None:
        """Let another one lead at once. Raises StoreUnavailable."""
        if self._is_ours:
            self._is_ours = False
            await self._store.lead(self._owner, 0, self._token)
