"""One router process over the workers of two models in one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from services.common.clock import SystemClock
from services.common.errors import ConfigError, RequestError
from services.registry.reader import RedisRegistryReader
from services.registry.store_client import StoreAddress
from services.router.api import GenerateCall
from services.router.config import RouterConfig
from services.router.dispatch import Router
from services.router.hooks import MetricsHooks
from services.router.model_set import ModelSet
from services.router.reports import RecentRequests
from services.telemetry.metrics import Metrics
from tests.support.cluster import (
    IDENTITY,
    Answer,
    DigitText,
    eventually,
    make_call,
    make_manifest,
    reference,
)
from tests.support.fake_worker import FakeWorker
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.outputs import collect
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

DIGESTS = {"toy": "d" * 64, "other": "e" * 64}


def router_of(name: str, url: str, hooks: MetricsHooks, recent: RecentRequests) -> Router:
    """Make the router of one model."""
    manifest = make_manifest(name=name, weights_digest=DIGESTS[name])
    reader = RedisRegistryReader(StoreAddress(url), name, SystemClock())
    return Router(RouterConfig(), manifest, DigitText(), reader, SystemClock(), hooks, recent)


@asynccontextmanager
async def two_models(
    url: str, workers: dict[str, list[FakeWorker]], metrics: Metrics
) -> AsyncIterator[ModelSet]:
    """Start workers of both models and one set of routers over them."""
    hooks, recent = MetricsHooks(metrics), RecentRequests(10)
    models = ModelSet([router_of(name, url, hooks, recent) for name in DIGESTS])
    started = [worker for group in workers.values() for worker in group]
    try:
        for name, group in workers.items():
            for worker in group:
                worker.identity = {**IDENTITY, "weights_digest": DIGESTS[name]}
                await worker.start(store_url=url, ns=name)
        await eventually(lambda: all(worker.lease.is_registered for worker in started))
        await models.start()
        await eventually(lambda: [w.state for w in models.workers()] == ["live"] * len(started))
        yield models
    finally:
        await models.stop()
        for worker in started:
            await worker.stop()


async def ask(models: ModelSet, call: GenerateCall) -> Answer:
    return Answer(await collect(partial(models.generate, call)))


async def test_requests_reach_the_workers_of_their_model_only(store_url: str) -> None:
    workers = {"toy": [prefill("p0"), decoder("d0")], "other": [prefill("p1"), decoder("d1")]}
    metrics = Metrics.enabled()
    async with two_models(store_url, workers, metrics) as models:
        assert [model.name for model in models.served_models()] == ["toy", "other"]
        for name, prefill_id, decode_id in (("toy", "p0", "d0"), ("other", "p1", "d1")):
            call = replace(make_call(request_id=f"for-{name}", force_mode="REMOTE"), model=name)
            answer = await ask(models, call)
            timing = answer.end.timing
            assert (timing.prefill_worker, timing.decode_worker) == (prefill_id, decode_id)
            assert answer.tokens() == reference(call)
            report = models.explain(f"for-{name}")
            assert report is not None
            assert report.model == name
        with pytest.raises(RequestError) as caught:
            await ask(models, replace(make_call(), model="third"))
        assert caught.value.spec.code == "model_not_found"
        assert "served: toy, other" in caught.value.message
        assert models.totals().requests_ok == 2
        assert 'isthmus_workers{role="decode",state="live"} 2.0' in metrics.render().decode()
    metrics.shutdown()


async def test_one_model_without_workers_is_not_ready_the_other_is(store_url: str) -> None:
    slow = decoder("d0", token_delay_s=0.02)
    metrics = Metrics.disabled()
    async with two_models(store_url, {"toy": [prefill("p0"), slow]}, metrics) as models:
        assert models.is_ready() == (True, "")
        call = make_call(request_id="long", max_tokens=400, timeout_s=60.0, force_mode="REMOTE")
        task = asyncio.create_task(ask(models, call))
        await eventually(lambda: [found.stage for found in models.running()] == ["decode"])
        assert models.num_open == 1
        assert models.kill("long")
        assert not models.kill("long")
        with pytest.raises(RequestError):
            await task
    metrics.shutdown()


def test_two_models_of_one_name_cannot_be_told_apart(store_url: str) -> None:
    hooks, recent = MetricsHooks(Metrics.disabled()), RecentRequests(1)
    with pytest.raises(ConfigError, match="same name"):
        ModelSet([router_of("toy", store_url, hooks, recent) for _ in range(2)])
