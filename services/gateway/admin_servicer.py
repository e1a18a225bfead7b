"""The gRPC service of operators: what the router sees, and what may be done through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.json_format import MessageToDict

from services.common.clock import Clock
from services.common.errors import ConfigError, IsthmusError, RequestError
from services.common.ids import new_request_id
from services.gateway.admin_messages import (
    autoscaler_message,
    latencies_message,
    report_message,
    running_message,
    totals_message,
    worker_message,
)
from services.gateway.errors import internal_error
from services.gateway.grpc_call import AnyContext, abort
from services.gateway.traffic_control import TrafficControl
from services.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.registry.brief import AutoscalerBrief
from services.router.model_set import ModelSet
from services.router.traffic import names_of, parse_table, resolve
from services.router.view import WorkerView
from services.router.worker_calls import CALL_TIMEOUT_S, call_worker
from services.telemetry.diagnostics import json_file
from services.telemetry.logs import LOG_LEVELS, get_logger, set_log_level

log = get_logger(__name__)

ADMIN = "isthmus.v1.Admin"
DEFAULT_ROLE_DRAIN_S = 30.0
MAX_WAIT_S = 600.0
NUM_DECISIONS = 200  # of the last requests, in a bundle
MAX_BUNDLE_BYTES = 12 << 20  # a message holds 16 MiB

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """What the service needs besides the router."""

    lease_ms: int  # life of a worker's lease, as this cluster is configured
    describe: Callable[[], Mapping[str, bytes]] = dict  # this process, for a bundle
    processes: int = 1  # that share the port
    traffic: TrafficControl | None = None  # None = this process has no rules to change
    scaling: Callable[[], AutoscalerBrief | None] = lambda: None  # of the default model


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Shows neither prompts nor answers. Who may call what is in services.common.access."""

    def __init__(self, models: ModelSet, clock: Clock, config: AdminConfig) -> None:
        self._router = models
        self._clock = clock
        self._config = config
        self._traffic = config.traffic or TrafficControl(None, clock)
        self._started = clock.now()

    # -- looking -----------------------------------------------------------------------------

    async def ClusterStatus(
        self,
        request: admin_pb2.ClusterStatusRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.ClusterStatusRequest, admin_pb2.ClusterStatusResponse
        ],
    ) -> admin_pb2.ClusterStatusResponse:
        """Return the workers as this router sees them now, and how its requests fare."""
        return self._status()

    async def ListRequests(
        self,
        request: admin_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.ListRequestsRequest, admin_pb2.ListRequestsResponse
        ],
    ) -> admin_pb2.ListRequestsResponse:
        """Return the requests that are open in this router."""
        return self._requests()

    async def ExplainRequest(
        self,
        request: admin_pb2.ExplainRequestRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.ExplainRequestRequest, admin_pb2.ExplainRequestResponse
        ],
    ) -> admin_pb2.ExplainRequestResponse:
        """Tell why a request ran where it did, and where its time went."""
        async with _answering(context):
            report = self._router.explain(request.request_id)
            if report is None:
                raise RequestError(
                    "not_found",
                    f"this router remembers no request {request.request_id[:64]!r}; "
                    f"it keeps the last {self._router.config.max_reports}",
                    param="request_id",
                )
            return report_message(
                report, self._router.config.router_id, self._clock.now(), self._clock.unix_ms()
            )

    async def Diagnostics(
        self,
        request: admin_pb2.DiagnosticsRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.DiagnosticsRequest, admin_pb2.DiagnosticsResponse
        ],
    ) -> admin_pb2.DiagnosticsResponse:
        """Describe this router and every worker it can reach; secrets are redacted."""
        async with _answering(context):
            files = {f"router/{name}": text for name, text in self._own_files().items()}
            workers = self._router.workers()
            for found in await asyncio.gather(*map(_worker_files(self._router), workers)):
                files.update(found)
            return admin_pb2.DiagnosticsResponse(files=_within_bounds(files))

    # -- doing -------------------------------------------------------------------------------

    async def KillRequest(
        self,
        request: admin_pb2.KillRequestRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.KillRequestRequest, admin_pb2.KillRequestResponse
        ],
    ) -> admin_pb2.KillRequestResponse:
        """End a request at its client and at its workers."""
        async with _answering(context):
            if not self._router.kill(request.request_id):
                raise RequestError(
                    "not_found",
                    f"no request {request.request_id[:64]!r} is open in this router",
                    param="request_id",
                )
            log.warning("admin.request_killed", request_id=request.request_id)
            return admin_pb2.KillRequestResponse()

    async def DrainWorker(
        self,
        request: admin_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.DrainWorkerRequest, admin_pb2.DrainWorkerResponse
        ],
    ) -> admin_pb2.DrainWorkerResponse:
        """Let a worker take no new work; its answers under way move where they can."""
        async with _answering(context):
            wait_ms = min(request.wait_ms, int(MAX_WAIT_S * 1000))
            drain = worker_pb2.DrainRequest(deadline_ms=wait_ms)
            timeout_s = CALL_TIMEOUT_S + wait_ms / 1000
            answer = await self._call(
                request.worker_id, lambda stub: stub.Drain(drain, timeout=timeout_s)
            )
            log.warning("admin.worker_drained", worker=request.worker_id)
            return admin_pb2.DrainWorkerResponse(requests_open=answer.requests_open)

    async def UndrainWorker(
        self,
        request: admin_pb2.UndrainWorkerRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.UndrainWorkerRequest, admin_pb2.UndrainWorkerResponse
        ],
    ) -> admin_pb2.UndrainWorkerResponse:
        """Let a worker take work again."""
        async with _answering(context):
            undrain = worker_pb2.UndrainRequest()
            await self._call(
                request.worker_id, lambda stub: stub.Undrain(undrain, timeout=CALL_TIMEOUT_S)
            )
            log.warning("admin.worker_undrained", worker=request.worker_id)
            return admin_pb2.UndrainWorkerResponse()

    async def SetWorkerRole(
        self,
        request: admin_pb2.SetWorkerRoleRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.SetWorkerRoleRequest, admin_pb2.SetWorkerRoleResponse
        ],
    ) -> admin_pb2.SetWorkerRoleResponse:
        """Move a worker to the other pool: it drains, changes, and takes work again."""
        async with _answering(context):
            if not request.role:
                raise RequestError("invalid_argument", "role is missing", param="role")
            wait_s = request.drain_ms / 1000 or DEFAULT_ROLE_DRAIN_S
            wait_s = min(wait_s, MAX_WAIT_S)
            change = worker_pb2.SetRoleRequest(pool=request.role, drain_ms=round(wait_s * 1000))
            timeout_s = CALL_TIMEOUT_S + wait_s
            answer = await self._call(
                request.worker_id, lambda stub: stub.SetRole(change, timeout=timeout_s)
            )
            log.warning("admin.role_changed", worker=request.worker_id, role=request.role)
            return admin_pb2.SetWorkerRoleResponse(weights=answer.role)

    async def FlushCache(
        self,
        request: admin_pb2.FlushCacheRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.FlushCacheRequest, admin_pb2.FlushCacheResponse
        ],
    ) -> admin_pb2.FlushCacheResponse:
        """Have a worker forget the prefixes that no request uses."""
        async with _answering(context):
            # The worker gives its engine as long as that itself.
            timeout_s = 2 * CALL_TIMEOUT_S
            drop = worker_pb2.DropCacheRequest()
            answer = await self._call(
                request.worker_id, lambda stub: stub.DropCache(drop, timeout=timeout_s)
            )
            log.warning("admin.cache_flushed", worker=request.worker_id)
            return admin_pb2.FlushCacheResponse(
                blocks_dropped=answer.blocks_dropped, blocks_kept=answer.blocks_kept
            )

    async def SetLogLevel(
        self,
        request: admin_pb2.SetLogLevelRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.SetLogLevelRequest, admin_pb2.SetLogLevelResponse
        ],
    ) -> admin_pb2.SetLogLevelResponse:
        """Have this router or one worker write more or less to its log."""
        async with _answering(context):
            if request.level not in LOG_LEVELS:
                levels = ", ".join(LOG_LEVELS)
                raise RequestError(
                    "invalid_argument", f"level must be one of {levels}", param="level"
                )
            if not request.worker_id:
                previous = set_log_level(request.level)
                log.warning("process.log_level", level=request.level, previous=previous)
                return admin_pb2.SetLogLevelResponse(previous=previous)
            level = worker_pb2.LogLevelRequest(level=request.level)
            answer = await self._call(
                request.worker_id, lambda stub: stub.LogLevel(level, timeout=CALL_TIMEOUT_S)
            )
            return admin_pb2.SetLogLevelResponse(previous=answer.previous)

    async def GetTraffic(
        self,
        request: admin_pb2.GetTrafficRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.GetTrafficRequest, admin_pb2.GetTrafficResponse
        ],
    ) -> admin_pb2.GetTrafficResponse:
        """Return the traffic rules in force and the names they make."""
        table, served = self._traffic.table(), self._router.served_models()
        names = [
            admin_pb2.ModelName(
                name=name, weights_digest=resolve(table, name, b"", served).weights_digest
            )
            for name in names_of(table, served)
        ]
        return admin_pb2.GetTrafficResponse(
            table=table.model_dump_json(), source=self._traffic.source, names=names
        )

    async def SetTraffic(
        self,
        request: admin_pb2.SetTrafficRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.SetTrafficRequest, admin_pb2.SetTrafficResponse
        ],
    ) -> admin_pb2.SetTrafficResponse:
        """Put traffic rules in force in this process, until its file changes."""
        async with _answering(context):
            try:
                table = parse_table(request.table, "table") if request.table else None
            except ConfigError as error:
                raise RequestError("invalid_argument", str(error), param="table") from None
            self._traffic.set(table)
            log.warning("admin.traffic_set", source=self._traffic.source)
            return admin_pb2.SetTrafficResponse()

    # -- inside ------------------------------------------------------------------------------

    def _status(self) -> admin_pb2.ClusterStatusResponse:
        router = self._router
        is_degraded, reason = router.is_degraded
        workers = router.workers()
        return admin_pb2.ClusterStatusResponse(
            router_id=router.config.router_id,
            model=router.served_models()[0].name,
            models=[model.name for model in router.served_models()],
            processes=self._config.processes,
            workers=[worker_message(worker, self._config.lease_ms) for worker in workers],
            requests_open=router.num_open,
            degraded=is_degraded,
            degraded_reason=reason,
            totals=totals_message(router.totals(), self._clock.now() - self._started),
            recent=latencies_message(router.latencies()),
            autoscaler=autoscaler_message(self._config.scaling()),
        )

    def _requests(self) -> admin_pb2.ListRequestsResponse:
        now = self._clock.now()
        return admin_pb2.ListRequestsResponse(
            router_id=self._router.config.router_id,
            requests=[running_message(request, now) for request in self._router.running()],
            processes=self._config.processes,
        )

    def _own_files(self) -> dict[str, bytes]:
        router_id = self._router.config.router_id
        now, unix_ms = self._clock.now(), self._clock.unix_ms()
        reports = [
            MessageToDict(report_message(report, router_id, now, unix_ms))
            for report in self._router.newest_reports(NUM_DECISIONS)
        ]
        return {
            **self._config.describe(),
            "status.json": json_file(MessageToDict(self._status())),
            "requests.json": json_file(MessageToDict(self._requests())),
            "decisions.json": json_file(reports),
        }

    async def _call(
        self,
        worker_id: str,
        call: Callable[[worker_pb2_grpc.WorkerAsyncStub], Awaitable[Answer]],
    ) -> Answer:
        workers = self._router.workers()
        worker = next((w for w in workers if w.worker_id == worker_id), None)
        if worker is None:
            known = ", ".join(w.worker_id for w in workers) or "none"
            raise RequestError(
                "not_found",
                f"this router knows no worker {worker_id[:64]!r}; known: {known}",
                param="worker_id",
            )
        return await call_worker(worker, self._router.config.link, call)


def _worker_files(router: ModelSet) -> Callable[[WorkerView], Awaitable[dict[str, bytes]]]:
    async def ask(worker: WorkerView) -> dict[str, bytes]:
        """Say why where a worker does not answer: that is what a bundle is made for."""
        folder = f"workers/{worker.worker_id}"
        diagnose = worker_pb2.DiagnoseRequest()
        try:
            answer = await call_worker(
                worker,
                router.config.link,
                lambda stub: stub.Diagnose(diagnose, timeout=CALL_TIMEOUT_S),
            )
        except RequestError as error:
            return {f"{folder}/error.txt": f"{error.spec.code}: {error.message}\n".encode()}
        return {f"{folder}/{file.name}": file.content for file in answer.files}

    return ask


def _within_bounds(files: Mapping[str, bytes]) -> list[worker_pb2.DiagnosticFile]:
    """Leave out what has no room, by name."""
    taken: list[worker_pb2.DiagnosticFile] = []
    left_out: list[str] = []
    room = MAX_BUNDLE_BYTES
    for name, content in files.items():
        if len(content) > room:
            left_out.append(name)
            continue
        room -= len(content)
        taken.append(worker_pb2.DiagnosticFile(name=name, content=content))
    if left_out:
        names = "\n".join(left_out) + "\n"
        taken.append(worker_pb2.DiagnosticFile(name="left_out.txt", content=names.encode()))
    return taken


@asynccontextmanager
async def _answering(context: AnyContext) -> AsyncIterator[None]:
    """End the call with the status of an error that comes out of the block."""
    try:
        yield
    except IsthmusError as error:
        await abort(context, error)
    except Exception:  # outermost for one call; grpc would tell the client what was raised
        request_id = new_request_id()
        log.exception("admin.failed", request_id=request_id)
        await abort(context, internal_error(request_id))
