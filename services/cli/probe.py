"""Asks a process's gRPC health service without ever waiting for the answer."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0
_INTERVAL_STARTING_S = 0.1
_INTERVAL_SERVING_S = 1.0
# A worker binds its port late in its start; the default reconnect pause grows to minutes.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class HealthProbe:
    """One channel to one process; `poll` is called often and answers what is known."""

    def __init__(self, dial: Callable[[], grpc.Channel]) -> None:
        """`dial` opens the channel, and another one when a call has failed."""
        self._dial = dial
        self._channel = dial()
        self._call: grpc.Future[health_pb2.HealthCheckResponse] | None = None
        self._next_at = 0.0
        self._is_serving: bool | None = None

    def poll(self, now: float) -> bool | None:
        """Last answer: True = SERVING, False = anything else, None = never answered yet."""
        if self._call is not None and self._call.done():
            self._is_serving = self._read(self._call)
            self._call = None
            pause = _INTERVAL_SERVING_S if self._is_serving else _INTERVAL_STARTING_S
            self._next_at = now + pause
        if self._call is None and now >= self._next_at:
            request = health_pb2.HealthCheckRequest()
            stub = health_pb2_grpc.HealthStub(self._channel)
            self._call = stub.Check.future(request, timeout=_TIMEOUT_S)
        return self._is_serving

    def _read(self, call: grpc.Future[health_pb2.HealthCheckResponse]) -> bool | None:
        try:
            answer: object = call.result(timeout=0).status
        except (grpc.RpcError, grpc.FutureCancelledError):
            # Before the first answer silence means "still starting", after it "not serving".
            if self._is_serving is None:
                return None
            self._channel.close()
            self._channel = self._dial()  # its certificate may have been rotated
            return False
        return bool(answer == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Cancel what is under way and close the channel."""
        if self._call is not None:
            self._call.cancel()
        self._channel.close()
