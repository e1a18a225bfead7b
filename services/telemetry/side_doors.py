"""Health and /metrics of a process whose work is not to answer calls."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.address import join_host_port
from services.common.errors import ConfigError
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer

_GRACE_S = 0.5


class SideDoors:
    """The standard gRPC health service, and /metrics where a port is given. In plain text."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._metrics_server: MetricsServer | None = None
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def open(self, host: str, grpc_port: int, metrics_port: int | None) -> int:
        """Listen, port 0 at any free one; return the port of the health service.

        Raises ConfigError where an address is taken.
        """
        server = self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = join_host_port(host, grpc_port)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} (--grpc-port)") from error
        await server.start()
        if metrics_port is not None:
            self._metrics_server = MetricsServer(
                self._metrics, host, metrics_port, lambda _header: True
            )
            self._metrics_server.start()
        return port

    async def say_serving(self) -> None:
        """Let the health service say SERVING."""
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close both, whether they were opened or not."""
        if self._server is not None:
            await self._server.stop(_GRACE_S)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
