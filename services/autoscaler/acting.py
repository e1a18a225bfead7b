"""Does what was decided, through a driver that may fail or hang, and only while we lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.autoscaler.decision import Decision
from services.autoscaler.drains import Drain, Stop
from services.autoscaler.driver import Driver, DriverError
from services.telemetry import catalog
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics

log = get_logger(__name__)

CALL_S = 5.0
T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]  # Any: what coroutines take and yield


class DriverHangs(Exception):
    """A call of the driver did not end in time; nothing more is asked of it in this tick."""


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a driver."""

    name: str  # cancel, start, flip, drain, stop
    pool: str
    num: int
    call: Call[None]
    replica_ids: tuple[str, ...] = ()
    reason: str = ""


class Actor:
    """Belongs to the event loop."""

    def __init__(
        self, driver: Driver, left_s: Callable[[], float], metrics: Metrics, call_s: float = CALL_S
    ) -> None:
        """`left_s`: seconds in which we lead for sure."""
        self._driver = driver
        self._left_s = left_s
        self._metrics = metrics
        self._call_s = call_s
        # A call that would not be cancelled; no other is made before it ends.
        self._stuck: asyncio.Task[Any] | None = None

    async def ask(self, name: str, call: Call[T]) -> T:
        """Make one call in the time there is. Raises DriverError, DriverHangs."""
        await asyncio.sleep(0)  # one that was cancelled ends now, if it does at all
        if self._stuck is not None and not self._stuck.done():
            raise DriverHangs("a call of the driver still has not ended")
        task = asyncio.ensure_future(call())
        try:
            # Not wait_for: it would wait for a call that swallows its cancellation.
            await asyncio.wait({task}, timeout=min(self._call_s, self._left_s()))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            self._stuck = task
            task.add_done_callback(_retrieve)
            self._metrics.add(catalog.DRIVER_FAULTS, call=name)
            raise DriverHangs(f"{name} did not end within {self._call_s:g} s")
        error = task.exception()
        if error is not None:
            self._metrics.add(catalog.DRIVER_FAULTS, call=name)
            if not isinstance(error, (DriverError, DriverHangs)):
                log.error("autoscaler.driver_fault", call=name, error=repr(error)[:400])
                raise DriverError(f"{name}: {type(error).__name__}") from error
            raise error
        return task.result()

    async def act(self, actions: Sequence[Action]) -> None:
        """Do one after another; a failure costs its own, a call that hangs all that follow."""
        for action in actions:
            if not self._left_s():
                log.warning("autoscaler.lease_lost", not_done=action.name, pool=action.pool)
                return
            try:
                await self.ask(action.name, action.call)
            except DriverHangs as error:
                log.error("autoscaler.driver_hangs", call=action.name, reason=str(error))
                return
            except DriverError as error:
                log.warning(
                    "autoscaler.driver_failed",
                    call=action.name, pool=action.pool, reason=str(error)[:400],
                )  # fmt: skip
                continue
            self._metrics.add(catalog.SCALED, action.num, pool=action.pool, action=action.name)
            log.info(
                "autoscaler.done",
                action=action.name, pool=action.pool, num=action.num, reason=action.reason,
                replicas=",".join(action.replica_ids),
            )  # fmt: skip


def actions_of(
    driver: Driver,
    decision: Decision,
    drains: Mapping[str, Drain],
    stops: Sequence[Stop],
    now: float,
) -> Iterator[Action]:
    """Return the calls for a decision: what gives room first, then what grows, then what leaves."""
    for stop in stops:
        yield Action(
            "stop", stop.pool, 1, _bind(driver.stop, stop.replica_id), (stop.replica_id,),
            stop.reason,
        )  # fmt: skip
    for plan in decision.pools:
        if plan.cancel:
            call = _bind(driver.cancel, plan.cancel)
            yield Action("cancel", plan.pool, len(plan.cancel), call, plan.cancel, plan.reason)
    for flip in decision.flips:
        call = _bind(driver.flip, flip.replica_id, flip.target)
        reason = f"to {flip.target}"
        yield Action("flip", flip.source, 1, call, (flip.replica_id,), reason)
    for plan in decision.pools:
        if plan.start:
            call = _bind(driver.start, plan.pool, plan.start)
            yield Action("start", plan.pool, plan.start, call, (), plan.reason)
    for plan in decision.pools:
        for replica_id in plan.drain:
            drain = drains[replica_id]
            left_s = max(0.0, drain.deadline_at - now)
            call = _bind(driver.drain, replica_id, left_s, drain.on_deadline)
            yield Action("drain", plan.pool, 1, call, (replica_id,), plan.reason)


def _bind(method: Callable[..., Coroutine[Any, Any, None]], *args: object) -> Call[None]:
    return lambda: method(*args)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the outcome of a call nobody waits for: else the loop complains of it."""
    if not task.cancelled():
        task.exception()
