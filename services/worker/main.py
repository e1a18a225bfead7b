"""A worker process from configuration to exit: load, warm up, register, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.address import join_host_port
from services.common.clock import Clock, SystemClock
from services.common.config import IsthmusConfig
from services.common.config_source import public_values
from services.common.errors import ConfigError, ModelFileError
from services.common.ids import Incarnation, WorkerId, new_incarnation
from services.common.model_manifest import read_manifest
from services.decode.admission import AdmissionLimits
from services.engine.api import CacheDelta
from services.engine.config import EngineConfig
from services.engine.loop import EngineLoop
from services.engine.scheduler import Scheduler
from services.kv.attached import PoolBases
from services.kv.block_pool import BlockPool
from services.kv.hashing import HASH_SCHEME, check_reference_vector
from services.kv.layout import KvIdentity, KvLayout
from services.kv.memory import KvPoolMemory
from services.models.catalog import resolve
from services.models.resolved import identity as kv_identity
from services.pb import worker_pb2_grpc
from services.registry.base import WorkerInfo
from services.registry.lease import LeaseConfig, WorkerLease
from services.registry.schema import namespace_of
from services.registry.store_client import store_address
from services.runtime.fault_points import FaultPoints
from services.runtime.open_files import ensure_open_files
from services.runtime.run import Leash, Phases, run_service
from services.runtime.runtime_dir import RuntimeDir
from services.runtime.tls import TlsIdentity, cluster_identity
from services.telemetry.certificates import watch_expiry
from services.telemetry.diagnostics import process_files
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer, probes_of
from services.telemetry.tracing import Tracing, setup_tracing
from services.telemetry.vitals import Reading, Verdict, Vitals
from services.transfer.config import TransferConfig
from services.transfer.device import Device
from services.transfer.end_parts import EndParts, ListenAt
from services.transfer.sink import TransferSink
from services.transfer.source import TransferSource
from services.worker.backend import Backend, LoadBackend
from services.worker.convert import load_report
from services.worker.intake import WorkerIdentity
from services.worker.memory_plan import MemoryPlan, plan_memory
from services.worker.metrics import Total, count_step, watch_gauges, worker_totals
from services.worker.operations import ROLE_WEIGHTS, WorkerOperations
from services.worker.peer_auth import PeerAuth, scrape_guard
from services.worker.servicer import StaticStatus, WorkerServicer
from services.worker.shell import WorkerShell
from services.worker.trace import WorkTracer

MAX_MESSAGE_BYTES = 16 << 20
HOUSEKEEPING_S = 0.1
WARM_UP_TIMEOUT_S = 120.0
STOP_THREADS_S = 3.0
STOP_LINKS_S = 0.5

READINESS = "readiness"  # names of the standard health service
LIVENESS = "liveness"
_STATUS = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}

log = get_logger(__name__)

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Routers ping silent Links every second or so; the default server calls that an attack.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(slots=True)
class Parts:
    """Everything a running worker is made of."""

    shell: WorkerShell
    servicer: WorkerServicer
    operations: WorkerOperations
    engine: EngineLoop
    memory: KvPoolMemory
    lease: WorkerLease
    tracing: Tracing
    metrics: Metrics
    totals: tuple[Total, ...]


def run_worker(config: IsthmusConfig, load_backend: LoadBackend, leash: Leash | None = None) -> int:
    """Run until a signal or, in a process of others, the leash; return the exit status.

    Configuration errors raise ConfigError.
    """
    ensure_open_files()
    worker = _Worker(config, load_backend, SystemClock())
    try:
        return run_service(
            Phases(worker.start, worker.drain, worker.stop, worker.failed),
            drain_s=config.worker.drain_s,
            leash=leash,
        )
    finally:
        worker.remove_runtime_dir()


class _Worker:
    """The phases of one worker process."""

    def __init__(self, config: IsthmusConfig, load_backend: LoadBackend, clock: Clock) -> None:
        self._config = config
        self._load_backend = load_backend
        self._clock = clock
        self._runtime: RuntimeDir | None = None
        self._parts: Parts | None = None
        self._server: grpc.aio.Server | None = None
        self._identity: TlsIdentity | None = None
        self._health = health.aio.HealthServicer()
        self._housekeeper: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None
        self._vitals = Vitals()
        self._told: tuple[Verdict, Verdict] | None = None
        self._has_joined = False
        self._is_leaving = False

    def remove_runtime_dir(self) -> None:
        """Remove the directory this process made for itself, if it made one."""
        if self._runtime is not None:
            self._runtime.remove()

    async def start(self) -> None:
        """Bind, load in a thread, warm up, and only then serve and register."""
        server, port = self._bind()
        try:
            parts = await asyncio.to_thread(self._build, port)
        except (ConfigError, ModelFileError) as error:
            log.error("worker.cannot_start", reason=str(error))
            raise
        self._parts = parts
        self._serve_metrics(parts.metrics)
        loop = asyncio.get_running_loop()
        lease = parts.lease
        parts.shell.start(loop, lambda delta: _publish(lease, delta))
        await asyncio.wait_for(parts.shell.warm_up(), WARM_UP_TIMEOUT_S)
        worker_pb2_grpc.add_WorkerServicer_to_server(parts.servicer, server)
        await self._tell_health(parts)
        await server.start()
        lease.start()
        self._housekeeper = asyncio.create_task(self._keep_house(parts))
        # What is loaded stays: a full collection over it would stall a step for 0.2 s or more.
        gc.collect()
        gc.freeze()

    def _bind(self) -> tuple[grpc.aio.Server, int]:
        """Take the port before the slow part, so that a clash is known at once."""
        settings = self._config.worker
        identity = cluster_identity(self._config.tls, self._clock)
        guards = [] if identity is None else [PeerAuth(frozenset(self._config.tls.router_names))]
        server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=guards)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = join_host_port(settings.bind_host, settings.grpc_port)
        try:
            if identity is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, identity.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} (worker.grpc_port)") from error
        self._server, self._identity = server, identity
        return server, port

    async def _tell_health(self, parts: Parts) -> None:
        """Give probes of both kinds how things stand now; only from the event loop."""
        # A store that goes away later makes no worker unfit: routers go on with what they know.
        self._has_joined = self._has_joined or parts.lease.is_registered
        now = self._clock.now()
        self._vitals.tell(Reading(now, _why_dead(parts), self._why_not_ready(parts)))
        ready, live = self._vitals.is_ready(now), self._vitals.is_live(now)
        if (ready, live) == self._told:
            return
        self._told = ready, live
        log.info("worker.health", ready=ready.is_good, live=live.is_good, reason=ready.reason)
        for name in ("", "isthmus.v1.Worker", READINESS):
            await self._health.set(name, _STATUS[ready.is_good])
        await self._health.set(LIVENESS, _STATUS[live.is_good])

    def _why_not_ready(self, parts: Parts) -> str:
        if self._is_leaving or parts.shell.is_draining:
            return "draining"
        return "" if self._has_joined else "the store has not been reached yet"

    # -- building (a thread of its own: loading weights takes seconds) ------------------------

    def _build(self, port: int) -> Parts:
        config, settings = self._config, self._config.worker
        check_reference_vector()
        cache_dir = Path(config.model.cache_dir) if config.model.cache_dir else None
        model_dir = resolve(config.model.name, cache_dir)
        backend = self._load_backend(config, model_dir)
        worker_id = WorkerId(settings.worker_id or f"{settings.role}-{os.getpid()}")
        incarnation = new_incarnation()
        return self._assemble(backend, model_dir, worker_id, incarnation, port)

    def _assemble(
        self,
        backend: Backend,
        model_dir: Path,
        worker_id: WorkerId,
        incarnation: Incarnation,
        port: int,
    ) -> Parts:
        settings = self._config.worker
        manifest = read_manifest(model_dir, self._config.model.weights_digest)
        layout = KvLayout(
            manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, settings.dtype
        )
        plan = self._plan(layout, manifest.context_length)
        identity = kv_identity(manifest, hash_scheme=HASH_SCHEME)
        memory = KvPoolMemory.create(layout, plan.num_blocks)
        pool = BlockPool(plan.num_blocks, memory.gens)
        prefill, decode = ROLE_WEIGHTS[settings.role]
        engine_config = EngineConfig(
            model_digest=manifest.weights_digest,
            vocab_size=manifest.vocab_size,
            eos_token_ids=manifest.eos_token_ids,
            max_model_len=plan.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_step_tokens=max(settings.max_step_tokens, settings.max_num_seqs + 16),
            chunk_target_s=settings.chunk_target_ms / 1000,
            chunk_target_alone_s=settings.chunk_target_alone_ms / 1000,
            max_open_requests=settings.max_requests,
            prefill_weight=prefill,
            decode_weight=decode,
            attach_move_after_tokens=self._config.transfer.attach_move_after_tokens,
            attach_move_blocks=self._config.transfer.attach_move_blocks,
        )
        content, executor = backend.attach(memory, manifest)
        tracing = setup_tracing(self._config.telemetry, service="worker", instance=worker_id)
        metrics = Metrics.enabled()
        engine = EngineLoop(
            Scheduler(engine_config, pool, content),
            executor,
            self._clock,
            lambda plan, result: count_step(metrics, plan, result),
        )
        source, sink = self._transfer_ends(memory, identity, worker_id, incarnation, backend.device)
        shell = WorkerShell(
            WorkerIdentity(worker_id, incarnation, manifest, identity.fingerprint),
            engine,
            source,
            sink,
            self._clock,
            WorkTracer(tracing, metrics, self._clock),
            AdmissionLimits(max_requests=settings.max_requests, request=self._config.limits),
        )
        shell.set_initial_role(prefill, decode)
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            address=join_host_port(settings.advertise_host or settings.bind_host, port),
            role=settings.role,
            model=manifest.name,
            kv_identity_fp=identity.fingerprint,
            identity_fields=identity.fields(),
            weights_digest=manifest.weights_digest,
            block_size=layout.block_size,
            max_model_len=plan.max_model_len,
            started_unix_ms=self._clock.unix_ms(),
        )
        lease = self._lease(info, engine)
        shell.slot_gens = lambda: lease.slot_gens
        status = StaticStatus(
            device=settings.device,
            kernel_path=backend.kernel_path,
            verify_digest=self._config.transfer.verify_digest,
            slot=lambda: lease.slot or 0,
            metrics_port=self._metrics_port,
            diagnose=lambda: process_files(public_values(self._config), metrics),
        )
        operations = WorkerOperations(shell, lease, self._clock)
        servicer = WorkerServicer(shell, status, self._clock, operations)
        log.info(
            "worker.loaded",
            model=manifest.name,
            kernels=status.kernel_path,
            kv_blocks=plan.num_blocks,
            kv_tokens=plan.pool_tokens,
            kv_mib=plan.pool_bytes >> 20,
            pool_reason=plan.reason,
            machine=platform.machine(),
        )
        watch_gauges(metrics, engine, source, sink, tracing)
        if self._identity is not None:
            watch_expiry(metrics, self._clock, {"cluster": self._identity.expires})
        totals = worker_totals(engine, source, sink, lease)
        return Parts(shell, servicer, operations, engine, memory, lease, tracing, metrics, totals)

    def _plan(self, layout: KvLayout, context_length: int) -> MemoryPlan:
        return plan_memory(
            layout,
            num_blocks=self._config.worker.num_blocks,
            kv_memory_bytes=self._config.worker.kv_memory_bytes,
            available_bytes=psutil.virtual_memory().available,
            max_model_len=self._config.model.max_model_len,
            context_length=context_length,
        )

    def _transfer_ends(
        self,
        memory: KvPoolMemory,
        identity: KvIdentity,
        worker_id: WorkerId,
        incarnation: int,
        device: Device | None,
    ) -> tuple[TransferSource, TransferSink]:
        settings = self._config.transfer
        config = TransferConfig(
            planes=settings.planes,
            ticket_ttl_s=settings.ticket_ttl_ms / 1000,
            lease_s=settings.lease_ms / 1000,
            copy_threads=settings.copy_threads,
            verify_digest=settings.verify_digest,
            wire_dtype=settings.wire_dtype,
            single_shot=settings.single_shot,
            attach_max_s=settings.attach_max_ms / 1000,
            attach_pin_share=settings.attach_pin_share,
            max_transfers=settings.max_open,
            curve_key_file=settings.curve_key_file or None,
            allow_plaintext_kv=settings.allow_plaintext_kv,
        )
        faults = FaultPoints.from_environ(os.environ)
        # A pool on a device cannot be read beside a peer's on the host.
        bases = PoolBases() if self._config.worker.device == "cpu" else None
        parts = EndParts(
            memory, identity, worker_id, incarnation, self._clock, config, faults, bases, device
        )
        listen = ListenAt(
            self._config.worker.bind_host,
            self._runtime_dir(),
            settings.zmq_advertise or None,
            settings.zmq_port,
        )
        return TransferSource(parts, listen), TransferSink(parts)

    def _runtime_dir(self) -> Path:
        configured = self._config.worker.runtime_dir
        if configured:
            return Path(configured)
        self._runtime = RuntimeDir.create(os.environ)
        return self._runtime.path

    def _lease(self, info: WorkerInfo, engine: EngineLoop) -> WorkerLease:
        lease = self._config.lease
        return WorkerLease(
            store_address(self._config.store),
            namespace_of(info.weights_digest),
            info,
            lambda: load_report(engine.load()),
            engine.cached_hashes,
            self._clock,
            LeaseConfig(lease_ms=lease.worker_lease_ms, heartbeat_s=lease.heartbeat_ms / 1000),
        )

    def _metrics_port(self) -> int:
        return 0 if self._metrics_server is None else self._metrics_server.port

    def _serve_metrics(self, metrics: Metrics) -> None:
        settings = self._config.worker
        if settings.metrics_port is None:
            return
        may_read = scrape_guard(settings.metrics_token_file, self._clock)
        probes = probes_of(self._vitals, self._clock)
        server = MetricsServer(metrics, settings.bind_host, settings.metrics_port, may_read, probes)
        server.start()
        self._metrics_server = server
        log.info("worker.metrics_listening", port=server.port)

    # -- running ------------------------------------------------------------------------------

    async def _keep_house(self, parts: Parts) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            parts.shell.sweep()
            await self._tell_health(parts)
            for total in parts.totals:
                total.tell(parts.metrics)

    async def failed(self) -> str:
        """Come back when the engine has died or another process has taken this worker's name."""
        parts = self._parts
        assert parts is not None
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if why := _why_dead(parts):
                return why

    async def drain(self) -> None:
        """Leave the routers' choice, then wait for open requests and lent blocks."""
        assert self._parts is not None
        self._is_leaving = True
        await self._tell_health(self._parts)
        leaving = asyncio.create_task(self._parts.operations.leave())
        # A hung engine never empties: to wait for it until the limit would help nobody.
        failing = asyncio.create_task(self.failed())
        try:
            await asyncio.wait({leaving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await leaving
            else:
                log.error("worker.drain_given_up", reason=await failing)
        finally:
            leaving.cancel()
            failing.cancel()

    async def stop(self) -> None:
        """End what is left with a code, then free everything."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        if self._parts is not None:
            await asyncio.to_thread(self._stop_threads, self._parts)
        if self._server is not None:
            # No Link is taken from here on, and those that are up have this long to end.
            stopping = asyncio.create_task(self._server.stop(grace=STOP_LINKS_S))
            await asyncio.sleep(0)
            if self._parts is not None:
                self._parts.servicer.end_links()
            await stopping
        if self._parts is not None:
            self._parts.memory.close()

    def _stop_threads(self, parts: Parts) -> None:
        if self._metrics_server is not None:
            self._metrics_server.stop()
        parts.lease.stop()
        parts.shell.stop(STOP_THREADS_S)
        parts.tracing.shutdown(1.0)
        parts.metrics.shutdown()


def _why_dead(parts: Parts) -> str:
    if not parts.engine.is_alive():
        return "the engine thread has died or makes no progress"
    if parts.lease.is_superseded:
        return "a later process registered under this worker's name"
    return ""


def _publish(lease: WorkerLease, delta: CacheDelta) -> None:
    lease.publish(delta.added, delta.removed)
