"""Both front doors as one thing to start, drain and stop, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.access import GRPC_POLICY, check_policy
from services.common.address import family_of, split_host_port
from services.common.clock import Clock, SystemClock
from services.common.errors import ConfigError
from services.common.model_manifest import ModelManifest
from services.gateway.accounting import Accounting, AuditHooks
from services.gateway.auth import Authenticator
from services.gateway.config import GatewayConfig
from services.gateway.front_desk import FrontDesk
from services.gateway.grpc_auth import AuthInterceptor
from services.gateway.grpc_decode import DecodeInterceptor
from services.gateway.hooks import GatewayHooks, NoHooks
from services.gateway.http_protocol import bounded_protocol
from services.gateway.inference_servicer import InferenceServicer, add_inference
from services.gateway.openai_http import HttpDoor
from services.gateway.prepare import Preparer, TextPool
from services.gateway.reflection import V1, V1ALPHA, add_reflection
from services.gateway.traffic_control import TrafficControl
from services.pb import inference_pb2
from services.router.api import RouterPort
from services.telemetry.logs import get_logger
from services.text.tokenizer import TextModel

log = get_logger(__name__)

INFERENCE = "isthmus.v1.Inference"
_HEALTH = "grpc.health.v1.Health"
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2.0
# Statuses of ended calls still have to be written, which a busy machine does late; a call that is
# cut off has none of ours, and its client cannot tell that it may ask again.
_STATUS_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class GrpcService:
    """A further service for the gRPC server; `register` is its generated add function, bound."""

    name: str  # full name, as in the proto
    methods: tuple[str, ...]
    register: Callable[[grpc.aio.Server], None]


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """Where the doors really listen."""

    grpc_port: int
    http_port: int


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class _ByName:
    """A gRPC server to add services to, whose methods are found by name when a call comes.

    For methods registered beforehand the server keeps a task each, and waits for all of them anew
    at every call: of 20 methods that took 5 % of a request.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve these."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Leave it at that: they are the same methods again."""


class GatewayServer:
    """The front doors of one router process."""

    def __init__(
        self,
        router: RouterPort,
        text: TextModel,
        manifest: ModelManifest,
        config: GatewayConfig,
        hooks: GatewayHooks | None = None,
        clock: Clock | None = None,
        extra_services: Sequence[GrpcService] = (),
    ) -> None:
        if text.manifest.weights_digest != manifest.weights_digest:
            raise ConfigError("the tokenizer and the manifest are of different models")
        clock = clock or SystemClock()
        self._accounting = config.accounting or Accounting.none(clock)
        hooks = hooks or NoHooks()
        if self._accounting.audit is not None:
            hooks = AuditHooks(hooks, self._accounting.audit, clock)
        self._hooks: GatewayHooks = hooks
        self._config = config
        self._extra_services = tuple(extra_services)
        self._pool = TextPool(config.text_threads, config.max_text_jobs)
        texts = {manifest.name: text, **config.more_texts}
        traffic = config.traffic or TrafficControl(None, clock)
        preparer = Preparer(router, texts, config.limits, self._pool, clock, traffic)
        self.desk = FrontDesk(router, preparer, config, clock, self._accounting)
        self.authenticator = Authenticator(config.auth, config.namespaces, clock)
        self.http = HttpDoor(self.desk, self._pool, self.authenticator, hooks)
        self._inference = InferenceServicer(self.desk, hooks)
        self._health = health.aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._uvicorn: _HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, grpc_address: str, http_address: str) -> BoundPorts:
        """Listen on host:port addresses (port 0 = any free one) and give the real ports."""
        await self._set_health(is_ready=False)
        http_socket = _listen(http_address, is_shared=self._config.shares_ports)
        try:
            grpc_port = await self._start_grpc(grpc_address)
            await self._start_http(http_socket)
        except BaseException:
            http_socket.close()
            await self.stop(0.0)
            raise
        self._accounting.start()
        self._tasks.append(asyncio.create_task(self._watch_readiness()))
        return BoundPorts(grpc_port, http_socket.getsockname()[1])

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones. False if some still run."""
        self.desk.start_draining()
        await self._set_health(is_ready=False)
        return await self.desk.wait_idle(timeout_s)

    async def stop(self, drain_s: float) -> bool:
        """Drain, then close. False if some requests were cut off."""
        is_drained = await self.drain(drain_s)
        await self.desk.close()
        if self._grpc is not None:
            await self._grpc.stop(_STATUS_GRACE_S if is_drained else 0.0)
        await self._stop_http()
        self._pool.close()
        await self._accounting.stop()
        return is_drained

    @property
    def grpc_methods(self) -> tuple[str, ...]:
        """Every RPC this server has, as /service/Method."""
        services = [_HEALTH, V1, V1ALPHA, INFERENCE]
        names = {
            _HEALTH: ("Check", "Watch"),
            V1: ("ServerReflectionInfo",),
            V1ALPHA: ("ServerReflectionInfo",),
            INFERENCE: tuple(
                method.name
                for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
            ),
        }
        names |= {service.name: service.methods for service in self._extra_services}
        services += [service.name for service in self._extra_services]
        return tuple(f"/{service}/{method}" for service in services for method in names[service])

    async def _start_grpc(self, address: str) -> int:
        check_policy(GRPC_POLICY, self.grpc_methods)
        server = grpc.aio.server(
            interceptors=(
                AuthInterceptor(self.authenticator, self._hooks, self.desk.clock),
                DecodeInterceptor(),
            ),
            options=self._grpc_options(),
        )
        self._grpc = server
        by_name = cast("grpc.aio.Server", _ByName(server))
        add_inference(self._inference, by_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, by_name)
        for service in self._extra_services:
            service.register(by_name)
        add_reflection(
            server, (INFERENCE, _HEALTH, *(service.name for service in self._extra_services))
        )
        try:
            tls = self._config.tls
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, tls.server_credentials())
        except RuntimeError:
            raise ConfigError(f"cannot listen on {address} for gRPC (router.grpc_port)") from None
        await server.start()
        return port

    def _grpc_options(self) -> list[tuple[str, int]]:
        config = self._config
        return [
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", config.max_message_bytes),
            ("grpc.max_concurrent_streams", config.max_concurrent_streams),
            ("grpc.max_connection_age_ms", _ms(config.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(config.max_connection_age_grace_s)),
            # gRPC bounds no number of connections: those nobody uses must not pile up.
            ("grpc.server_handshake_timeout_ms", _ms(config.grpc_handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", _ms(config.grpc_idle_timeout_s)),
            # Long silent calls are normal here (a queued request), so clients may ping often.
            ("grpc.keepalive_permit_without_calls", 1),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                _ms(config.min_client_ping_interval_s),
            ),
            # Find clients that vanished without closing.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            # A second router on the port must fail, not share it, unless that is meant.
            ("grpc.so_reuseport", int(config.shares_ports)),
        ]

    async def _start_http(self, listener: socket.socket) -> None:
        tls = self._config.tls
        config = uvicorn.Config(
            self.http.app,
            http=bounded_protocol(self._config),
            ws="none",
            lifespan="off",
            log_config=None,
            # It warns of every line that is no HTTP: anybody could fill the disk with that.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            interface="asgi3",
            timeout_keep_alive=self._config.http_keep_alive_s,
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if tls is None else lambda *_: tls.server_context(),
        )
        server = _HttpServer(config)
        self._uvicorn = server
        task = asyncio.create_task(server.serve(sockets=[listener]))
        self._tasks.append(task)
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not server.started:
                if task.done():
                    await task
                    raise ConfigError("the HTTP server ended while it started")
                await asyncio.sleep(0.005)

    async def _stop_http(self) -> None:
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        for task in self._tasks[1:]:
            task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _watch_readiness(self) -> None:
        was_ready = False
        while True:
            is_ready = self._look_ready()
            if is_ready is not was_ready:
                await self._set_health(is_ready=is_ready)
                was_ready = is_ready
            await asyncio.sleep(self._config.health_poll_s)

    def _look_ready(self) -> bool:
        try:
            return self.desk.is_ready()[0]
        except Exception:  # outermost loop: a fault in a look must not freeze the health status
            log.exception("gateway.readiness_failed")
            return False

    async def _set_health(self, *, is_ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", INFERENCE, "readiness"):
            await self._health.set(name, status)
        # Who answers at all lives: a router that drains or finds no workers must not be killed.
        await self._health.set("liveness", serving)


def _listen(address: str, *, is_shared: bool = False) -> socket.socket:
    try:
        host, port = split_host_port(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    listener = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it. Without it a head and its body, written apart, wait 40 ms for
        # the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {address} for HTTP (router.http_port): {error}"
        ) from None
    listener.setblocking(False)
    return listener


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
