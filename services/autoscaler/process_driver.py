"""Replicas as processes of an `isthmus up` cluster, through its supervisor's control socket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline, PolicySpec
from services.autoscaler.signals import POOL_NAMES
from services.autoscaler.worker_calls import WorkerCalls
from services.common.errors import ConfigError
from services.telemetry.logs import get_logger

log = get_logger(__name__)

FLIP_DRAIN_S = 30.0
_ABORT_GRACE_S = 1.0  # of a process whose requests are to be given up
_MAX_ANSWER_BYTES = 1 << 20
_STATES = {
    "starting": ReplicaState.STARTING,
    "ready": ReplicaState.READY,
    "draining": ReplicaState.DRAINING,
}


class ProcessDriver:
    """Implements Driver. Belongs to the event loop."""

    capabilities = Capabilities(can_flip=True, names_victims=True)

    def __init__(
        self, control: Path, roles: Mapping[str, str], calls: WorkerCalls, now: Callable[[], float]
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            control: the supervisor's socket.
            roles: of each pool of the policy.
            calls: to the workers themselves.
            now: the controller's clock.
        """
        self._control = control
        self._roles = roles
        self._pools = {role: pool for pool, role in roles.items()}
        self._calls = calls
        self._now = now
        self._addresses: dict[str, str] = {}
        self._aborting: set[str] = set()  # that drain, and are not waited for in the end
        self._flips: dict[str, tuple[str, asyncio.Task[None]]] = {}  # with the pool they leave

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Return the supervisor's workers, by pool."""
        answer = await self._ask({"do": "list"})
        self._flips = {r: flip for r, flip in self._flips.items() if not flip[1].done()}
        found: dict[str, list[Replica]] = {pool: [] for pool in self._roles}
        addresses = {}
        try:
            for entry in answer["replicas"]:
                name, state = str(entry["id"]), _STATES[entry["state"]]
                pool = self._pools.get(entry["role"])
                if name in self._flips:
                    pool, state = self._flips[name][0], ReplicaState.DRAINING
                if pool is not None:
                    found[pool].append(Replica(name, state, self._now() - float(entry["age_s"])))
                addresses[name] = str(entry["grpc"])
        except (KeyError, TypeError, ValueError):
            raise DriverError("the supervisor answered in an unknown form") from None
        self._addresses = addresses
        self._aborting &= addresses.keys()
        return {pool: tuple(replicas) for pool, replicas in found.items()}

    async def start(self, pool: str, count: int) -> None:
        """Have the supervisor start workers."""
        await self._ask({"do": "start", "role": self._role(pool), "count": count})

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """Have it end those that do not serve yet."""
        await self._ask({"do": "cancel", "ids": list(replica_ids)})

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Have the worker refuse new work; routers move answers away from it by themselves."""
        address = self._address(replica_id)
        await self._calls.drain(address)
        if on_deadline is OnDeadline.ABORT:
            self._aborting.add(replica_id)
        # Last: what the supervisor calls draining has been told so.
        await self._ask({"do": "drain", "id": replica_id})

    async def stop(self, replica_id: str) -> None:
        """Have the supervisor end the process."""
        request: dict[str, object] = {"do": "stop", "id": replica_id}
        if replica_id in self._aborting:
            request["grace_s"] = _ABORT_GRACE_S
        await self._ask(request)

    async def flip(self, replica_id: str, pool: str) -> None:
        """Begin to move a worker to another pool."""
        if replica_id in self._flips:
            return
        address, role = self._address(replica_id), self._role(pool)
        source = next((p for p in self._roles if p != pool), pool)
        task = asyncio.create_task(self._flip(replica_id, address, role), name="flip")
        self._flips[replica_id] = (source, task)

    async def close(self) -> None:
        """Let go of flips under way: workers end them by themselves."""
        tasks = [task for _, task in self._flips.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.close()

    async def _flip(self, replica_id: str, address: str, role: str) -> None:
        try:
            await self._calls.join_pool(address, role, FLIP_DRAIN_S)
            await self._ask({"do": "role", "id": replica_id, "role": role})
        except DriverError as error:
            # It serves on where it was; the next tick sees that and decides anew.
            log.warning("autoscaler.flip_failed", replica=replica_id, reason=str(error)[:300])

    def _role(self, pool: str) -> str:
        role = self._roles.get(pool)
        if role is None:
            raise DriverError(f"no workers here belong to a pool {pool!r}")
        return role

    def _address(self, replica_id: str) -> str:
        address = self._addresses.get(replica_id)
        if address is None:
            raise DriverError(f"the supervisor has no worker {replica_id!r}")
        return address

    async def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:  # Any: JSON
        try:
            reader, writer = await asyncio.open_unix_connection(
                str(self._control), limit=_MAX_ANSWER_BYTES
            )
        except OSError as error:
            raise DriverError(f"the supervisor is not there: {error.strerror}") from None
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            answer = json.loads(await reader.readuntil(b"\n"))
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise DriverError("the supervisor gave no answer") from None
        finally:
            writer.close()
        if not isinstance(answer, dict) or "error" in answer:
            raise DriverError(f"the supervisor refused: {str(answer)[:200]}")
        return answer


def roles_of(spec: PolicySpec) -> dict[str, str]:
    """Return the role of each pool; raises ConfigError where two pools would share workers."""
    roles = {pool.name: POOL_NAMES[pool.role] for pool in spec.pools}
    double = [role for role, count in Counter(roles.values()).items() if count > 1]
    if double:
        raise ConfigError(f"two pools of role {double[0]} cannot be told apart on one machine")
    return roles
