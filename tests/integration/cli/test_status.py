"""`isthmus status` against a real channel."""

from __future__ import annotations

import json
from concurrent import futures

import grpc
import pytest

from services.cli import exits
from services.cli.main import run
from services.pb import admin_pb2, admin_pb2_grpc

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
    admin_pb2_grpc.add_AdminServicer_to_server(LoadingRouter(), server)
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
