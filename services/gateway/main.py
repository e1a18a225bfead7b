"""A router process from configuration to exit: both front doors over one router."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.address import join_host_port
from services.common.clock import Clock, SystemClock
from services.common.config import IsthmusConfig
from services.common.config_source import public_values
from services.common.errors import ConfigError
from services.common.model_manifest import ModelManifest, read_manifest
from services.gateway.access_setup import (
    Surroundings,
    accounting,
    auth_config,
    check_access_files,
    namespaces,
)
from services.gateway.admin_servicer import ADMIN, AdminConfig, AdminServicer
from services.gateway.config import GatewayConfig
from services.gateway.observed_router import ObservedRouter
from services.gateway.server import GatewayServer, GrpcService
from services.gateway.telemetry_hooks import TelemetryHooks
from services.gateway.trace_ids import TraceIds
from services.gateway.traffic_control import TrafficControl
from services.kv.hashing import check_reference_vector
from services.pb import admin_pb2, admin_pb2_grpc
from services.registry.limits import LimitStore
from services.registry.reader import RedisRegistryReader, reader_config
from services.registry.scaling import ScalingStore
from services.registry.schema import Keys, namespace_of
from services.registry.store_client import store_address
from services.router.config import LinkConfig, LinkTls, RouterConfig, admission_config
from services.router.dispatch import Router
from services.router.hedge import HedgeConfig
from services.router.hooks import MetricsHooks, RouterHooks
from services.router.model_set import ModelSet
from services.router.policy import PolicyConfig
from services.router.reports import RecentRequests
from services.router.scaling_link import ScalingLink
from services.runtime.open_files import ensure_open_files
from services.runtime.run import Phases, run_service
from services.runtime.tls import cluster_identity, door_identity
from services.telemetry import catalog
from services.telemetry.certificates import watch_expiry
from services.telemetry.diagnostics import process_files
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer
from services.telemetry.tracing import setup_tracing
from services.text.tokenizer import TextModel

log = get_logger(__name__)

Named = tuple[str, Path]  # the name a model is served under, empty = its own; where it is
_GC_THRESHOLD = 10_000  # new objects that are containers
_LAST_WORDS_S = 2.0  # for the doors to write the errors of requests that did not end in time


def run_router(config: IsthmusConfig, model_dir: Path, more: Sequence[Named] = ()) -> int:
    """Run until a signal; return the exit status. Models are resolved directories, `more` further.

    Raises ConfigError for a configuration no router can run with.
    """
    ensure_open_files()
    check_access_files(config.auth)
    read_manifest(model_dir, config.model.weights_digest)  # of the further ones nothing is said
    models = ((config.model.served_name, model_dir), *more)
    process = _RouterProcess(config, models, SystemClock())
    return run_service(
        Phases(process.start, process.drain, process.stop), drain_s=config.router.drain_s
    )


@dataclass(slots=True)
class _Served:
    """What this process has of one model."""

    manifest: ModelManifest
    text: TextModel
    reader: RedisRegistryReader

    @classmethod
    def load(cls, config: IsthmusConfig, named: Named, clock: Clock) -> _Served:
        """Read the text side; workers of the model register under its digest."""
        name, model_dir = named
        manifest = read_manifest(model_dir)
        if name:
            manifest = manifest.model_copy(update={"name": name})
        reader = RedisRegistryReader(
            store_address(config.store),
            namespace_of(manifest.weights_digest),
            clock,
            reader_config(config.store.call_timeout_ms / 1000),
        )
        return cls(manifest, TextModel.load(model_dir), reader)


def _routers(
    served: Sequence[_Served], config: RouterConfig, clock: Clock, hooks: RouterHooks
) -> list[Router]:
    """Make a router for every model."""
    first: dict[str, str] = {}  # name of a model by its weights
    for manifest in (model.manifest for model in served):
        if manifest.weights_digest in first:
            raise ConfigError(
                f"router.more_models: {first[manifest.weights_digest]!r} and {manifest.name!r} "
                "have the same weights; for a second name of one model write an alias in "
                "router.traffic_file"
            )
        first[manifest.weights_digest] = manifest.name
    recent = RecentRequests(config.max_reports)
    return [
        Router(config, model.manifest, model.text, model.reader, clock, hooks, recent)
        for model in served
    ]


def _scaling_store(model: _Served) -> ScalingStore:
    return ScalingStore(Keys(namespace_of(model.manifest.weights_digest)), model.reader.run)


class _RouterProcess:
    """The phases of one router process."""

    def __init__(self, config: IsthmusConfig, models: Sequence[Named], clock: Clock) -> None:
        self._config = config
        settings = config.router
        router_id = settings.router_id or f"router-{os.getpid()}"
        self._metrics = Metrics.enabled()
        self._metrics.begin(catalog.ROUTER_TOTALS)
        self._metrics.watch(catalog.ROUTER_INFO, lambda: ((1.0, {"router_id": router_id}),))
        self._metrics_server: MetricsServer | None = None
        self._tracing = setup_tracing(config.telemetry, service="router", instance=router_id)
        self._metrics.watch(catalog.SPANS_DROPPED, lambda: self._tracing.num_dropped)
        served = [_Served.load(config, named, clock) for named in models]
        first, more = served[0], served[1:]
        self._readers = [model.reader for model in served]
        names = namespaces(config.auth)
        store = LimitStore(router_id, first.reader.run)
        around = Surroundings(router_id, store, self._metrics, clock)
        doors = door_identity(config.tls, clock)
        identity = cluster_identity(config.tls, clock)
        in_use = {"doors": doors, "cluster": identity}
        watch_expiry(self._metrics, clock, {use: tls.expires for use, tls in in_use.items() if tls})
        traffic = TrafficControl(
            Path(settings.traffic_file) if settings.traffic_file else None, clock
        )
        routers = _routers(
            served,
            RouterConfig(
                router_id=router_id,
                force_mode=settings.force_mode or None,
                max_open_requests=settings.max_requests,
                max_losses=settings.max_losses,
                hedge=HedgeConfig(enabled=settings.hedge_prefill),
                max_reports=settings.max_reports,
                admission=admission_config(config.admission),
                link=LinkConfig(
                    tls=LinkTls(identity, config.tls.worker_name) if identity else None,
                    allow_plaintext=config.auth.allow_plaintext,
                ),
                policy=PolicyConfig(bypass_tokens=settings.bypass_tokens),
            ),
            clock,
            MetricsHooks(self._metrics),
        )
        self._router = ModelSet(routers)
        self._scaling = [
            ScalingLink(router, _scaling_store(model), clock)
            for router, model in zip(routers, served, strict=True)
        ]
        admin = AdminServicer(
            self._router,
            clock,
            AdminConfig(
                lease_ms=config.lease.worker_lease_ms,
                describe=lambda: process_files(public_values(config), self._metrics),
                processes=settings.processes,
                traffic=traffic,
                scaling=lambda: self._scaling[0].brief,
            ),
        )
        trace_ids = TraceIds()
        self._gateway = GatewayServer(
            ObservedRouter(
                self._router, self._tracing, self._metrics, clock, trace_ids, self._router.note_gaps
            ),
            first.text,
            first.manifest,
            GatewayConfig(
                limits=config.limits,
                tls=doors,
                more_texts={model.manifest.name: model.text for model in more},
                traffic=traffic,
                max_mirrors=settings.max_mirrors,
                note_mirrored=lambda outcome: self._metrics.add(
                    catalog.MIRRORED, 1, outcome=outcome
                ),
                auth=auth_config(config),
                namespaces=names,
                accounting=accounting(config, names, around),
                shares_ports=settings.processes > 1,
                max_concurrent_streams=settings.max_concurrent_streams,
                max_connection_age_s=settings.max_connection_age_s,
            ),
            TelemetryHooks(self._metrics, trace_ids),
            clock,
            (
                GrpcService(
                    ADMIN,
                    tuple(
                        method.name
                        for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
                    ),
                    lambda server: admin_pb2_grpc.add_AdminServicer_to_server(admin, server),
                ),
            ),
        )

    async def start(self) -> None:
        """Find the workers, then open the doors; readiness follows the workers."""
        settings = self._config.router
        check_reference_vector()
        await self._router.start()
        for link in self._scaling:
            await link.start()
        ports = await self._gateway.start(
            join_host_port(settings.grpc_host, settings.grpc_port),
            join_host_port(settings.http_host, settings.http_port),
        )
        # What is loaded stays: collecting over it would stall every stream.
        gc.collect()
        gc.freeze()
        # A request makes some thousand objects and hardly a cycle.
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        log.info("router.listening", grpc_port=ports.grpc_port, http_port=ports.http_port)
        self._serve_metrics()

    def _serve_metrics(self) -> None:
        """Last of all: to whoever supervises several of us, this port means that we listen."""
        settings = self._config.router
        if settings.metrics_port is None:
            return
        server = MetricsServer(
            self._metrics,
            settings.metrics_host,
            settings.metrics_port,
            self._gateway.authenticator.may_monitor,
        )
        server.start()
        self._metrics_server = server
        log.info("router.metrics_listening", port=server.port)

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end."""
        await self._gateway.drain(self._config.router.drain_s)

    async def stop(self) -> None:
        """End what is left, with a code its clients get to see, and let go of everything."""
        await asyncio.gather(*(link.stop() for link in self._scaling))
        await self._router.stop()
        await self._gateway.stop(_LAST_WORDS_S)
        for reader in self._readers:
            await reader.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        await asyncio.to_thread(self._tracing.shutdown, 1.0)
        self._metrics.shutdown()
