"""A router moves open requests off a worker that drains, and no client notices but by the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.pb import worker_pb2
from services.router.api import GenerateCall
from services.router.hooks import RouterHooks
from tests.support.cluster import (
    Answer,
    Cluster,
    eventually,
    make_call,
    reference,
    running_cluster,
)
from tests.support.fake_worker import FakeWorker, Job, run_job
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

TOKENS = 60


class Migrations(RouterHooks):
    """Counts migrations."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []

    def migrated(self, call: GenerateCall, gap_s: float) -> None:
        """Note one."""
        self.gaps_s.append(gap_s)


def _pools(**changes: Any) -> Sequence[FakeWorker]:
    return [
        prefill(),
        decoder("d0", token_delay_s=0.01, **changes),
        decoder("d1", token_delay_s=0.01, **changes),
    ]


async def _stream(
    cluster: Cluster, call: GenerateCall
) -> tuple[asyncio.Task[Answer], FakeWorker, FakeWorker]:
    """Start a request; return it, the decode worker that runs it, and the other."""
    task = asyncio.create_task(cluster.ask(call))
    pair = cluster["d0"], cluster["d1"]
    await eventually(lambda: any(len(j.sent) > 2 for worker in pair for j in worker.jobs))
    source, target = pair if pair[0].jobs else pair[::-1]
    return task, source, target


def _drain(worker: FakeWorker) -> None:
    worker.is_draining = True
    worker.report()


async def test_a_request_leaves_a_draining_worker_mid_stream(store_url: str) -> None:
    """RB-105: draining costs no request and does not wait for long answers."""
    hooks = Migrations()
    async with running_cluster(store_url, _pools(), hooks=hooks) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, target = await _stream(cluster, call)
        _drain(source)
        answer = await task
        assert answer.tokens() == reference(call)
        timing = answer.end.timing
        assert (timing.mode, timing.migrations) == ("REMOTE", 1)
        assert timing.decode_worker == target.worker_id
        assert 0 < timing.migration_gap_us < timing.e2e_us
        handoff = timing.handoff_bytes, timing.handoff_blocks, timing.handoff_blocks_attached
        migration = (
            timing.migration_bytes,
            timing.migration_blocks,
            timing.migration_blocks_attached,
        )
        assert handoff == migration == (4_000, 4, 2)
        assert (timing.plane, timing.migration_plane, timing.migration_us) == ("memfd", "memfd", 50)
        assert len(hooks.gaps_s) == 1
        (job,) = target.jobs
        assert job.kind == "continue_from"
        assert job.work.attempt > source.jobs[0].work.attempt
        assert job.work.first_index == len(job.work.generated) // 4 > 2
        assert job.work.continue_from.ticket == f"ticket of {source.worker_id}".encode()
        cluster.assert_clean()


async def test_a_local_request_moves_too(store_url: str) -> None:
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS, force_mode="LOCAL")
        task, source, target = await _stream(cluster, call)
        _drain(source)
        answer = await task
        assert answer.tokens() == reference(call)
        timing = answer.end.timing
        assert (timing.mode, timing.migrations) == ("LOCAL", 1)
        assert timing.decode_worker == target.worker_id


async def test_a_request_moves_back_when_the_drains_alternate(store_url: str) -> None:
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=120)
        task, source, target = await _stream(cluster, call)
        _drain(source)
        await eventually(lambda: target.jobs and len(target.jobs[0].sent) > 2)
        source.is_draining = False
        source.report()
        await cluster.until_state(source.worker_id, "live")
        _drain(target)
        answer = await task
        assert answer.tokens() == reference(call)
        timing = answer.end.timing
        assert (timing.migrations, timing.migration_bytes, timing.handoff_bytes) == (
            2,
            8_000,
            4_000,
        )
        assert len(source.jobs) == 2


async def test_nothing_moves_without_another_worker_or_with_several_choices(
    store_url: str,
) -> None:
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.01)]) as cluster:
        call = make_call(max_tokens=40)
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["d0"].jobs and len(cluster["d0"].jobs[0].sent) > 2)
        _drain(cluster["d0"])
        assert (await task).tokens() == reference(call)
        assert cluster["d0"].migrates == []
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=40, n=2)
        task, source, target = await _stream(cluster, call)
        _drain(source)
        answer = await task
        assert [answer.tokens(c) for c in (0, 1)] == [reference(call, c) for c in (0, 1)]
        assert source.migrates == target.jobs == []


async def test_an_offer_that_fails_is_made_up_for_elsewhere(store_url: str) -> None:
    """The worker stopped the request and had no ticket for it: its tokens are drawn again."""
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, _ = await _stream(cluster, call)
        source.can_offer = False
        _drain(source)
        assert (await task).tokens() == reference(call)
        cluster.assert_clean()


async def test_a_target_that_dies_with_the_ticket_hands_it_to_the_next(store_url: str) -> None:
    """The tokens so far go along with the ticket, to whoever takes it in the end."""

    async def stuck(worker: FakeWorker, job: Job) -> None:
        if job.work.generated and job.work.attempt == 2:
            await asyncio.sleep(60)
        await run_job(worker, job)

    workers = [*_pools(script=stuck), decoder("d2", token_delay_s=0.01, script=stuck)]
    async with running_cluster(store_url, workers) as cluster:
        call = make_call(max_tokens=TOKENS)
        decoders = [cluster[name] for name in ("d0", "d1", "d2")]
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: any(len(j.sent) > 2 for w in decoders for j in w.jobs))
        (source,) = [w for w in decoders if w.jobs]
        _drain(source)
        others = [w for w in decoders if w is not source]
        await eventually(lambda: any(w.jobs for w in others))
        (first,) = [w for w in others if w.jobs]
        (second,) = [w for w in others if w is not first]
        await first.kill()
        answer = await task
        assert answer.tokens() == reference(call)
        (job,) = second.jobs
        assert job.kind == "continue_from"
        assert job.work.generated == first.jobs[0].work.generated
        assert job.work.attempt == first.jobs[0].work.attempt + 1


async def test_when_no_target_is_left_the_tokens_so_far_are_computed_again(store_url: str) -> None:
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, target = await _stream(cluster, call)
        target.refuse_with = "overloaded"
        _drain(source)
        assert (await task).tokens() == reference(call)
        (again,) = [j for j in cluster["p0"].jobs if j.kind == "whole"]
        assert again.work.first_index == len(again.work.generated) // 4 > 2
        cluster.assert_clean()


async def test_an_offer_nobody_asked_for_goes_to_another_worker(store_url: str) -> None:
    """Worker.Migrate: the worker is told by someone else, and may well be live and idle."""
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, target = await _stream(cluster, call)
        work = source.jobs[0].work
        source.migrate(worker_pb2.Migrate(request=work.request, attempt=work.attempt))
        answer = await task
        assert answer.tokens() == reference(call)
        assert answer.end.timing.decode_worker == target.worker_id
        assert len(source.jobs) == 1


async def test_the_last_worker_takes_its_request_back(store_url: str) -> None:
    """All workers are told to stop at once: the answer ends where it began to move."""
    workers = [decoder("d0", token_delay_s=0.01), decoder("d1", token_delay_s=0.01)]
    async with running_cluster(store_url, workers) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, target = await _stream(cluster, call)
        target.refuse_with = "draining"
        _drain(source)
        answer = await task
        assert answer.tokens() == reference(call)
        assert [job.kind for job in source.jobs] == ["whole", "whole"]
        assert len(target.jobs) == 1
        cluster.assert_clean()


async def test_a_cancel_during_the_move_reaches_both_workers(store_url: str) -> None:
    async def stuck(worker: FakeWorker, job: Job) -> None:
        if job.work.generated:
            await asyncio.sleep(60)
        await run_job(worker, job)

    async with running_cluster(store_url, _pools(script=stuck)) as cluster:
        task, source, target = await _stream(cluster, make_call(max_tokens=TOKENS))
        _drain(source)
        await eventually(lambda: target.jobs)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: source.cancels and target.cancels)
        cluster.assert_clean()


async def test_a_link_cut_after_the_offer_loses_nothing(store_url: str) -> None:
    """The resume repeats tokens and ticket; the ticket is passed on once."""
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS)
        task, source, target = await _stream(cluster, call)
        _drain(source)
        await eventually(lambda: source.migrates)
        source.cut_links()
        assert (await task).tokens() == reference(call)
        assert len(target.jobs) == 1
