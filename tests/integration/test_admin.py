"""The admin service over a router and scripted peers: requests listed, explained and ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.common.clock import SystemClock
from services.common.errors import RequestError
from services.gateway.admin_servicer import AdminConfig, AdminServicer
from services.pb import admin_pb2, admin_pb2_grpc
from services.router.config import RouterConfig
from services.router.model_set import ModelSet
from tests.support.cluster import Cluster, eventually, make_call, running_cluster
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration


@asynccontextmanager
async def admin_of(cluster: Cluster) -> AsyncIterator[admin_pb2_grpc.AdminAsyncStub]:
    """Serve the admin service of a cluster's router."""
    server = grpc.aio.server()
    servicer = AdminServicer(ModelSet([cluster.router]), SystemClock(), AdminConfig(lease_ms=2_000))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield admin_pb2_grpc.AdminStub(channel)
    finally:
        await server.stop(0)


async def explain(
    stub: admin_pb2_grpc.AdminAsyncStub, request_id: str
) -> admin_pb2.ExplainRequestResponse:
    """Ask why a request ran where it did."""
    ask = admin_pb2.ExplainRequestRequest(request_id=request_id)
    return await stub.ExplainRequest(ask, timeout=5)


async def test_ended_request_is_explained_with_all_candidates_and_its_stages(
    store_url: str,
) -> None:
    workers = [prefill("p0"), prefill("p1"), decoder("d0"), decoder("d1")]
    async with running_cluster(store_url, workers) as cluster, admin_of(cluster) as stub:
        call = make_call(request_id="asked", force_mode="REMOTE")
        timing = (await cluster.ask(call)).end.timing
        report = await explain(stub, "asked")
    assert (report.router_id, report.outcome, report.model) == ("router-0", "ok", "toy")
    assert (report.prompt_tokens, report.completion_tokens) == (100, 8)
    first, second = report.choices
    assert (first.worker_id, second.worker_id) == (timing.prefill_worker, timing.decode_worker)
    # Each worker in every mode it could have taken part in.
    assert {"p0", "p1"} <= {c.worker_id for c in first.candidates}
    assert {c.worker_id for c in second.candidates} == {"d0", "d1"}
    assert first.candidates[0].worker_id == first.worker_id
    assert first.candidates[0].terms["uncached_tokens"] == 100
    assert report.ttft_us == timing.ttft_us > 0
    total = sum(stage.us for stage in report.ttft_stages)
    assert abs(total - timing.ttft_us) <= 0.01 * timing.ttft_us
    assert sum(stage.us for stage in report.stages) == report.e2e_us == timing.e2e_us
    named = {stage.name: stage.us for stage in report.ttft_stages}
    assert named["prefill"] == timing.prefill_us


async def test_running_request_is_listed_explained_and_killed(store_url: str) -> None:
    """Its client gets the code, its worker the cancel, and nothing stays booked."""
    slow = decoder(token_delay_s=0.02)
    async with running_cluster(store_url, [prefill(), slow]) as cluster, admin_of(cluster) as stub:
        call = make_call(max_tokens=500, request_id="long", timeout_s=60.0, force_mode="REMOTE")
        task = asyncio.create_task(cluster.ask(call))
        listing = admin_pb2.ListRequestsRequest()

        async def listed() -> list[admin_pb2.RunningRequest]:
            return list((await stub.ListRequests(listing, timeout=5)).requests)

        async with asyncio.timeout(10):
            while not any(found.stage == "decode" for found in await listed()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        [found] = await listed()
        assert (found.request_id, found.mode, found.prompt_tokens) == ("long", "REMOTE", 100)
        assert list(found.workers) == ["d0"]
        assert 0 < found.completion_tokens < 500
        assert found.deadline_left_ms > found.age_ms
        assert (await explain(stub, "long")).outcome == "running"
        await stub.KillRequest(admin_pb2.KillRequestRequest(request_id="long"), timeout=5)
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.spec.code == "killed"
        await eventually(lambda: cluster["d0"].cancels)
        report = await explain(stub, "long")
        assert (report.outcome, report.message) == ("killed", "an operator ended the request")
        assert await listed() == []
        cluster.assert_clean()


async def test_unknown_request_is_not_found_and_reports_are_bounded(store_url: str) -> None:
    config = RouterConfig(max_reports=1)
    workers = [prefill(), decoder()]
    async with running_cluster(store_url, workers, config) as cluster, admin_of(cluster) as stub:
        for name in ("one", "two"):
            await cluster.ask(make_call(request_id=name))
        assert (await explain(stub, "two")).outcome == "ok"
        for ask in (
            explain(stub, "one"),
            stub.KillRequest(admin_pb2.KillRequestRequest(request_id="two"), timeout=5),
            stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="p9"), timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert (caught.value.details() or "").startswith("not_found: ")
        status = await stub.ClusterStatus(admin_pb2.ClusterStatusRequest(), timeout=5)
    assert (status.totals.requests_ok, status.totals.prompt_tokens) == (2, 200)
    assert status.totals.completion_tokens == 16
    assert status.recent.num_requests == 1


async def test_refused_request_is_explained_too(store_url: str) -> None:
    workers = [prefill(), decoder()]
    async with running_cluster(store_url, workers) as cluster, admin_of(cluster) as stub:
        with pytest.raises(RequestError):
            await cluster.ask(make_call(request_id="late", timeout_s=-1))
        report = await explain(stub, "late")
    assert (report.outcome, list(report.choices)) == ("deadline_exceeded", [])


TEXTS = ["", "x" * 100_000, "\x00\u202e", "../../etc/passwd", "[" * 20_000, "a: 2020-99-99", "{"]
NUMBERS = [0, 1, 2**32 - 1]


def odd_message(descriptor: Descriptor, rng: random.Random) -> Message:
    """Fill a message without submessages with what nobody would send."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        assert field.type in (field.TYPE_STRING, field.TYPE_UINT32), field.full_name
        setattr(
            message, field.name, rng.choice(TEXTS if field.type == field.TYPE_STRING else NUMBERS)
        )
    return message


async def test_odd_requests_of_operators_get_a_clear_status(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    async with running_cluster(store_url, [prefill()]) as cluster, admin_of(cluster) as stub:
        for method in methods:
            if method.name == "Diagnostics":
                continue  # it asks nothing, and much is to be collected
            for _ in range(10 if method.input_type.fields else 1):
                request = odd_message(method.input_type, rng)
                call = getattr(stub, method.name)(request, timeout=30)
                clear = {
                    grpc.StatusCode.OK,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.NOT_FOUND,
                }
                assert await call.code() in clear, (method.name, await call.details())
    assert [r.message for r in caplog.records if r.exc_info] == []
