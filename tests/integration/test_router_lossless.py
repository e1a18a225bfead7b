"""Workers die in the middle of answers and the clients get every token once, as if none had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from services.common.errors import RequestError
from services.common.ids import Incarnation
from services.pb import common_pb2
from services.router.api import ChoiceDelta
from services.router.config import LinkConfig, RouterConfig
from services.router.hedge import HedgeConfig
from tests.support.cluster import (
    Answer,
    Cluster,
    eventually,
    make_call,
    reference,
    running_cluster,
)
from tests.support.fake_worker import FakeWorker, Job, expected_token, run_job
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.outputs import outputs_of
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

TOKENS = 60


def _pools(**changes: Any) -> Sequence[FakeWorker]:
    return [
        prefill("p0"),
        prefill("p1"),
        decoder("d0", token_delay_s=0.01, **changes),
        decoder("d1", token_delay_s=0.01, **changes),
    ]


async def never(worker: FakeWorker, job: Job) -> None:
    """A script that accepts and says nothing."""
    await asyncio.sleep(60)


async def _until_streaming(cluster: Cluster, names: Sequence[str], tokens: int = 3) -> FakeWorker:
    """Wait until a worker has sent some tokens; return it."""

    def found() -> list[FakeWorker]:
        workers = [cluster[name] for name in names]
        return [w for w in workers if any(len(j.sent) >= tokens and not j.ends for j in w.jobs)]

    await eventually(found)
    return found()[0]


def _jobs(cluster: Cluster, kind: str) -> list[Job]:
    return [job for worker in cluster.workers.values() for job in worker.jobs if job.kind == kind]


async def test_a_stream_outlives_its_decode_worker(store_url: str) -> None:
    """RB-051, G6: prompt and tokens so far are prefilled where the prompt is cached."""
    async with running_cluster(store_url, _pools()) as cluster:
        call = make_call(max_tokens=TOKENS, logprobs=True)
        task = asyncio.create_task(cluster.ask(call))
        victim = await _until_streaming(cluster, ["d0", "d1"])
        await victim.kill()
        answer = await task
        assert answer.tokens() == reference(call)
        shown = [e for c in answer.outputs if isinstance(c, ChoiceDelta) for e in c.logprobs]
        assert [entry.token_id for entry in shown] == reference(call)
        end = answer.end
        assert (end.prompt_tokens, end.completion_tokens) == (100, TOKENS)
        timing = end.timing
        assert (timing.mode, timing.migrations) == ("REMOTE", 1)
        assert timing.decode_worker != victim.worker_id
        first, again = _jobs(cluster, "prefill")
        assert first.work.generated == b""
        assert again.work.first_index == len(again.work.generated) // 4 > 2
        holders = [w.worker_id for w in (cluster["p0"], cluster["p1"]) if first in w.jobs]
        assert holders == [timing.prefill_worker], "who has the prompt was not chosen again"
        attempts = [job.work.attempt for w in cluster.workers.values() for job in w.jobs]
        assert max(attempts) == 3
        cluster.assert_clean()


@pytest.mark.parametrize("mode", ["LOCAL", "STAY"])
async def test_a_whole_request_outlives_its_worker(store_url: str, mode: str) -> None:
    async with running_cluster(store_url, _pools()) as cluster:
        for name in ("p0", "p1"):
            cluster[name].token_delay_s = 0.01
        call = make_call(max_tokens=TOKENS, force_mode=mode)
        task = asyncio.create_task(cluster.ask(call))
        pool = ["d0", "d1"] if mode == "LOCAL" else ["p0", "p1"]
        victim = await _until_streaming(cluster, pool)
        await victim.kill()
        answer = await task
        assert answer.tokens() == reference(call)
        assert (answer.end.timing.mode, answer.end.timing.migrations) == (mode, 1)
        cluster.assert_clean()


async def test_choices_go_on_each_from_where_it_was(store_url: str) -> None:
    """One choice was over: it is neither made nor ended again."""

    async def uneven(worker: FakeWorker, job: Job) -> None:
        if job.work.resumed:
            return await run_job(worker, job)
        for choice, count in ((0, 4), (1, 9), (2, 1)):
            worker.send_tokens(job, choice, 1, count)
        worker.send_done(
            job, 2, reason=common_pb2.FINISH_REASON_STOP, all_choices=False
        )  # ended by a stop token
        return await asyncio.sleep(60)

    async with running_cluster(store_url, _pools(script=uneven)) as cluster:
        call = make_call(max_tokens=20, n=3)
        task = asyncio.create_task(cluster.ask(call))
        victim = await _until_streaming_choice(cluster)
        await victim.kill()
        answer = await task
        for choice in (0, 1):
            assert answer.tokens(choice) == reference(call, choice)
        assert answer.tokens(2) == reference(call, 2)[:2]
        assert [(e.choice, e.finish_reason) for e in answer.ends()] == [
            (2, "stop"), (0, "length"), (1, "length"),
        ]  # fmt: skip
        assert answer.end.completion_tokens == 20 + 20 + 2
        (again,) = _jobs(cluster, "whole")
        assert [(r.choice, len(r.token_ids) // 4) for r in again.work.resumed] == [(0, 5), (1, 10)]
        cluster.assert_clean()


async def _until_streaming_choice(cluster: Cluster) -> FakeWorker:
    pair = (cluster["d0"], cluster["d1"])
    await eventually(lambda: any(job.ends for w in pair for job in w.jobs))
    (worker,) = [w for w in pair if w.jobs]
    return worker


async def test_choices_without_a_first_token_start_with_the_others(store_url: str) -> None:
    """The prefill worker died between the first tokens of two choices."""

    async def half(worker: FakeWorker, job: Job) -> None:
        worker.send_ticket(job)
        worker.send_tokens(job, 1, 0, 1)
        await asyncio.sleep(60)

    workers = _pools()
    async with running_cluster(store_url, workers) as cluster:
        cluster["p0"].script = cluster["p1"].script = half
        cluster["d0"].script = cluster["d1"].script = _waits_unless_resumed
        call = make_call(max_tokens=20, n=2)
        stream = outputs_of(partial(cluster.router.generate, call))
        first = await anext(stream)
        (victim,) = [w for w in (cluster["p0"], cluster["p1"]) if w.jobs]
        await victim.kill()
        answer = Answer([first, *[output async for output in stream]])
        assert [answer.tokens(c) for c in (0, 1)] == [reference(call, c) for c in (0, 1)]
        assert [(r.choice, len(r.token_ids)) for r in _resumed(cluster)] == [(0, 0), (1, 4)]
        cluster.assert_clean()


async def _waits_unless_resumed(worker: FakeWorker, job: Job) -> None:
    if job.work.resumed:
        await run_job(worker, job)
    else:
        await asyncio.sleep(60)


def _resumed(cluster: Cluster) -> Sequence[Any]:
    (again,) = _jobs(cluster, "whole")
    return again.work.resumed


async def test_a_stop_string_is_found_across_the_move(store_url: str) -> None:
    """Its first half came from the worker that died."""
    async with running_cluster(store_url, _pools()) as cluster:
        prompt = list(range(1, 101))
        pair = [f"<{expected_token(prompt, 0, i)}>" for i in (4, 5)]
        cut = asyncio.Event()

        async def cut_after_five(worker: FakeWorker, job: Job) -> None:
            if len(job.work.generated) < 20:
                worker.send_tokens(job, 0, 1, 4)
                cut.set()
                return await asyncio.sleep(60)
            return await run_job(worker, job)

        cluster["d0"].script = cluster["d1"].script = cut_after_five
        call = make_call(prompt, max_tokens=TOKENS, stop=("".join(pair),))
        task = asyncio.create_task(cluster.ask(call))
        await cut.wait()
        victim = next(w for w in (cluster["d0"], cluster["d1"]) if w.jobs)
        await asyncio.sleep(0.05)
        await victim.kill()
        answer = await task
        (end,) = answer.ends()
        assert (end.finish_reason, end.stop, end.num_tokens) == ("stop", "".join(pair), 6)
        assert answer.text() == "".join(f"<{expected_token(prompt, 0, i)}>" for i in range(4))
        cluster.assert_clean()


async def test_an_answer_that_was_complete_is_not_sent_again(store_url: str) -> None:
    """The worker died between its last token and the word that it was the last."""

    async def no_end(worker: FakeWorker, job: Job) -> None:
        worker.send_tokens(job, 0, 1, job.work.max_tokens - 1)
        await asyncio.sleep(60)

    async with running_cluster(store_url, _pools(script=no_end)) as cluster:
        call = make_call(max_tokens=8)
        task = asyncio.create_task(cluster.ask(call))
        victim = await _until_streaming(cluster, ["d0", "d1"], tokens=1)
        await asyncio.sleep(0.05)
        await victim.kill()
        answer = await task
        assert answer.tokens() == reference(call)
        assert [e.finish_reason for e in answer.ends()] == ["length"]
        assert len(_jobs(cluster, "prefill")) == 1
        cluster.assert_clean()


async def test_one_death_after_the_other_is_survived_up_to_a_limit(store_url: str) -> None:
    workers = [prefill("p0"), *(decoder(f"d{i}", token_delay_s=0.01) for i in range(4))]
    async with running_cluster(store_url, workers, RouterConfig(max_losses=2)) as cluster:
        call = make_call(max_tokens=200)
        task = asyncio.create_task(cluster.ask(call))
        names = ["d0", "d1", "d2", "d3"]
        for _ in range(3):
            victim = await _until_streaming(cluster, names)
            names.remove(victim.worker_id)
            await victim.kill()
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.spec.code == "worker_lost"
        assert len(_jobs(cluster, "prefill")) == 3
        cluster.assert_clean()


async def test_a_request_that_was_lost_everywhere_is_not_passed_to_and_fro(
    store_url: str,
) -> None:
    """Prefill workers used to make one token each and give it on, as no decode worker was left."""

    async def mute_once(worker: FakeWorker, job: Job) -> None:
        await (never if len(worker.jobs) == 1 else run_job)(worker, job)

    workers = [prefill(script=mute_once), decoder(token_delay_s=0.01)]
    async with running_cluster(store_url, workers) as cluster:
        call = make_call(max_tokens=TOKENS)
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["p0"].jobs)
        for name in ("p0", "d0"):
            worker = cluster[name]
            worker.forgets = True
            worker.cut_links()
            await eventually(partial(_is_linked_again, worker))
            worker.forgets = False
            if name == "p0":
                await _until_streaming(cluster, ["d0"])
        assert (await task).tokens() == reference(call)
        assert len(cluster["p0"].jobs) + len(cluster["d0"].jobs) <= 4
        cluster.assert_clean()


def _is_linked_again(worker: FakeWorker) -> bool:
    return worker.num_attaches == 2


async def test_a_stream_waits_for_the_return_of_the_last_worker(store_url: str) -> None:
    patient = RouterConfig(wait_s=30.0)
    async with running_cluster(store_url, [decoder(token_delay_s=0.01)], patient) as cluster:
        call = make_call(max_tokens=TOKENS, timeout_s=40.0)
        task = asyncio.create_task(cluster.ask(call))
        victim = await _until_streaming(cluster, ["d0"])
        await victim.kill()
        await eventually(lambda: cluster.state_of("d0") != "live")
        again = decoder(incarnation=2)
        await cluster.add(again)
        answer = await task
        assert answer.tokens() == reference(call)
        assert again.jobs[0].work.first_index > 2
        cluster.assert_clean()


async def test_a_request_waits_while_every_link_is_made_anew(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router stood still, or a network did: the workers are there, the Links are not yet."""
    workers = [prefill(), decoder()]
    quick = LinkConfig(cut_after_s=1.2, connect_timeout_s=0.3)
    async with running_cluster(store_url, workers, RouterConfig(link=quick)) as cluster:
        for worker in workers:
            worker.freeze()
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        for worker in workers:
            await cluster.until_state(worker.worker_id, "suspect")
        late = make_call()
        late_task = asyncio.create_task(cluster.ask(late))
        conductor = cluster.router._conductor
        await eventually(lambda: conductor._waiting and cluster.router._gate.num_queued)
        with monkeypatch.context() as patched:
            patched.setattr(conductor, "begin", lambda _: pytest.fail("nobody can be found"))
            conductor._look_again()
        assert len(conductor._waiting) == 1
        for worker in workers:
            worker.thaw()
        assert (await task).tokens() == reference(call)
        answer = await late_task
        assert answer.tokens() == reference(late)
        timing = answer.end.timing
        assert timing.queue_us > timing.router_us
        cluster.assert_clean()


async def test_waiting_for_links_ends_by_its_cap_and_by_the_deadline(store_url: str) -> None:
    workers = [prefill(), decoder()]
    quick = LinkConfig(cut_after_s=1.2, connect_timeout_s=0.3)
    async with running_cluster(store_url, workers, RouterConfig(link=quick, wait_s=1.0)) as cluster:
        for worker in workers:
            worker.freeze()
        for worker in workers:
            await cluster.until_state(worker.worker_id, "suspect")
        codes = []
        for timeout_s in (0.3, 20.0):
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(cluster.ask(make_call(timeout_s=timeout_s)), 10.0)
            codes.append(caught.value.spec.code)
        assert codes == ["deadline_exceeded", "no_workers"]
        cluster.assert_clean()


# -- a worker that accepts and never answers -----------------------------------------------------


@pytest.mark.parametrize("mode", ["REMOTE", "LOCAL", "STAY", None])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_accepts_and_never_answers_costs_no_more_than_the_deadline(
    store_url: str, mode: str | None, role: str
) -> None:
    """G2, RB-090: whatever part of the work it got, the client has an end by its deadline."""
    workers = [prefill(), decoder()]
    async with running_cluster(store_url, workers) as cluster:
        for worker in workers:
            if worker.role == role:
                worker.script = never
        call = make_call(timeout_s=0.5, force_mode=mode)
        stuck = {"REMOTE": True, None: True, "LOCAL": role == "decode", "STAY": role == "prefill"}
        task = asyncio.create_task(cluster.ask(call))
        if stuck[mode]:
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(task, 5.0)
            assert caught.value.spec.code == "deadline_exceeded"
        else:
            assert (await task).tokens() == reference(call)
        cluster.assert_clean()


async def _ticket(worker: FakeWorker, job: Job) -> None:
    worker.send_ticket(job)
    await never(worker, job)


async def _first_token(worker: FakeWorker, job: Job) -> None:
    worker.send_tokens(job, 0, 0, 1)
    await never(worker, job)


async def _gap(worker: FakeWorker, job: Job) -> None:
    worker.send_tokens(job, 0, 3, 2)
    worker.send_done(job, all_choices=False)
    await never(worker, job)


async def _one_end(worker: FakeWorker, job: Job) -> None:
    worker.send_tokens(job, 0, job.work.first_index, job.work.max_tokens - job.work.first_index)
    worker.send_done(job, 0, all_choices=False)
    await never(worker, job)


@pytest.mark.parametrize(
    ("prefill_script", "decode_script"),
    [
        (_ticket, run_job),
        (_ticket, never),
        (_first_token, run_job),
        (run_job, _gap),
        (run_job, _one_end),
        (_one_end, run_job),
    ],
)
async def test_a_worker_that_stops_half_way_costs_no_more_than_the_deadline(
    store_url: str, prefill_script: Any, decode_script: Any
) -> None:
    """G2: after a ticket, a first token, tokens with a gap, one end of two: nobody waits on."""
    workers = [prefill(script=prefill_script), decoder(script=decode_script)]
    async with running_cluster(store_url, workers) as cluster:
        with pytest.raises(RequestError) as caught:
            await asyncio.wait_for(cluster.ask(make_call(n=2, timeout_s=0.5)), 5.0)
        assert caught.value.spec.code == "deadline_exceeded"
        cluster.assert_clean()


# -- the store is asked who takes over -------------------------------------------------------------


async def test_a_fault_in_asking_the_store_costs_no_request(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_args: object) -> None:
        raise RuntimeError("nobody expected this")

    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        monkeypatch.setattr(cluster.router._cluster.desk, "take_over", broken)
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_a_prefill_worker_may_die_while_the_store_is_asked(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had handed off: nothing of it was open any more, and its KV is gone."""
    answer = asyncio.Event()

    async def slow(*_args: object) -> None:
        await answer.wait()

    workers = [prefill("p0"), prefill("p1"), decoder()]
    async with running_cluster(store_url, workers) as cluster:
        monkeypatch.setattr(cluster.router._cluster.desk, "take_over", slow)
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: any(job.ends for job in _jobs(cluster, "prefill")))
        (victim,) = [w for w in (cluster["p0"], cluster["p1"]) if w.jobs]
        (progress,) = cluster.router._conductor.progresses()
        (leg,) = progress.legs
        await eventually(lambda: not leg.is_open)
        await victim.kill()
        await eventually(lambda: leg.is_lost)
        answer.set()
        assert (await task).tokens() == reference(call)
        (received,) = _jobs(cluster, "continue_from")
        assert received.work.continue_from.ticket != f"ticket of {victim.worker_id}".encode()
        cluster.assert_clean()


# -- poison ----------------------------------------------------------------------------------------

POISON = [66] * 40


async def test_a_request_that_kills_two_workers_is_quarantined(store_url: str) -> None:
    """Chaos plan 26, I10: the others go on, the fleet lives, the prompt is refused from then on."""

    async def deadly(worker: FakeWorker, job: Job) -> None:
        if job.work.token_ids[0] == POISON[0] and worker.role == "prefill":
            asyncio.get_running_loop().create_task(worker.kill())
            return
        await run_job(worker, job)

    workers = [*(prefill(f"p{i}", script=deadly) for i in range(4)), decoder(token_delay_s=0.01)]
    async with running_cluster(store_url, workers) as cluster:
        calls = [make_call(prompt=[seed + 1] * 30, max_tokens=50) for seed in range(8)]
        others = [asyncio.create_task(cluster.ask(call)) for call in calls]
        await eventually(lambda: len(cluster["d0"].jobs) == len(calls))
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                await cluster.ask(make_call(prompt=POISON))
            assert caught.value.spec.code == "quarantined"
        dead = [w for w in cluster.workers.values() if w._server is None]
        assert len(dead) == 2
        for call, task in zip(calls, others, strict=True):
            assert (await task).tokens() == reference(call)
        cluster.assert_clean()


async def test_suspects_of_one_death_are_sent_to_different_workers(store_url: str) -> None:
    """Two that were new at a dead worker could not be told apart at the next one."""
    workers = [*(prefill(f"p{i}", script=never) for i in range(3)), decoder()]
    async with running_cluster(store_url, workers) as cluster:
        calls = [make_call(prompt=[seed + 1] * 30) for seed in range(6)]
        tasks = [asyncio.create_task(cluster.ask(call)) for call in calls]
        pool = [cluster[f"p{i}"] for i in range(3)]
        await eventually(lambda: [len(w.jobs) for w in pool] == [2, 2, 2])
        suspects = {job.work.request for job in pool[0].jobs}
        await pool[0].kill()
        await eventually(lambda: [len(w.jobs) for w in pool[1:]] == [3, 3])
        assert {w.jobs[-1].work.request for w in pool[1:]} == suspects
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cluster.assert_clean()


# -- hedging ---------------------------------------------------------------------------------------


async def test_a_slow_prefill_gets_a_second_worker_and_the_loser_is_cancelled(
    store_url: str,
) -> None:
    hedge = HedgeConfig(enabled=True, min_samples=4, min_delay_s=0.1)
    workers = [prefill("p0"), prefill("p1"), decoder()]
    async with running_cluster(store_url, workers, RouterConfig(hedge=hedge)) as cluster:
        for seed in range(6):
            await cluster.ask(make_call(prompt=[seed + 1] * 30))
        pair = (cluster["p0"], cluster["p1"])
        for worker in pair:
            worker.jobs.clear()
            worker.script = never
        call = make_call(prompt=[77] * 30)
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: any(w.jobs for w in pair))
        first, second = pair if pair[0].jobs else pair[::-1]
        second.script = run_job
        answer = await task
        assert answer.tokens() == reference(call)
        assert answer.end.timing.prefill_worker == second.worker_id
        assert [job.work.attempt for job in second.jobs] == [2]
        await eventually(lambda: first.cancels)
        assert [cancel.attempt for cancel in first.cancels] == [1]
        assert len(_jobs(cluster, "continue_from")) == 7
        cluster.assert_clean()


async def test_all_who_wait_for_a_worker_that_stalls_get_a_second_one(store_url: str) -> None:
    """A stall keeps many waiting at once; a budget for two of them left the others to it."""

    async def mute_at_first(worker: FakeWorker, job: Job) -> None:
        await (never if job.work.attempt == 1 else run_job)(worker, job)

    hedge = HedgeConfig(enabled=True, min_samples=4, min_delay_s=0.1)
    workers = [prefill("p0"), prefill("p1"), decoder()]
    async with running_cluster(store_url, workers, RouterConfig(hedge=hedge)) as cluster:
        for seed in range(6):
            await cluster.ask(make_call(prompt=[seed + 1] * 30))
        for name in ("p0", "p1"):
            cluster[name].script = mute_at_first
        calls = [make_call(prompt=[70 + i] * 30, timeout_s=30.0) for i in range(8)]
        answers = await asyncio.gather(*map(cluster.ask, calls))
        assert [a.tokens() for a in answers] == [reference(call) for call in calls]
        cluster.assert_clean()


async def test_without_the_option_no_prefill_is_done_twice(store_url: str) -> None:
    async with running_cluster(store_url, [prefill("p0"), prefill("p1"), decoder()]) as cluster:
        for seed in range(40):
            await cluster.ask(make_call(prompt=[seed + 1] * 30, max_tokens=2))
        assert len(_jobs(cluster, "prefill")) == 40


async def test_a_new_life_under_the_old_name_gets_the_work_again(store_url: str) -> None:
    """RB-021: the only worker dies and is back before anybody noticed."""
    patient = RouterConfig(wait_s=30.0)
    async with running_cluster(store_url, [decoder(token_delay_s=0.02)], patient) as cluster:
        call = make_call(max_tokens=TOKENS, timeout_s=40.0)
        task = asyncio.create_task(cluster.ask(call))
        victim = await _until_streaming(cluster, ["d0"])
        port = victim.port
        await victim.kill()
        reborn = decoder(incarnation=2)
        await cluster.add(reborn, port)
        assert (await task).tokens() == reference(call)
        assert reborn.jobs[0].work.expect_incarnation == Incarnation(2)
        cluster.assert_clean()
