"""Being the one operator: a Lease of Kubernetes that is renewed while we live.

The clocks of two machines are never compared. A lease of somebody else has run out when it has not
changed for its whole length by our own clock; ours ends here before it can for others, counted from
before the call that renewed it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from services.autoscaler.kube_api import KubeApi, KubeError, Resource
from services.common.clock import Clock

LEASE_S = 15.0
RENEW_S = 3.0
_OURS = 0.7  # of the lease: clocks may run at slightly different speeds
_CONFLICT, _MISSING = 409, 404


class KubeLease:
    """Belongs to the event loop."""

    def __init__(self, api: KubeApi, name: str, owner: str, clock: Clock) -> None:
        self._api = api
        self._name = name
        self._owner = owner
        self._clock = clock
        self._path = f"apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"
        self._seen: tuple[str, str] = ("", "")  # holder and time, as last read
        self._seen_at = float("-inf")
        self._ends_at = float("-inf")
        self.leader = ""  # as far as is known

    @property
    def left_s(self) -> float:
        """Seconds in which we may act; 0 = we do not lead."""
        return max(0.0, self._ends_at - self._clock.now())

    async def renew(self) -> bool:
        """Take or keep the lease; False = somebody else leads. Raises DriverError."""
        asked_at = self._clock.now()
        try:
            lease = await self._read()
            spec = lease.get("spec") or {}
            if lease and not self._is_free(spec):
                self._ends_at = float("-inf")
                return False
            await self._write(lease, self._owner)
        except KubeError as error:
            if error.status != _CONFLICT:
                raise
            return self.left_s > 0  # somebody was quicker: the next look tells
        self._ends_at = asked_at + LEASE_S * _OURS
        self.leader = self._owner
        return True

    async def give_back(self) -> None:
        """Let another one lead at once. Raises DriverError."""
        if not self.left_s:
            return
        self._ends_at = float("-inf")
        lease = await self._read()
        if (lease.get("spec") or {}).get("holderIdentity") == self._owner:
            await self._write(lease, "")

    async def _read(self) -> Resource:
        """Return the lease; empty = there is none yet."""
        try:
            return await self._api.get(f"{self._path}/{self._name}")
        except KubeError as error:
            if error.status != _MISSING:
                raise
            return {}

    def _is_free(self, spec: Resource) -> bool:
        """Whether it is ours, nobody's, or of somebody who is silent for too long."""
        holder, now = str(spec.get("holderIdentity") or ""), self._clock.now()
        seen = (holder, str(spec.get("renewTime") or ""))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        self.leader = holder
        length_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
        return holder in ("", self._owner) or now - self._seen_at >= length_s

    async def _write(self, lease: Resource, holder: str) -> None:
        old = lease.get("spec") or {}
        now = datetime.fromtimestamp(self._clock.unix_ms() / 1000, UTC)
        told = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_new = old.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": told,
            "acquireTime": told if is_new else old.get("acquireTime"),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + is_new,
        }
        metadata = lease.get("metadata") or {"name": self._name}
        body: Resource = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        if lease:
            await self._api.put(f"{self._path}/{self._name}", body)
        else:
            await self._api.create(self._path, body)
