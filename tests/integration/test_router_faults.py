"""Links that break, workers that freeze and change, a store that is down, slow or empty."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from grpc.aio._call import StreamStreamCall

from services.common.errors import RequestError
from services.common.ids import Incarnation, WorkerId
from services.kv.hashing import HashScope, chain_hashes
from services.registry.embedded import EmbeddedStore
from services.registry.reader import ReaderConfig
from services.router.config import LinkConfig, RouterConfig
from services.router.hooks import MetricsHooks
from services.telemetry.metrics import Metrics
from tests.support.cluster import (
    DIGEST,
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
from tests.support.store import running_store, store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration


def _has_attached(worker: FakeWorker, times: int) -> bool:
    return worker.num_attaches >= times


def _lives_again(cluster: Cluster, worker_id: str, incarnation: int) -> bool:
    worker = cluster.router.view().find(WorkerId(worker_id))
    return worker is not None and (worker.state, worker.incarnation) == ("live", incarnation)


async def never(worker: FakeWorker, job: Job) -> None:
    """A script that says nothing."""
    await asyncio.sleep(60)


async def streaming(cluster: Cluster, worker_id: str, tokens: int = 60) -> asyncio.Task[Answer]:
    """Start a request and wait until the worker has sent a few of its tokens."""
    task = asyncio.create_task(cluster.ask(make_call(max_tokens=tokens)))
    await eventually(lambda: any(len(j.sent) > 2 and not j.ends for j in cluster[worker_id].jobs))
    return task


async def test_cut_link_resumes_without_gap_or_repeat(store_url: str) -> None:
    """api.md rule 2, I4: the stream breaks twice, the client sees every index once."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.02)]) as cluster:
        task = await streaming(cluster, "d0")
        for attaches in (2, 3):
            cluster["d0"].cut_links()
            await eventually(partial(_has_attached, cluster["d0"], attaches))
            await asyncio.sleep(0.1)
        answer = await task
        assert answer.tokens() == reference(make_call(max_tokens=60))
        assert answer.ends()[0].finish_reason == "length"
        cluster.assert_clean()


@pytest.mark.parametrize(
    "fault", [asyncio.InvalidStateError(), asyncio.CancelledError(), RuntimeError("odd")]
)
async def test_however_a_stream_ends_its_link_comes_back(
    store_url: str, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """A write to a stream that had just ended used to end the Link's task, which then looked up.

    Requests sent on such a Link waited until their deadlines.
    """
    write = StreamStreamCall.write
    faults: list[BaseException] = []

    async def write_or_fail(call: Any, frame: object) -> None:
        if faults:
            raise faults.pop()
        await write(call, frame)

    monkeypatch.setattr(StreamStreamCall, "write", write_or_fail)
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.02)]) as cluster:
        task = await streaming(cluster, "d0")
        before = cluster["d0"].num_attaches + cluster["p0"].num_attaches
        faults.append(fault)
        await eventually(lambda: cluster["d0"].num_attaches + cluster["p0"].num_attaches > before)
        call = make_call(max_tokens=60)
        assert (await task).tokens() == reference(call)
        assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_resumed_ticket_is_passed_on_once(store_url: str) -> None:
    """A resume repeats the ticket; decode gets one work item."""

    async def slow_first(worker: FakeWorker, job: Job) -> None:
        worker.send_ticket(job)
        await asyncio.sleep(0.3)
        worker.send_tokens(job, 0, 0, 1)
        worker.send_done(job, handed_off=True)

    async with running_cluster(store_url, [prefill(script=slow_first), decoder()]) as cluster:
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["d0"].jobs)
        cluster["p0"].cut_links()
        assert (await task).tokens() == reference(call)
        assert len(cluster["d0"].jobs) == 1


async def test_requests_of_a_worker_whose_port_is_closed_end_without_the_grace(
    store_url: str,
) -> None:
    """A process that is gone takes its listener along: waiting for a resume helps nobody."""
    patient = LinkConfig(resume_grace_s=30.0)
    config = RouterConfig(link=patient, max_losses=0)
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.05)], config) as c:
        task = await streaming(c, "d0")
        await c["d0"].kill()
        with pytest.raises(RequestError) as caught:
            await asyncio.wait_for(task, 5.0)
        assert caught.value.spec.code == "worker_lost"


async def test_what_a_worker_forgot_goes_on_elsewhere_at_once(store_url: str) -> None:
    """A worker that is back but no longer has the request says so."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.05)]) as cluster:
        task = await streaming(cluster, "d0")
        cluster["d0"].forgets = True
        cluster["d0"].cut_links()
        answer = await task
        assert answer.tokens() == reference(make_call(max_tokens=60))
        assert answer.end.timing.migrations == 1
        await cluster.until_state("d0", "live")


async def test_frozen_worker_is_out_and_its_requests_go_on_within_three_seconds(
    store_url: str,
) -> None:
    """RB-090, G5: no pong for a second: no new work; for two: cut. Late tokens are dropped."""
    async with running_cluster(
        store_url, [prefill(), decoder("d0", token_delay_s=0.02), decoder("d1")]
    ) as cluster:
        cluster["d1"].is_draining = True
        await cluster.until_state("d1", "draining")
        task = await streaming(cluster, "d0", tokens=400)
        cluster["d1"].is_draining = False
        frozen = time.monotonic()
        cluster["d0"].freeze()
        await cluster.until_state("d0", "suspect", timeout_s=2.0)
        assert time.monotonic() - frozen < 2.0
        answer = await task
        assert answer.tokens() == reference(make_call(max_tokens=400))
        assert 2_000_000 < answer.end.timing.migration_gap_us < 4_000_000
        cluster["d0"].thaw()
        await cluster.until_state("d0", "live")
        call = make_call(prompt=[9] * 30)
        assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_restarted_worker_is_used_again_under_its_new_incarnation(store_url: str) -> None:
    """RB-021, RB-031, RB-044: same name, new life, on the same port and on another."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.05)]) as cluster:
        port = cluster["d0"].port
        for incarnation, where in ((2, port), (3, 0)):
            task = await streaming(cluster, "d0")
            await cluster["d0"].kill()
            await cluster.add(decoder(incarnation=incarnation, token_delay_s=0.002), where)
            assert (await task).tokens() == reference(make_call(max_tokens=60))
            await eventually(partial(_lives_again, cluster, "d0", incarnation))
            answer = await cluster.ask(make_call())
            assert answer.end.timing.decode_worker == "d0"
            assert cluster["d0"].jobs[0].work.expect_incarnation == incarnation
            cluster["d0"].token_delay_s = 0.05
        cluster.assert_clean()


async def test_another_worker_on_the_port_is_not_mistaken_for_the_old(store_url: str) -> None:
    """RB-031: the handshake checks the name; work never reaches the wrong one."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        port = cluster["d0"].port
        await cluster["d0"].kill()
        await cluster.add(decoder("d9", incarnation=5), port)
        await cluster.until_state("d9", "live")
        assert cluster.state_of("d0") != "live"
        await asyncio.sleep(1.0)  # the Link to d0 knocks there all the time
        assert cluster["d9"].num_attaches == 1
        answer = await cluster.ask(make_call())
        assert answer.end.timing.decode_worker == "d9"


async def test_draining_worker_finishes_and_gets_nothing_new(store_url: str) -> None:
    """RB-105: unroutable first, then finish."""
    async with running_cluster(
        store_url, [prefill(), decoder("d0", token_delay_s=0.01), decoder("d1")]
    ) as cluster:
        cluster["d1"].is_draining = True
        await cluster.until_state("d1", "draining")
        task = await streaming(cluster, "d0")
        cluster["d1"].is_draining = False
        await cluster.until_state("d1", "live")
        cluster["d0"].is_draining = True
        await cluster.until_state("d0", "draining")
        for seed in range(5):
            answer = await cluster.ask(make_call(prompt=[seed + 1] * 20))
            assert answer.end.timing.decode_worker == "d1"
        assert (await task).ends()


async def test_spread_follows_own_bookings_while_reports_stand_still(store_url: str) -> None:
    """RB-057, RB-058: 64 requests at once over 2+2 workers: within one of even."""
    workers = [prefill("p0"), prefill("p1")]
    workers += [decoder("d0", token_delay_s=0.2), decoder("d1", token_delay_s=0.2)]
    async with running_cluster(store_url, workers) as cluster:
        calls = [make_call(prompt=[i + 1] * 30, max_tokens=4) for i in range(64)]
        await asyncio.gather(*(cluster.ask(call) for call in calls))
        for first, second in (("p0", "p1"), ("d0", "d1")):
            assert abs(len(cluster[first].jobs) - len(cluster[second].jobs)) <= 12
        cluster.assert_clean()


async def test_requests_go_on_while_the_store_is_frozen(store: EmbeddedStore) -> None:
    """RB-096, G8: no failure; the wait for the store ends with the first deadlines."""
    async with running_cluster(store.url, [prefill(), decoder()]) as cluster:
        await cluster.ask(make_call())
        os.kill(store.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            for seed in range(20):
                call = make_call(prompt=[seed + 1] * 100)
                assert (await cluster.ask(call)).tokens() == reference(call)
            assert time.monotonic() - started < 2.0
            await eventually(lambda: cluster.router.is_degraded[0])
            # Longer than any lease: Links, not leases, say who lives.
            await asyncio.sleep(2.2)
            assert (await cluster.ask(make_call())).end.timing.mode == "REMOTE"
        finally:
            os.kill(store.pid, signal.SIGCONT)
        await eventually(lambda: not cluster.router.is_degraded[0])
        assert (await cluster.ask(make_call())).end.timing.mode == "REMOTE"


async def test_requests_go_on_after_the_store_was_killed(store: EmbeddedStore) -> None:
    """RB-097: a dead store is not a dead cluster, also for workers that are linked only."""
    async with running_cluster(store.url, [prefill(), decoder()]) as cluster:
        os.kill(store.pid, signal.SIGKILL)
        await eventually(lambda: cluster.router.is_degraded[0])
        for seed in range(10):
            call = make_call(prompt=[seed + 1] * 100)
            assert (await cluster.ask(call)).end.timing.mode == "REMOTE"
        assert cluster.router.is_ready()[0]


async def test_requests_go_on_while_the_store_is_emptied(store_url: str) -> None:
    """RB-033: flushed again and again; slot generations change under the router's feet."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        with redis.Redis.from_url(store_url) as admin:
            for seed in range(40):
                if seed % 5 == 0:
                    admin.flushall()
                call = make_call(prompt=[seed + 1] * 100)
                assert (await cluster.ask(call)).tokens() == reference(call)
                await asyncio.sleep(0.03)
        await eventually(lambda: all(w.slot is not None for w in cluster.router.view().workers))


async def test_starts_without_a_store_and_finds_everything_later(tmp_path: Path) -> None:
    """RB-116, RB-048: no order of starting is wrong."""
    with running_store(use_tcp=True) as first:
        url = first.url
    # The port is free again: nothing answers there.
    async with running_cluster(url, []) as cluster:
        assert cluster.router.is_degraded[0]
        await cluster.add(prefill())
        await cluster.add(decoder())
        late = EmbeddedStore.start(tmp_path, use_tcp=True, port=int(url.rsplit(":", 1)[1]))
        try:
            await cluster.until_state("p0", "live")
            await cluster.until_state("d0", "live")
            call = make_call()
            assert (await cluster.ask(call)).tokens() == reference(call)
        finally:
            late.stop()


async def test_hostile_store_costs_no_request(store_url: str) -> None:
    """I7: wrong types and nonsense under our keys."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        with redis.Redis.from_url(store_url) as admin:
            for name in ("w", "wi", "wv"):
                admin.delete(f"isthmus:{{cluster}}:{name}")
                admin.set(f"isthmus:{{cluster}}:{name}", b"\xff\x00nonsense")
            call = make_call()
            assert (await cluster.ask(call)).tokens() == reference(call)
            await eventually(lambda: cluster.router.is_degraded[0])
            assert (await cluster.ask(make_call())).ends()


async def test_prefix_hints_choose_the_worker_that_has_the_prompt(store_url: str) -> None:
    """One look-up finds the holder, although it is no less loaded than its peer."""
    workers = [prefill("p0"), prefill("p1"), decoder()]
    # A request whose look-up is late goes without, which is right and not what is asked here.
    patient = ReaderConfig(floor_s=5.0, cap_s=5.0)
    async with running_cluster(store_url, workers, reader_config=patient) as cluster:
        for holder, first in (("p0", 1), ("p1", 1001)):
            call = make_call(prompt=list(range(first, first + 256)))
            hashes = chain_hashes(HashScope(DIGEST, "", ""), call.token_ids)
            cluster[holder].lease.publish(hashes[3::4], ())
            await eventually(partial(_has_hints, store_url, 4))
            await cluster.ask(call)
            assert cluster[holder].jobs[-1].work.request_id == call.request_id
            # These workers keep nothing: what they did not honour is withdrawn.
            await eventually(partial(_has_hints, store_url, 0))


def _has_hints(store_url: str, wanted: int) -> bool:
    with redis.Redis.from_url(store_url) as admin:
        found = sum(int(admin.hlen(key)) for key in admin.keys("isthmus:{cluster}:b:*"))
    return found == wanted


async def test_churn_leaves_no_request_hanging(store_url: str) -> None:
    """RB-051: workers come and go under load; every request ends, nothing stays open."""
    workers = [prefill("p0"), prefill("p1"), decoder("d0"), decoder("d1")]
    async with running_cluster(store_url, workers) as cluster:
        for worker in cluster.workers.values():
            worker.token_delay_s = 0.005
        results: list[str] = []

        async def client(seed: int) -> None:
            for i in range(8):
                call = make_call(prompt=[seed + 1, i + 1] * 15, max_tokens=10, timeout_s=5.0)
                try:
                    answer = await cluster.ask(call)
                    assert answer.tokens() == reference(call)
                    results.append("ok")
                except RequestError as error:
                    results.append(error.spec.code)
                await asyncio.sleep(0.05)

        clients = [asyncio.create_task(client(seed)) for seed in range(10)]
        for incarnation, name in ((2, "d0"), (2, "p1"), (3, "d1"), (4, "p0")):
            await asyncio.sleep(0.25)
            await cluster[name].kill()
            role = "prefill" if name.startswith("p") else "decode"
            made = prefill(name) if role == "prefill" else decoder(name)
            made.incarnation, made.token_delay_s = Incarnation(incarnation), 0.005
            await cluster.add(made)
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        assert len(results) == 80
        assert set(results) == {"ok"}
        cluster.assert_clean()


async def test_all_workers_die_and_return_without_a_restart_of_the_router(store_url: str) -> None:
    """RB-052: recovery within five seconds of their return."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        await cluster["p0"].kill()
        await cluster["d0"].kill()
        # A worker is waited for while nobody knows whether it is gone; then nobody waits.
        await cluster.until_state("p0", "gone")
        await cluster.until_state("d0", "gone")
        for _ in range(5):
            with pytest.raises(RequestError) as caught:
                await cluster.ask(make_call())
            assert caught.value.spec.code == "no_workers"
        await cluster.add(prefill(incarnation=2))
        await cluster.add(decoder(incarnation=2))
        await cluster.until_state("p0", "live")
        await cluster.until_state("d0", "live")
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)


async def test_prefill_lost_under_a_receiver_starts_anew_elsewhere(store_url: str) -> None:
    """Decode has the ticket, no first token is here: both legs are replaced."""

    async def ticket_only(worker: FakeWorker, job: Job) -> None:
        worker.send_ticket(job)
        await asyncio.sleep(60)

    async def second_time(worker: FakeWorker, job: Job) -> None:
        await (never if job.work.attempt == 1 else run_job)(worker, job)

    workers = [prefill("p0", script=ticket_only), prefill("p1", script=ticket_only)]
    async with running_cluster(store_url, [*workers, decoder(script=second_time)]) as cluster:
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["d0"].jobs)
        first, second = ("p0", "p1") if cluster["p0"].jobs else ("p1", "p0")
        cluster[second].script = run_job
        await cluster[first].kill()
        assert (await task).tokens() == reference(call)
        assert [j.work.attempt for j in cluster["d0"].jobs] == [1, 2]
        assert [c.attempt for c in cluster["d0"].cancels] == [1]
        cluster.assert_clean()


async def test_decode_tokens_that_overtake_the_first_token_wait_for_it(store_url: str) -> None:
    """api.md rule 4: two Links have no order between them."""

    async def late_first(worker: FakeWorker, job: Job) -> None:
        worker.send_ticket(job)
        await asyncio.sleep(0.3)
        worker.send_tokens(job, 0, 0, 1)
        worker.send_done(job, handed_off=True)

    async with running_cluster(store_url, [prefill(script=late_first), decoder()]) as cluster:
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)


async def test_a_link_that_never_answers_blocks_nobody(store_url: str) -> None:
    """RB-089, RB-090: a worker that accepts and says nothing is not live; others serve."""
    mute = decoder("d1")
    mute.freeze()
    async with running_cluster(store_url, [prefill(), decoder("d0")]) as cluster:
        await cluster.add(mute)
        await cluster.until_state("d1", "suspect")
        answer = await cluster.ask(make_call())
        assert answer.end.timing.decode_worker == "d0"


async def test_worker_that_forgets_its_tokens_does_not_lengthen_the_answer(store_url: str) -> None:
    """RB-060: a worker that restarts its budget is cut at max_tokens."""

    async def too_many(worker: FakeWorker, job: Job) -> None:
        worker.send_tokens(job, 0, 1, 30)
        worker.send_done(job)

    async with running_cluster(store_url, [prefill(), decoder(script=too_many)]) as cluster:
        call = make_call(max_tokens=8)
        answer = await cluster.ask(call)
        assert answer.tokens() == reference(call)
        assert answer.end.completion_tokens == 8


@pytest.mark.parametrize("bad", ["choice", "gap", "endless"])
async def test_nonsense_from_a_worker_ends_that_request_only(store_url: str, bad: str) -> None:
    """I10: a broken worker's frames never break the router or other requests."""

    async def nonsense(worker: FakeWorker, job: Job) -> None:
        if bad == "choice":
            worker.send_tokens(job, 7, 1, 1)
        elif bad == "gap":
            worker.send_tokens(job, 0, 500, 300)
        else:
            worker.send_done(job, choice=0, handed_off=False, reason=0)

    workers: Sequence[FakeWorker] = [prefill(), decoder(script=nonsense)]
    no_retries = RouterConfig(max_retries=0, max_losses=0)
    async with running_cluster(store_url, workers, no_retries) as cluster:
        with pytest.raises(RequestError) as caught:
            await cluster.ask(make_call())
        assert caught.value.spec.code in ("internal", "worker_lost")
        cluster["d0"].script = run_job
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_a_worker_that_leaves_as_announced_is_no_warning(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics.enabled()
    async with running_cluster(
        store_url, [prefill(), decoder("d0"), decoder("d1")], hooks=MetricsHooks(metrics)
    ) as cluster:
        worker = cluster["d0"]
        worker.is_draining = True
        worker.report()
        await cluster.until_state("d0", "draining")
        worker.is_leaving = True
        with caplog.at_level("INFO", logger="services.router.link"):
            worker.cut_links()
            await eventually(lambda: "router.link_closed" in caplog.messages)
        assert "router.link_cut" not in caplog.messages
        assert 'isthmus_link_cuts_total{reason="closed"} 1.0' in metrics.render().decode()
    metrics.shutdown()
