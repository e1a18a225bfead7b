"""The Worker gRPC service: Link streams, status, drain, role."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc

from services.common.clock import Clock
from services.common.errors import RequestError
from services.pb import worker_pb2, worker_pb2_grpc
from services.telemetry.logs import LOG_LEVELS, get_logger, set_log_level
from services.worker.operations import WorkerOperations
from services.worker.outputs import add_outputs
from services.worker.session import Outgoing, RouterSession
from services.worker.shell import WorkerShell

PROTO_MIN, PROTO_MAX = 1, 1
ATTACH_TIMEOUT_S = 5.0
LOAD_INTERVAL_S = 0.1  # piggy-backed at most this often
HEARTBEAT_S = 0.5  # and sent at least this often
MIGRATE_TIMEOUT_S = 5.0  # the running step, mostly
DROP_CACHE_TIMEOUT_S = 5.0  # the same
DEFAULT_POOL_DRAIN_S = 30.0

log = get_logger(__name__)

# What grpc.aio calls a servicer context; its stubs are generic over both message types.
# Any: request and response types of whichever RPC.
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
LinkContext = grpc.aio.ServicerContext[worker_pb2.RouterFrame, worker_pb2.WorkerFrame]


@dataclass(frozen=True, slots=True)
class StaticStatus:
    """What Status reports and the shell does not know."""

    device: str
    kernel_path: str
    verify_digest: str
    slot: Callable[[], int]
    metrics_port: Callable[[], int] = lambda: 0  # of /metrics; 0 = not served
    # Files of a diagnostics bundle; to be called on the event loop.
    diagnose: Callable[[], Mapping[str, bytes]] = dict


class _Outbox:
    """Outputs waiting for one Link's writer; bounded by the sessions' unacknowledged tokens."""

    def __init__(self) -> None:
        self._items: list[Outgoing] = []
        self._pong_ns = 0
        self.is_closed = False
        self.is_ending = False
        self.wake = asyncio.Event()

    def send(self, items: Sequence[Outgoing]) -> None:
        self._items.extend(items)
        self.wake.set()

    def pong(self, ping_ns: int) -> None:
        self._pong_ns = ping_ns
        self.wake.set()

    def close(self) -> None:
        self.is_closed = True
        self.wake.set()

    def end(self) -> None:
        """Have the writer close the stream behind what is waiting."""
        self.is_ending = True
        self.wake.set()

    def take(self) -> list[Outgoing]:
        self.wake.clear()
        items, self._items = self._items, []
        return items

    def take_pong(self) -> int:
        pong_ns, self._pong_ns = self._pong_ns, 0
        return pong_ns


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Thin: frames in, frames out; decisions live in the shell and the session."""

    def __init__(
        self,
        shell: WorkerShell,
        status: StaticStatus,
        clock: Clock,
        operations: WorkerOperations,
    ) -> None:
        self._shell = shell
        self._operations = operations
        self._status = status
        self._clock = clock
        self._outboxes: set[_Outbox] = set()  # of the Links that are up

    async def Link(
        self, request_iterator: AsyncIterator[worker_pb2.RouterFrame], context: LinkContext
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        """Serve one router until the stream breaks."""
        attach = await self._first_frame(request_iterator, context)
        outbox = _Outbox()
        session, lost = self._shell.attach(attach, outbox.send)
        self._outboxes.add(outbox)
        reader = asyncio.create_task(self._read(request_iterator, session, outbox))
        try:
            async for frame in self._frames(outbox, lost, with_rows=attach.reads_rows):
                yield frame
        finally:
            self._outboxes.discard(outbox)
            self._shell.detach(session, outbox.send)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def end_links(self) -> None:
        """Close every stream behind its last frame: routers are told, not cut off."""
        for outbox in self._outboxes:
            outbox.end()

    async def _first_frame(
        self, frames: AsyncIterator[worker_pb2.RouterFrame], context: LinkContext
    ) -> worker_pb2.Attach:
        try:
            first = await asyncio.wait_for(anext(aiter(frames)), ATTACH_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Attach frame")
        attach = first.attach
        if not first.HasField("attach") or attach.router_incarnation == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be Attach")
        if attach.proto_min > PROTO_MAX or attach.proto_max < PROTO_MIN:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol {attach.proto_min}..{attach.proto_max} of the router and "
                f"{PROTO_MIN}..{PROTO_MAX} of this worker do not overlap",
            )
        return attach

    async def _read(
        self,
        frames: AsyncIterator[worker_pb2.RouterFrame],
        session: RouterSession,
        outbox: _Outbox,
    ) -> None:
        try:
            async for frame in frames:
                self._shell.handle(session, frame)
                if frame.ping_ns:
                    outbox.pong(frame.ping_ns)
        except Exception as error:
            # A fault of ours in one frame must not leave the router on a half-dead Link.
            log.error("worker.link_failed", error=type(error).__name__, message=str(error))
        finally:
            outbox.close()

    async def _frames(
        self, outbox: _Outbox, lost: Sequence[int], *, with_rows: bool
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        """Yield Welcome, then what is in the outbox: all that came meanwhile in one frame."""
        seq = 1
        load_sent = self._clock.now()
        yield worker_pb2.WorkerFrame(
            seq=seq,
            welcome=self._shell.welcome(PROTO_MAX, lost),
            load=self._shell.load_message(),
        )
        while True:
            # The heartbeat must go out without traffic, hence the time-out.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(outbox.wake.wait(), HEARTBEAT_S)
            if outbox.is_closed:
                return
            is_ending = outbox.is_ending
            seq += 1
            frame = worker_pb2.WorkerFrame(seq=seq, pong_ns=outbox.take_pong())
            worker_id = self._shell.identity.worker_id
            add_outputs(frame, outbox.take(), worker_id, with_rows=with_rows)
            now = self._clock.now()
            if is_ending or now - load_sent >= LOAD_INTERVAL_S:
                frame.load.CopyFrom(self._shell.load_message())
                load_sent = now
            yield frame
            if is_ending:
                return

    async def Status(
        self,
        request: worker_pb2.StatusRequest,
        context: grpc.aio.ServicerContext[worker_pb2.StatusRequest, worker_pb2.StatusResponse],
    ) -> worker_pb2.StatusResponse:
        """Report exact counters; leak tests read them here."""
        shell, load = self._shell, self._shell.engine.load()
        gens = shell.slot_gens()
        return worker_pb2.StatusResponse(
            worker_id=shell.identity.worker_id,
            incarnation=shell.identity.incarnation,
            slot=self._status.slot(),
            slot_gen=gens[0] if gens else 0,
            role=shell.role.weights,
            state=shell.role.state,
            model=shell.identity.manifest.name,
            kv_identity_fp=shell.identity.kv_identity_fp,
            load=shell.load_message(),
            blocks_total=load.blocks_total,
            blocks_in_use=load.blocks_in_use,
            blocks_cached=load.blocks_cached,
            blocks_free=load.blocks_free,
            transfers_open=shell.source.num_open() + shell.sink.num_open(),
            requests_open=load.requests_open,
            planes=shell.sink.planes(),
            device=self._status.device,
            kernel_path=self._status.kernel_path,
            steps=load.steps,
            preemptions=load.preemptions,
            verify_digest=self._status.verify_digest,
            pid=os.getpid(),
            metrics_port=self._status.metrics_port(),
            prefill_tokens=load.prefill_tokens,
            decode_tokens=load.decode_tokens,
            busy_us=round(load.busy_s * 1e6),
        )

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> worker_pb2.DrainResponse:
        """Refuse new work and wait, within the deadline, until what is open has ended."""
        await self._operations.drain(request.deadline_ms / 1000)
        return worker_pb2.DrainResponse(requests_open=self._shell.engine.load().requests_open)

    async def Undrain(
        self,
        request: worker_pb2.UndrainRequest,
        context: grpc.aio.ServicerContext[worker_pb2.UndrainRequest, worker_pb2.UndrainResponse],
    ) -> worker_pb2.UndrainResponse:
        """Take new work again."""
        try:
            self._operations.undrain()
        except RequestError as error:
            await _abort(context, error)
        return worker_pb2.UndrainResponse()

    async def SetRole(
        self,
        request: worker_pb2.SetRoleRequest,
        context: grpc.aio.ServicerContext[worker_pb2.SetRoleRequest, worker_pb2.SetRoleResponse],
    ) -> worker_pb2.SetRoleResponse:
        """Change the shares of the step budget, or the pool; nothing restarts."""
        if request.pool:
            drain_s = request.drain_ms / 1000 or DEFAULT_POOL_DRAIN_S
            try:
                await self._operations.join_pool(request.pool, drain_s)
            except RequestError as error:
                await _abort(context, error)
            return worker_pb2.SetRoleResponse(role=self._shell.role.weights)
        role = request.role
        in_range = 0 <= role.prefill <= 1 and 0 <= role.decode <= 1
        if not in_range or role.prefill + role.decode <= 0:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "role weights must be in [0, 1] and not both 0"
            )
        self._shell.set_role(role.prefill, role.decode)
        return worker_pb2.SetRoleResponse(role=self._shell.role.weights)

    async def Migrate(
        self,
        request: worker_pb2.MigrateRequest,
        context: grpc.aio.ServicerContext[worker_pb2.MigrateRequest, worker_pb2.MigrateResponse],
    ) -> worker_pb2.MigrateResponse:
        """Offer a decoding request's KV to another worker; its router passes the ticket on."""
        try:
            ticket = await self._shell.migrate(
                request.router_incarnation, request.request, MIGRATE_TIMEOUT_S
            )
        except RequestError as error:
            found = error.spec.code == "not_found"
            code = grpc.StatusCode.NOT_FOUND if found else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the engine did not answer")
        return worker_pb2.MigrateResponse(ticket=ticket)

    async def Reload(
        self,
        request: worker_pb2.ReloadRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReloadRequest, worker_pb2.ReloadResponse],
    ) -> worker_pb2.ReloadResponse:
        """Refuse: weights are loaded at start only."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "hot reload of weights is not built yet")

    async def DropCache(
        self,
        request: worker_pb2.DropCacheRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.DropCacheRequest, worker_pb2.DropCacheResponse
        ],
    ) -> worker_pb2.DropCacheResponse:
        """Forget the prefixes that no request uses."""
        answer = asyncio.wrap_future(self._shell.engine.drop_cache())
        try:
            dropped, kept = await asyncio.wait_for(answer, DROP_CACHE_TIMEOUT_S)
        except TimeoutError:
            await _abort(
                context, RequestError("deadline_exceeded", "the engine did not come to it")
            )
        log.info("worker.cache_dropped", blocks_dropped=dropped, blocks_kept=kept)
        return worker_pb2.DropCacheResponse(blocks_dropped=dropped, blocks_kept=kept)

    async def LogLevel(
        self,
        request: worker_pb2.LogLevelRequest,
        context: grpc.aio.ServicerContext[worker_pb2.LogLevelRequest, worker_pb2.LogLevelResponse],
    ) -> worker_pb2.LogLevelResponse:
        """Write more or less to the log from now on."""
        if request.level not in LOG_LEVELS:
            message = f"level must be one of {', '.join(LOG_LEVELS)}"
            await _abort(context, RequestError("invalid_argument", message, param="level"))
        previous = set_log_level(request.level)
        log.warning("process.log_level", level=request.level, previous=previous)
        return worker_pb2.LogLevelResponse(previous=previous)

    async def Diagnose(
        self,
        request: worker_pb2.DiagnoseRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DiagnoseRequest, worker_pb2.DiagnoseResponse],
    ) -> worker_pb2.DiagnoseResponse:
        """Describe this process for a diagnostics bundle."""
        return worker_pb2.DiagnoseResponse(
            files=[
                worker_pb2.DiagnosticFile(name=name, content=content)
                for name, content in self._status.diagnose().items()
            ]
        )


async def _abort(context: AnyContext, error: RequestError) -> NoReturn:
    """End an RPC with the error's status; the details begin with its code."""
    status = grpc.StatusCode[error.spec.grpc_status]
    await context.abort(status, f"{error.spec.code}: {error.message}")
    raise AssertionError("abort returned")
