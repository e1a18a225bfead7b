"""What the router tells others about itself: Admin.ClusterStatus, readiness, metrics."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from services.common.clock import SystemClock
from services.common.errors import RequestError
from services.gateway.admin_servicer import AdminConfig, AdminServicer
from services.kv.hashing import HashScope, chain_hashes
from services.pb import admin_pb2, admin_pb2_grpc
from services.registry.base import LoadReport
from services.router.config import RouterConfig
from services.router.hooks import MetricsHooks
from services.router.model_set import ModelSet
from services.telemetry.metrics import Metrics
from tests.support.cluster import DIGEST, eventually, make_call, running_cluster
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration


async def test_cluster_status_over_grpc(store_url: str) -> None:
    """Every worker with state, reason and load; requests counted while they are open."""
    wrong = decoder("d1", identity={"rope": "other"})
    async with running_cluster(
        store_url, [prefill(), decoder(token_delay_s=0.02), wrong]
    ) as cluster:
        server = grpc.aio.server()
        admin = AdminServicer(
            ModelSet([cluster.router]), SystemClock(), AdminConfig(lease_ms=2_000)
        )
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            task = asyncio.create_task(cluster.ask(make_call(max_tokens=30)))
            await eventually(lambda: cluster["d0"].jobs)
            status = await stub.ClusterStatus(admin_pb2.ClusterStatusRequest(), timeout=5)
            await task
        await server.stop(0)
        assert (status.router_id, status.model, status.requests_open) == ("router-0", "toy", 1)
        assert not status.degraded
        by_id = {w.worker_id: w for w in status.workers}
        assert {w: by_id[w].state for w in by_id} == {
            "p0": "live", "d0": "live", "d1": "incompatible",
        }  # fmt: skip
        assert "rope" in by_id["d1"].reason
        assert by_id["d0"].in_flight == 1
        assert by_id["d0"].address == cluster["d0"].address
        assert by_id["d0"].load.kv_total == 1000
        assert by_id["d0"].lease_age_ms < 2000


async def test_metrics_count_decisions_outcomes_and_stages(store_url: str) -> None:
    """The catalogue's router metrics, from a request that worked and one that did not."""
    metrics = Metrics.enabled()
    async with running_cluster(
        store_url, [prefill(), decoder()], hooks=MetricsHooks(metrics)
    ) as cluster:
        await cluster.ask(make_call())
        with pytest.raises(RequestError):
            await cluster.ask(make_call(timeout_s=-1))
        text = metrics.render().decode()
        for line in (
            'isthmus_requests_total{mode="REMOTE",outcome="ok"} 1.0',
            'isthmus_requests_total{mode="none",outcome="deadline_exceeded"} 1.0',
            'isthmus_route_decisions_total{mode="REMOTE",reason="both_pools_live"} 1.0',
            'isthmus_workers{role="prefill",state="live"} 1.0',
            'isthmus_stage_seconds_count{stage="unattributed"} 1.0',
            'isthmus_handoff_blocks_total{how="moved"} 4.0',
            'isthmus_handoff_blocks_total{how="attached"} 2.0',
            'isthmus_store_calls_total{op="route",outcome="ok"} 2.0',
            "isthmus_router_degraded 0.0",
        ):
            assert line in text


async def test_failed_handoff_is_counted_by_its_code(store_url: str) -> None:
    metrics = Metrics.enabled()
    async with running_cluster(
        store_url, [prefill(), decoder()], hooks=MetricsHooks(metrics)
    ) as cluster:
        cluster["d0"].refuse_with = "overloaded"
        answer = await cluster.ask(make_call())
    assert answer.end.timing.mode == "STAY"
    assert 'isthmus_handoffs_total{outcome="overloaded",plane="none"} 1.0' in (
        metrics.render().decode()
    )
    metrics.shutdown()


async def test_readiness_follows_the_forced_mode(store_url: str) -> None:
    """A router that may only run REMOTE is not ready with one pool."""
    config = RouterConfig(force_mode="REMOTE")
    async with running_cluster(store_url, [prefill()], config) as cluster:
        is_ready, why = cluster.router.is_ready()
        assert not is_ready
        assert "REMOTE" in why
        await cluster.add(decoder())
        await cluster.until_state("d0", "live")
        assert cluster.router.is_ready() == (True, "")


async def test_served_model_names_the_largest_request_a_worker_could_hold(store_url: str) -> None:
    """kv_total blocks of 16 tokens, or the worker's longest request where that is less."""
    small, large = prefill(), decoder()
    small.load = LoadReport(kv_free=5, kv_total=5)
    large.load = LoadReport(kv_free=40, kv_total=40)
    async with running_cluster(store_url, []) as cluster:
        assert cluster.router.served_models()[0].max_pool_tokens == 0
        await cluster.add(small)
        await cluster.until_state("p0", "live")
        await eventually(lambda: cluster.router.served_models()[0].max_pool_tokens == 80)
        await cluster.add(large)
        await eventually(lambda: cluster.router.served_models()[0].max_pool_tokens == 640)
        large.load = LoadReport(kv_free=9999, kv_total=9999)
        await eventually(lambda: cluster.router.served_models()[0].max_pool_tokens == 2048)


async def test_unknown_force_mode_is_refused_by_name(store_url: str) -> None:
    async with running_cluster(store_url, [prefill()]) as cluster:
        with pytest.raises(RequestError) as caught:
            await cluster.ask(make_call(force_mode="BOTH"))
        assert caught.value.spec.code == "invalid_argument"
        assert caught.value.param == "force_mode"


async def test_hints_that_lie_are_measured_and_told(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RB-050: routing by prefix that fails in silence looks like plain load balancing."""
    metrics = Metrics.enabled()
    prompt = list(range(1, 257))
    liar = prefill("p1")
    liar.cached = chain_hashes(HashScope(DIGEST, "", ""), make_call(prompt).token_ids)[3::4]
    async with running_cluster(
        store_url, [prefill("p0"), liar, decoder()], hooks=MetricsHooks(metrics)
    ) as cluster:
        async with asyncio.timeout(20.0):
            while "router.hint_missed" not in caplog.messages:  # until its hints are published
                answer = await cluster.ask(make_call(prompt))
                assert answer.end.cached_tokens == 0
        lines = metrics.render().decode()
        for _ in range(3):
            await cluster.ask(make_call(prompt))
    metrics.shutdown()
    assert 'isthmus_hint_error_tokens_count{sign="missing"}' in lines
    assert caplog.messages.count("router.hint_missed") == 1  # once a minute
