"""The stages a TTFT is explained by add up to it, whatever way the request took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import pytest

from services.pb import common_pb2, worker_pb2
from services.router.api import GenerateCall
from services.router.config import RouterConfig
from services.router.hedge import HedgeConfig
from services.router.reports import RequestReport
from tests.support.cluster import Cluster, eventually, make_call, running_cluster
from tests.support.fake_worker import FakeWorker, Job, run_job
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.outputs import outputs_of
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

HEDGED = RouterConfig(hedge=HedgeConfig(enabled=True, min_samples=4, min_delay_s=0.05))


async def slowly(worker: FakeWorker, job: Job) -> None:
    """A script whose prefill takes a moment."""
    await asyncio.sleep(0.05)
    await run_job(worker, job)


async def never(worker: FakeWorker, job: Job) -> None:
    """A script that accepts and says nothing."""
    await asyncio.sleep(600)


class Watch:
    """A cluster, and when its workers sent the first token of each request."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sent_at: dict[str, float] = {}
        for worker in cluster.workers.values():
            self._watch(worker)

    def _watch(self, worker: FakeWorker) -> None:
        send = worker.send_tokens

        def noted(job: Job, choice: int, first: int, count: int) -> None:
            self.sent_at.setdefault(job.work.request_id, time.monotonic())
            send(job, choice, first, count)

        worker.send_tokens = noted  # type: ignore[method-assign]  # for this one life

    async def explained(self, call: GenerateCall) -> tuple[RequestReport, dict[str, int]]:
        """Run a request; check its report against what its ends saw; return it and its stages."""
        heard_at: float | None = None
        async for _ in outputs_of(partial(self.cluster.router.generate, call)):
            if heard_at is None:
                heard_at = time.monotonic()
        assert heard_at is not None
        report = self.cluster.router.explain(call.request_id)
        assert report is not None
        assert report.timing is not None
        ttft_s, stages = report.timing.ttft_us / 1e6, dict(report.ttft_stages)
        # The first frame went out after the worker had sent the token and before it came here.
        assert self.sent_at[call.request_id] - call.received_at - 2e-6 <= ttft_s
        assert ttft_s <= heard_at - call.received_at + 2e-6
        assert sum(stages.values()) == report.timing.ttft_us
        assert min(stages.values()) >= 0
        whole = report.timing
        assert stages["queue"] == whole.queue_us
        return report, stages


def pools(**options: object) -> Sequence[FakeWorker]:
    return [prefill("p0", **options), prefill("p1", **options), decoder("d0"), decoder("d1")]


async def until_busy(cluster: Cluster) -> tuple[FakeWorker, FakeWorker]:
    """Wait until a prefill worker has work; give it and the other one."""
    p0, p1 = cluster["p0"], cluster["p1"]
    await eventually(lambda: p0.jobs or p1.jobs, 15.0)
    return (p0, p1) if p0.jobs else (p1, p0)


@pytest.mark.parametrize("mode", ["REMOTE", "LOCAL", "STAY"])
async def test_in_every_mode(store_url: str, mode: str) -> None:
    async with running_cluster(store_url, [prefill("p0", script=slowly), decoder("d0")]) as cluster:
        report, stages = await Watch(cluster).explained(make_call(force_mode=mode))
    assert (report.choices[0].mode, report.num_retries) == (mode, 0)
    assert stages["queue"] == 0


async def test_with_several_choices(store_url: str) -> None:
    async with running_cluster(store_url, pools()) as cluster:
        await Watch(cluster).explained(make_call(n=3))


async def test_after_a_refusal(store_url: str) -> None:
    refused: list[Job] = []

    async def refuse_first(worker: FakeWorker, job: Job) -> None:
        await asyncio.sleep(0.05)
        if refused:
            await run_job(worker, job)
            return
        refused.append(job)
        refusal = worker_pb2.Refusal(
            request=job.work.request,
            attempt=job.work.attempt,
            error=common_pb2.Error(code="draining"),
        )
        worker.send(worker_pb2.WorkerFrame(refusals=[refusal]))

    async with running_cluster(store_url, pools(script=refuse_first)) as cluster:
        report, stages = await Watch(cluster).explained(make_call())
    assert report.num_retries == 1
    assert stages["link"] > 0


async def test_after_the_death_of_a_worker(store_url: str) -> None:
    async with running_cluster(store_url, pools(script=never)) as cluster:
        watch = Watch(cluster)
        task = asyncio.create_task(watch.explained(make_call(timeout_s=60.0)))
        dead, other = await until_busy(cluster)
        other.script = slowly
        await dead.kill()
        report, stages = await task
    assert report.num_retries == 1
    assert stages["link"] > 0  # the lost attempt is in it


async def test_with_a_second_prefill(store_url: str) -> None:
    async with running_cluster(store_url, pools(), HEDGED) as cluster:
        watch = Watch(cluster)
        for seed in range(6):
            await watch.explained(make_call(prompt=[seed + 1] * 30))
        for worker in (cluster["p0"], cluster["p1"]):
            worker.jobs.clear()
            worker.script = never
        task = asyncio.create_task(watch.explained(make_call(prompt=[77] * 30, timeout_s=60.0)))
        first, second = await until_busy(cluster)
        second.script = slowly
        report, _ = await task
        assert first.jobs
    assert [choice.worker.worker_id for choice in report.choices[:2]] == [
        first.worker_id,
        second.worker_id,
    ]


async def test_after_waiting_for_workers(store_url: str) -> None:
    workers = [prefill("p0", script=slowly), decoder("d0")]
    async with running_cluster(store_url, workers) as cluster:
        watch = Watch(cluster)
        for worker in workers:
            worker.freeze()
        for worker in workers:
            await cluster.until_state(worker.worker_id, "suspect", 15.0)
        task = asyncio.create_task(watch.explained(make_call(timeout_s=60.0)))
        await eventually(lambda: cluster.router._gate.num_queued == 1, 15.0)
        for worker in workers:
            worker.thaw()
        _, stages = await task
    assert stages["queue"] > 0
