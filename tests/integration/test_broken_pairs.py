"""Two healthy workers whose link is bad: the pair is passed over, not the workers."""

from __future__ import annotations

import asyncio

import pytest

from services.pb import common_pb2
from tests.support.cluster import eventually, make_call, reference, running_cluster
from tests.support.fake_worker import FakeWorker, Job, run_job
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

RECOMPUTED = common_pb2.Timing(prefill_us=100, decode_us=200, recomputed=True)


async def cannot_pull(worker: FakeWorker, job: Job) -> None:
    """Compute what the ticket was for, as decode does when it cannot have the KV."""
    if job.kind == "continue_from":
        for index in range(job.work.first_index, job.work.max_tokens):
            worker.send_tokens(job, 0, index, 1)
        worker.send_done(job, timing=RECOMPUTED)
        return
    await run_job(worker, job)


async def test_after_two_failures_another_pair_is_used(store_url: str) -> None:
    """Each failure costs the client a prefill; the third request must not pay again."""
    async with running_cluster(store_url, [prefill(), decoder("d0"), decoder("d1")]) as cluster:
        cluster["d0"].script = cannot_pull
        used = []
        for seed in range(24):
            call = make_call([seed + 1] * 40)
            answer = await cluster.ask(call)
            assert answer.tokens() == reference(call)
            used.append(answer.end.timing.decode_worker)
        assert used.count("d0") == 2
        assert cluster.state_of("d0") == "live"


async def test_without_another_pair_nothing_is_handed_off(store_url: str) -> None:
    """The pair's own workers can do it alone."""
    async with running_cluster(store_url, [prefill(), decoder("d0")]) as cluster:
        cluster["d0"].script = cannot_pull
        modes = []
        for seed in range(6):
            call = make_call([seed + 1] * 40)
            answer = await cluster.ask(call)
            assert answer.tokens() == reference(call)
            modes.append((answer.end.timing.mode, answer.end.timing.reason))
        assert modes[:2] == [("REMOTE", "both_pools_live")] * 2
        assert set(modes[2:]) == {("LOCAL", "pair_refused")}


async def test_many_handoffs_that_fail_at_once_take_no_healthy_worker_out(store_url: str) -> None:
    """RB-054: what a prefill worker or a link has done says nothing of the decode worker."""
    dead = asyncio.Event()

    async def refuse_tickets(worker: FakeWorker, job: Job) -> None:
        """Say that the KV cannot be had, as decode does once prefill has died."""
        if job.kind == "continue_from":
            await dead.wait()
            error = common_pb2.Error(code="handoff_failed", message="no answer to HELLO")
            worker.send_done(job, reason=common_pb2.FINISH_REASON_ERROR, error=error)
            return
        await run_job(worker, job)

    def num_tickets() -> int:
        return sum(job.kind == "continue_from" for job in cluster["d0"].jobs)

    async with running_cluster(store_url, [prefill(), decoder("d0")]) as cluster:
        cluster["d0"].script = refuse_tickets
        calls = [make_call([seed + 1] * 40, timeout_s=60.0) for seed in range(12)]
        tasks = [asyncio.create_task(cluster.ask(call)) for call in calls]
        await eventually(lambda: num_tickets() >= 8, 20.0)  # before anybody knows of a failure
        dead.set()
        for call, answer in zip(calls, await asyncio.gather(*tasks), strict=True):
            assert answer.tokens() == reference(call)
        assert cluster.state_of("d0") == "live"
