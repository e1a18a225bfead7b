"""What waits to be admitted, in a router over real Links and a real store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from services.common.errors import RequestError
from services.router.admission import AdmissionConfig
from services.router.config import RouterConfig
from tests.support.cluster import Cluster, eventually, make_call, running_cluster
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

NOBODY_STARTS = AdmissionConfig(max_decode_waiting=-1, max_queued=2)  # decode counts as full


async def test_a_request_that_is_ended_while_it_waits_ends_at_once(store_url: str) -> None:
    """It keeps neither its client nor its place in the queue waiting."""
    config = RouterConfig(admission=NOBODY_STARTS)
    async with running_cluster(store_url, [prefill(), decoder()], config) as cluster:
        router = cluster.router
        task = asyncio.create_task(cluster.ask(make_call(request_id="r0", timeout_s=600.0)))
        await eventually(lambda: router._gate.num_queued == 1)
        assert router.kill("r0")
        assert router._gate.num_queued == 0
        with pytest.raises(RequestError) as caught:
            await asyncio.wait_for(task, 30.0)
        assert caught.value.spec.code == "killed"
        cluster.assert_clean()


def _is_open(cluster: Cluster, request_id: str) -> bool:
    return request_id in {r.request_id for r in cluster.router.running()}


async def test_a_flood_that_waits_makes_room_for_another_tenant(store_url: str) -> None:
    """The bound on open requests leaves those that wait to the queue's own bounds."""
    config = RouterConfig(admission=NOBODY_STARTS, max_open_requests=1)
    async with running_cluster(store_url, [prefill(), decoder()], config) as cluster:
        tasks = {}
        for name, tenant in (("a0", "a"), ("a1", "a"), ("b0", "b")):
            call = replace(make_call(request_id=name, timeout_s=600.0), tenant=tenant)
            tasks[name] = asyncio.create_task(cluster.ask(call))
            await eventually(partial(_is_open, cluster, name))
        with pytest.raises(RequestError, match="made room for others"):
            await asyncio.wait_for(tasks["a1"], 30.0)
        assert {r.request_id for r in cluster.router.running()} == {"a0", "b0"}
        for name in ("a0", "b0"):
            assert cluster.router.kill(name)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        cluster.assert_clean()


async def test_requests_under_way_are_bounded(store_url: str) -> None:
    config = RouterConfig(max_open_requests=1)
    slow = decoder(token_delay_s=0.01)
    async with running_cluster(store_url, [prefill(), slow], config) as cluster:
        call = make_call(request_id="r0", max_tokens=400, timeout_s=600.0)
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster.router.num_open == 1)
        with pytest.raises(RequestError, match="1 requests are under way"):
            await cluster.ask(make_call())
        assert cluster.router.kill("r0")
        await asyncio.gather(task, return_exceptions=True)
        cluster.assert_clean()
