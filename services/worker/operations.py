"""What an operator can do to a running worker: drain, change pool, drop its cache, look inside."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import RequestError
from services.telemetry.logs import get_logger
from services.worker.shell import WorkerShell

log = get_logger(__name__)

MAX_DRAIN_S = 600.0
# A role is a weight, not a program: the other kind of work is taken too, at a smaller share.
ROLE_WEIGHTS = {"prefill": (1.0, 0.2), "decode": (0.2, 1.0)}
_POLL_S = 0.05


class Registration(Protocol):
    """The worker's entry in the registry."""

    def set_state(self, state: str) -> None:
        """Announce "live" or "draining"."""
        ...

    def set_role(self, role: str) -> None:
        """Register in another pool."""
        ...


class WorkerOperations:
    """Belongs to the event loop."""

    def __init__(self, shell: WorkerShell, registration: Registration, clock: Clock) -> None:
        self._shell = shell
        self._registration = registration
        self._clock = clock
        self._is_leaving = False
        self._is_drained = False  # by somebody who wants it to stay so
        self._is_changing_pool = False

    async def leave(self) -> None:
        """Drain for good: the process is about to end, and whoever ends it sets the limit."""
        self._is_leaving = True
        self._is_drained = True
        await self._empty(math.inf)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for open work items and lent blocks; False if some are left."""
        self._is_drained = True
        return await self._empty(min(timeout_s, MAX_DRAIN_S))

    async def _empty(self, timeout_s: float) -> bool:
        self._shell.begin_drain()
        self._registration.set_state("draining")
        end = self._clock.now() + timeout_s
        while not self._is_idle():
            if self._clock.now() >= end:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def undrain(self) -> None:
        """Take new work again."""
        if self._is_leaving:
            raise RequestError("draining", "the worker is shutting down")
        if self._is_changing_pool:
            raise RequestError("duplicate_request", "it drains to change its pool")
        self._is_drained = False
        self._take_work_again()

    async def join_pool(self, pool: str, drain_s: float) -> None:
        """Go over to another pool, once nothing is open; a worker that was drained stays drained.

        Raises:
            RequestError: invalid_argument, draining, duplicate_request; deadline_exceeded when
                something was still open: the worker goes on in its old pool.
        """
        if pool not in ROLE_WEIGHTS:
            raise RequestError(
                "invalid_argument", f"role must be one of {', '.join(ROLE_WEIGHTS)}", param="role"
            )
        if self._is_leaving:
            raise RequestError("draining", "the worker is shutting down")
        if self._is_changing_pool:
            raise RequestError("duplicate_request", "it is changing its pool already")
        self._is_changing_pool = True
        try:
            if not await self._empty(min(drain_s, MAX_DRAIN_S)):
                raise RequestError(
                    "deadline_exceeded",
                    f"{self._shell.num_open()} work items were still open after {drain_s:g} s",
                )
            self._shell.set_role(*ROLE_WEIGHTS[pool])
            self._registration.set_role(pool)
            log.info("worker.pool_changed", pool=pool)
        finally:
            self._is_changing_pool = False
            if not self._is_drained:  # who leaves is drained
                self._take_work_again()

    def _take_work_again(self) -> None:
        self._shell.end_drain()
        self._registration.set_state("live")

    def _is_idle(self) -> bool:
        return self._shell.engine.load().requests_open == 0 and self._shell.num_open() == 0
