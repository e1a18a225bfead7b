"""What waits to be admitted, in a router over real Links and a real store."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import RequestError
from services.router.admission import AdmissionConfig
from services.router.config import RouterConfig
from tests.support.cluster import eventually, make_call, running_cluster
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
