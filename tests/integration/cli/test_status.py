"""`isthmus status` against a real channel."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from concurrent import futures
from contextlib import ExitStack

import grpc
import pytest

from services.cli import exits
from services.cli.main import run
from services.cli.status import FROZEN, UNREACHABLE, ask_workers
from services.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.integration


class LoadingRouter(admin_pb2_grpc.AdminServicer):
    """A router that has seen no worker yet."""

    def ClusterStatus(
        self, request: admin_pb2.ClusterStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ClusterStatusResponse:
        return admin_pb2.ClusterStatusResponse(model="toy", router_id="router-0")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_cluster_without_workers_is_no_success(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    loading = LoadingRouter()  # type: ignore[abstract]  # only this one is called
    admin_pb2_grpc.add_AdminServicer_to_server(loading, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run(["status", "--server", f"127.0.0.1:{port}", *flags]) == exits.FAILED
    finally:
        server.stop(0).wait()
    out = capsys.readouterr().out
    if flags:
        assert json.loads(out)["workers"] == []
    else:
        assert out.splitlines()[-1] == "no workers yet (still loading?)"


class Working(worker_pb2_grpc.WorkerServicer):
    def Status(
        self, request: worker_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> worker_pb2.StatusResponse:
        return worker_pb2.StatusResponse(requests_open=3)


def test_workers_are_asked_at_once_and_frozen_ones_told_from_those_that_are_gone() -> None:
    """One after another, the first would have waited for its whole deadline."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(Working(), server)  # type: ignore[abstract]  # only Status is asked
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with ExitStack() as stack:
        stack.callback(server.stop, 0)
        # A frozen process is a port that takes connections and says nothing.
        silent, *leaving = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)
        )
        addresses = {"well": f"127.0.0.1:{port}", "frozen": _address(silent)}
        addresses |= {f"leaving-{i}": _address(listener) for i, listener in enumerate(leaving)}
        leaver = threading.Thread(target=_leave_together, args=(leaving,))
        leaver.start()
        stack.callback(leaver.join)
        answers = ask_workers(addresses, timeout_s=5.0)
    assert answers.pop("well") == worker_pb2.StatusResponse(requests_open=3)
    assert answers.pop("frozen") == FROZEN
    assert set(answers.values()) == {UNREACHABLE}


def _address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _leave_together(listeners: Sequence[socket.socket]) -> None:
    """Hang up once every one of them has been called; never, if they are called in turn."""
    called = []
    for listener in listeners:
        listener.settimeout(30)
        called.append(listener.accept()[0])
    for listener in (*listeners, *called):
        listener.close()
