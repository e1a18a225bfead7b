"""An operator process from its options to exit."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from services.autoscaler.driver import DriverError
from services.autoscaler.kube_api import KubeApi
from services.common.clock import Clock, SystemClock
from services.operator.lease import RENEW_S, KubeLease
from services.operator.schedule import Key, Schedule
from services.operator.shell import ClusterShell
from services.operator.watching import Login, watch
from services.runtime.run import Phases, run_service
from services.telemetry import catalog
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics
from services.telemetry.side_doors import SideDoors

log = get_logger(__name__)

LEASE_NAME = "isthmus-operator"
_LAST_TRY_S = 2.0  # to give the lease back
_WATCHES_END_S = 10.0  # at most; they end within the second


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    make_api: Callable[[str], KubeApi]  # of a name space; "" = our own
    login: Login | None = None  # of watches; None = our pod's account
    is_cluster_wide: bool = False
    host: str = "127.0.0.1"
    grpc_port: int = 0  # of the health service; 0 = any free
    metrics_port: int | None = None  # None = no /metrics, 0 = any free


def run_operator(options: Options) -> int:
    """Run until a signal, or until another one leads; return the exit status."""
    process = OperatorProcess(options, SystemClock())
    return run_service(
        Phases(process.start, process.drain, process.stop, process.failed), drain_s=15.0
    )


class Operator:
    """Leads, or waits for it; passes over clusters while it leads. Belongs to the event loop."""

    def __init__(self, options: Options, metrics: Metrics, clock: Clock) -> None:
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._own = options.make_api("")
        self._lease = KubeLease(self._own, LEASE_NAME, secrets.token_hex(8), clock)
        self._schedule = Schedule()
        self._marked = asyncio.Event()
        self._stop_watching = threading.Event()
        self._shells: dict[str, ClusterShell] = {}
        metrics.watch(catalog.OPERATOR_LED, lambda: float(self._lease.left_s > 0))

    async def run(self) -> str:
        """Come back, with the reason, when another one may lead; the process has to end then."""
        await self._campaign()
        log.info("operator.leads")
        space = None if self._options.is_cluster_wide else self._own.namespace
        tasks = {
            asyncio.create_task(self._keep_leading(), name="lease"),
            asyncio.create_task(self._pass_over(), name="passes"),
            asyncio.create_task(
                watch(self._mark, self._options.login, space, self._stop_watching), name="watches"
            ),
        }
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = ended.pop()
            fault = first.exception()
            return f"{first.get_name()}: {fault or 'ended'}"
        finally:
            await self._end(tasks)

    async def close(self) -> None:
        """Let another one lead, and close connections."""
        try:
            async with asyncio.timeout(_LAST_TRY_S):
                await self._lease.give_back()
        except (DriverError, TimeoutError) as error:
            log.warning("operator.lease_kept", why=str(error))  # it runs out by itself
        for shell in self._shells.values():
            await shell.close()
        await self._own.close()

    async def _end(self, tasks: set[asyncio.Task[None]]) -> None:
        self._stop_watching.set()
        watches = {task for task in tasks if task.get_name() == "watches"}
        for task in tasks - watches:
            task.cancel()
        _, late = await asyncio.wait(watches, timeout=_WATCHES_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _campaign(self) -> None:
        while True:
            if await self._renewed():
                return
            await asyncio.sleep(RENEW_S)

    async def _keep_leading(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if not await self._renewed() and not self._lease.left_s:
                return

    async def _renewed(self) -> bool:
        try:
            return await self._lease.renew()
        except DriverError as error:
            log.warning("operator.lease_not_renewed", why=str(error), left_s=self._lease.left_s)
            return False

    def _mark(self, key: Key) -> None:
        if not self._schedule.mark(key, self._clock.now()):
            log.error("operator.too_many_clusters", cluster=key.name, namespace=key.namespace)
        self._marked.set()

    async def _pass_over(self) -> None:
        """Look at one cluster after the other, as long as we lead."""
        while True:
            self._marked.clear()
            key = self._schedule.next(self._clock.now())
            if key is None:
                await self._wait()
            elif self._lease.left_s:
                await self._pass(key)
            else:
                return

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._schedule.wait_s(self._clock.now())):
                await self._marked.wait()
        except TimeoutError:
            return

    async def _pass(self, key: Key) -> None:
        try:
            plan = await self._shell(key.namespace).reconcile(key.name)
        except DriverError as error:
            wait_s = self._schedule.failed(key, self._clock.now())
            self._metrics.add(catalog.OPERATOR_PASSES, outcome="failed")
            log.warning(
                "operator.pass_failed", cluster=key.name, why=str(error), again_after_s=wait_s
            )
            return
        self._metrics.add(catalog.OPERATOR_PASSES, outcome="ok")
        if plan is None:
            self._schedule.forget(key)
        else:
            self._schedule.done(key, self._clock.now(), plan.requeue_after_s)

    def _may_act(self) -> bool:
        # What is left of the lease for others is longer than any call.
        return self._lease.left_s > 0

    def _shell(self, namespace: str) -> ClusterShell:
        shell = self._shells.get(namespace)
        if shell is None:
            api = self._options.make_api(namespace)
            shell = self._shells[namespace] = ClusterShell(api, self._clock, self._may_act)
        return shell


class OperatorProcess:
    """The phases of one process."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._metrics = Metrics.enabled()
        self._doors = SideDoors(self._metrics)
        self._operator: Operator | None = None
        self._running: asyncio.Task[str] | None = None

    async def start(self) -> None:
        """Serve health and metrics, then wait to lead."""
        options = self._options
        port = await self._doors.open(options.host, options.grpc_port, options.metrics_port)
        self._operator = Operator(options, self._metrics, self._clock)
        self._running = asyncio.create_task(self._operator.run(), name="operator")
        await self._doors.say_serving()
        log.info("operator.started", grpc_port=port)

    async def failed(self) -> str:
        """Come back when somebody else may lead."""
        assert self._running is not None
        return await self._running

    async def drain(self) -> None:
        """Stop acting, and let another one lead."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def stop(self) -> None:
        """Let go of everything; clusters go on."""
        await self.drain()
        if self._operator is not None:
            await self._operator.close()
        await self._doors.close()
        self._metrics.shutdown()
