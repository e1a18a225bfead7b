"""The router over real gRPC Links and a real store, with scripted workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import redis

from services.common.errors import RequestError
from services.pb import common_pb2
from services.registry.reader import ReaderConfig
from services.router.api import ChoiceDelta, ChoiceEnd
from services.router.config import RouterConfig
from tests.support.cluster import NS, Cluster, eventually, make_call, reference, running_cluster
from tests.support.fake_worker import FakeWorker, Job, decode, run_job
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill
from tests.support.outputs import outputs_of
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration


async def error_of(cluster: Cluster, **options: Any) -> RequestError:
    """Run a request that must fail; return its error."""
    with pytest.raises(RequestError) as caught:
        await cluster.ask(make_call(**options))
    return caught.value


async def test_remote_runs_on_both_and_adds_up(store_url: str) -> None:
    """REMOTE: ticket passed on, tokens complete, stages telescope, bookings back (RB-059)."""
    p0 = prefill()
    p0.cached_tokens = 64
    async with running_cluster(store_url, [p0, decoder()]) as cluster:
        call = make_call()
        answer = await cluster.ask(call)
        assert answer.tokens() == reference(call)
        assert [e.finish_reason for e in answer.ends()] == ["length"]
        assert (answer.end.prompt_tokens, answer.end.completion_tokens) == (100, 8)
        assert answer.end.cached_tokens == 64
        timing = answer.end.timing
        assert (timing.mode, timing.prefill_worker, timing.decode_worker) == ("REMOTE", "p0", "d0")
        stages = (
            timing.router_us + timing.queue_us + timing.queue_prefill_us + timing.prefill_us
            + timing.handoff_us + timing.queue_decode_us + timing.decode_us + timing.unattributed_us
        )  # fmt: skip
        assert stages == timing.e2e_us > 0
        assert 0 < timing.ttft_us <= timing.e2e_us
        (job,) = cluster["d0"].jobs
        assert job.work.continue_from.ticket == b"ticket of p0"
        assert job.work.first_index == 1
        # RB-023: one id for both legs, made before either.
        assert {cluster[w].jobs[0].work.request_id for w in ("p0", "d0")} == {call.request_id}
        assert cluster["p0"].cancels == cluster["d0"].cancels == []
        cluster.assert_clean()


async def test_the_store_hears_of_the_handoff_not_only_of_the_end(store_url: str) -> None:
    """A prefill worker whose part is done has nothing coming, however long decode takes."""
    may_decode = asyncio.Event()

    async def when_told(worker: FakeWorker, job: Job) -> None:
        await may_decode.wait()
        await run_job(worker, job)

    workers, patient = [prefill(), decoder(script=when_told)], ReaderConfig(5.0, 5.0)
    async with running_cluster(store_url, workers, reader_config=patient) as cluster:
        with closing(redis.Redis.from_url(store_url)) as client:
            call = make_call()
            task = asyncio.create_task(cluster.ask(call))
            await eventually(lambda: cluster["d0"].jobs)

            def held() -> list[bytes | str]:
                return [key[-1:] for key in client.keys(f"isthmus:{{{NS}}}:r:*")]

            await eventually(lambda: held() == [b"d"])  # so ends the name of the decode worker's
            may_decode.set()
            assert (await task).tokens() == reference(call)
            await eventually(lambda: held() == [])
            cluster.assert_clean()


@pytest.mark.parametrize(("late_s", "chunks"), [(0.02, 3), (60.0, 0)])
async def test_end_of_a_short_answer_waits_a_moment_for_the_prefill_report(
    store_url: str, late_s: float, chunks: int
) -> None:
    """Decode may be done before the prefill worker's last frame is here, which may never come."""

    async def late_report(worker: FakeWorker, job: Job) -> None:
        worker.send_ticket(job)
        worker.send_tokens(job, 0, 0, 1)
        await asyncio.sleep(late_s)
        timing = common_pb2.Timing(prefill_us=100, prefill_chunks=3)
        worker.send_done(job, handed_off=True, timing=timing)

    async with running_cluster(store_url, [prefill(script=late_report), decoder()]) as cluster:
        call = make_call(max_tokens=2)
        answer = await asyncio.wait_for(cluster.ask(call), 5.0)
        assert answer.tokens() == reference(call)
        assert answer.end.timing.prefill_chunks == chunks
        await eventually(lambda: cluster.router.num_open == 0)


async def test_tokens_are_acknowledged(store_url: str) -> None:
    """api.md rule 2: workers may forget what the router has taken over."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        await cluster.ask(make_call(max_tokens=6))
        await eventually(lambda: cluster["d0"].acks.get((1, 0)) == 5)
        assert cluster["p0"].acks[(1, 0)] == 0


async def test_all_but_the_first_tokens_of_a_leg_go_the_short_way(store_url: str) -> None:
    """The tokens a client gets in the moment they come are billed and reported like the others."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        call = make_call(max_tokens=40)
        answer = await cluster.ask(call)
        assert answer.tokens() == reference(call)
        assert answer.end.completion_tokens == 40
        assert answer.ends() == [ChoiceEnd(0, "length", None, 40)]
        assert answer.num_short > 20
        for special in ({"n": 2}, {"stop": ("never",)}, {"logprobs": True}):
            call = make_call(max_tokens=40, **special)
            answer = await cluster.ask(call)
            assert answer.tokens() == reference(call)
            assert answer.num_short == 0
        cluster.assert_clean()


async def test_n_choices_share_one_work_item(store_url: str) -> None:
    """RB-036: every choice is whole, the prompt is counted once."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        call = make_call(n=3)
        answer = await cluster.ask(call)
        for choice in range(3):
            assert answer.tokens(choice) == reference(call, choice)
        assert answer.end.prompt_tokens == 100
        assert answer.end.completion_tokens == 24
        assert len(cluster["d0"].jobs) == 1


@pytest.mark.parametrize(("mode", "runs_on"), [("LOCAL", "d0"), ("STAY", "p0")])
async def test_forced_modes_run_whole_on_one_worker(
    store_url: str, mode: str, runs_on: str
) -> None:
    """LOCAL and STAY give the tokens REMOTE gives."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        call = make_call(force_mode=mode)
        answer = await cluster.ask(call)
        assert answer.tokens() == reference(call)
        assert answer.end.timing.mode == mode
        (job,) = cluster[runs_on].jobs
        assert job.kind == "whole"


async def test_one_pool_alone_serves_and_a_forced_mode_says_why_not(store_url: str) -> None:
    """Without decode workers the mode is STAY; forcing REMOTE is an error, not a surprise."""
    async with running_cluster(store_url, [prefill()]) as cluster:
        answer = await cluster.ask(make_call())
        assert answer.end.timing.mode == "STAY"
        error = await error_of(cluster, force_mode="REMOTE")
        assert error.spec.code == "no_workers"
        assert "REMOTE" in error.message


async def test_one_token_needs_no_handoff(store_url: str) -> None:
    """RB-071: with one token left no ticket is issued and nothing stays pinned."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        answer = await cluster.ask(make_call(max_tokens=1))
        assert answer.ends()[0].finish_reason == "length"
        assert cluster["d0"].jobs == []


async def test_stop_string_ends_the_work_and_overshoot_is_not_billed(store_url: str) -> None:
    """api.md rule 6: tokens beyond the stop are neither sent nor counted."""
    d0 = decoder(token_delay_s=0.002)
    async with running_cluster(store_url, [prefill(), d0]) as cluster:
        call = make_call(max_tokens=400)
        third = reference(call)[2]
        answer = await cluster.ask(make_call(max_tokens=400, stop=(f"<{third}>",)))
        (end,) = answer.ends()
        assert (end.finish_reason, end.stop, end.num_tokens) == ("stop", f"<{third}>", 3)
        assert answer.end.completion_tokens == 3
        assert f"<{third}>" not in answer.text()
        await eventually(lambda: cluster["d0"].cancels)
        cluster.assert_clean()


async def test_logprobs_carry_text_and_bytes(store_url: str) -> None:
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        call = make_call(logprobs=True)
        answer = await cluster.ask(call)
        chunks = [c for c in answer.outputs if isinstance(c, ChoiceDelta) and c.token_ids]
        shown = [entry for chunk in chunks for entry in chunk.logprobs]
        assert [entry.token_id for entry in shown] == reference(call)
        assert shown[0].raw == f"<{shown[0].token_id}>".encode()


async def test_without_migration_a_killed_worker_ends_its_requests_in_time_and_no_others(
    store_url: str,
) -> None:
    """RB-063, G6: cut streams end with worker_lost within a second; the other worker's go on."""
    workers = [prefill(), decoder("d0", token_delay_s=0.02), decoder("d1", token_delay_s=0.02)]
    async with running_cluster(store_url, workers, RouterConfig(max_losses=0)) as cluster:
        calls = [make_call(prompt=[i, 2, 3], max_tokens=60) for i in range(1, 9)]
        tasks = [asyncio.create_task(cluster.ask(call)) for call in calls]
        await eventually(
            lambda: sum(len(j.sent) > 2 for w in ("d0", "d1") for j in cluster[w].jobs) == 8
        )
        assert len(cluster["d0"].jobs) == len(cluster["d1"].jobs) == 4  # RB-057
        killed = time.monotonic()
        on_d0 = {job.work.request_id for job in cluster["d0"].jobs}
        await cluster["d0"].kill()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for call, result in zip(calls, results, strict=True):
            if call.request_id in on_d0:
                assert isinstance(result, RequestError)
                assert result.spec.code == "worker_lost"
            else:
                assert not isinstance(result, BaseException)
                assert result.tokens() == reference(call)
        assert cluster.state_of("d0") in ("suspect", "gone")
        assert time.monotonic() - killed < 5
        cluster.assert_clean()


async def test_death_is_told_within_a_second(store_url: str) -> None:
    workers = [prefill(), decoder(token_delay_s=0.05)]
    async with running_cluster(store_url, workers, RouterConfig(max_losses=0)) as cluster:
        task = asyncio.create_task(cluster.ask(make_call(max_tokens=100)))
        await eventually(lambda: any(len(j.sent) > 2 for j in cluster["d0"].jobs))
        killed = time.monotonic()
        await cluster["d0"].kill()
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.spec.code == "worker_lost"
        assert time.monotonic() - killed < 1.0


async def test_worker_death_before_any_token_is_retried_elsewhere(store_url: str) -> None:
    """The client sees one slow success; the second attempt is numbered 2."""

    async def never(worker: FakeWorker, job: Job) -> None:
        await asyncio.sleep(60)

    workers = [prefill("p0", script=never), prefill("p1", script=never), decoder()]
    async with running_cluster(store_url, workers) as cluster:
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["p0"].jobs or cluster["p1"].jobs)
        first, second = ("p0", "p1") if cluster["p0"].jobs else ("p1", "p0")
        cluster[second].script = run_job
        await cluster[first].kill()
        answer = await task
        assert answer.tokens() == reference(call)
        assert answer.end.timing.prefill_worker == second
        assert [j.work.attempt for j in cluster[second].jobs] == [2]
        cluster.assert_clean()


async def test_decode_death_before_its_first_token_uses_the_ticket_again(store_url: str) -> None:
    """The ticket names no decode worker: a second one gets it under a higher attempt (RB-020)."""

    async def never(worker: FakeWorker, job: Job) -> None:
        await asyncio.sleep(60)

    workers = [prefill(), decoder("d0", script=never), decoder("d1", script=never)]
    async with running_cluster(store_url, workers) as cluster:
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["d0"].jobs or cluster["d1"].jobs)
        first, second = ("d0", "d1") if cluster["d0"].jobs else ("d1", "d0")
        cluster[second].script = run_job
        await cluster[first].kill()
        assert (await task).tokens() == reference(call)
        (job,) = cluster[second].jobs
        assert (job.kind, job.work.attempt) == ("continue_from", 2)
        assert job.work.continue_from.ticket == b"ticket of p0"


async def test_last_decode_worker_gone_lets_prefill_stay(store_url: str) -> None:
    """Nobody to hand off to: prefill goes on, and token 0 is not delivered twice."""

    async def slow_ticket(worker: FakeWorker, job: Job) -> None:
        if job.kind == "whole":
            return await run_job(worker, job)
        await asyncio.sleep(0.3)
        return await run_job(worker, job)

    async with running_cluster(store_url, [prefill(script=slow_ticket), decoder()]) as cluster:
        call = make_call()
        task = asyncio.create_task(cluster.ask(call))
        await eventually(lambda: cluster["p0"].jobs)
        await cluster["d0"].kill()
        answer = await task
        assert answer.tokens() == reference(call)
        timing = answer.end.timing
        assert (timing.mode, timing.reason) == ("STAY", "no_decode_worker")
        assert [j.kind for j in cluster["p0"].jobs] == ["prefill", "whole"]


async def test_request_is_answered_by_who_does_not_drain_however_many_do(store_url: str) -> None:
    """RB-105: a pool that shrinks by two has two workers that refuse, one after the other."""
    async with running_cluster(store_url, [prefill("p0"), prefill("p1"), decoder()]) as cluster:
        cluster["p0"].refuse_with = cluster["p1"].refuse_with = "draining"
        call = make_call(prompt=[7] * 40)
        assert (await cluster.ask(call)).tokens() == reference(call)
        assert len(cluster["p0"].jobs) + len(cluster["p1"].jobs) == 2
        cluster.assert_clean()


@pytest.mark.parametrize("code", ["stale_incarnation", "overloaded"])
async def test_refused_work_is_tried_elsewhere_once(store_url: str, code: str) -> None:
    """api.md rule 3."""
    async with running_cluster(store_url, [prefill("p0"), prefill("p1"), decoder()]) as cluster:
        cluster["p0"].refuse_with = cluster["p1"].refuse_with = code
        if code == "overloaded":
            error = await error_of(cluster)
            assert error.spec.code == code
            assert len(cluster["p0"].jobs) + len(cluster["p1"].jobs) == 2
        cluster["p1"].refuse_with = None
        for seed in range(4):
            call = make_call(prompt=[seed + 1] * 40)
            assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_a_worker_that_begins_to_drain_may_refuse_any_number_at_once(
    store_url: str,
) -> None:
    """G10: they were on their way to it; a budget against overload must not end them."""
    async with running_cluster(store_url, [prefill("p0"), prefill("p1"), decoder()]) as cluster:
        cluster["p0"].refuse_with = "draining"
        calls = [make_call(prompt=[seed + 1] * 30) for seed in range(60)]
        answers = await asyncio.gather(*(cluster.ask(call) for call in calls))
        assert [answer.tokens() for answer in answers] == [reference(call) for call in calls]
        assert len(cluster["p0"].jobs) > 12, "too few were refused to empty the budget"
        cluster.assert_clean()


async def test_client_errors_are_passed_on_and_never_retried(store_url: str) -> None:
    """RB-054: nor do they take the worker out."""
    async with running_cluster(store_url, [prefill("p0"), decoder()]) as cluster:
        cluster["p0"].refuse_with = "prompt_too_large_for_pool"
        for _ in range(12):
            assert (await error_of(cluster)).spec.code == "prompt_too_large_for_pool"
        assert len(cluster["p0"].jobs) == 12
        cluster["p0"].refuse_with = None
        await cluster.ask(make_call())
        assert cluster.state_of("p0") == "live"


def _all_cancelled(jobs: Sequence[Job]) -> bool:
    return all(job.is_cancelled for job in jobs)


@pytest.mark.parametrize("code", ["prompt_too_large_for_pool", "invalid_argument"])
async def test_decode_that_refuses_lets_prefill_go_at_once(store_url: str, code: str) -> None:
    """RB-002: prefill has the KV ready; it is told to give it up, not left to its timeout."""
    async with running_cluster(store_url, [prefill(), decoder()]) as cluster:
        cluster["d0"].refuse_with = code
        for round_ in range(1, 6):
            error = await error_of(cluster, prompt=[round_] * 40)
            assert error.spec.code == code
            handed_off = [job for job in cluster["p0"].jobs if job.kind == "prefill"]
            await eventually(partial(_all_cancelled, handed_off), 1.0)
            assert len(handed_off) == round_
        cluster["d0"].refuse_with = None
        call = make_call()
        assert (await cluster.ask(call)).tokens() == reference(call)
        cluster.assert_clean()


async def test_handoff_that_decode_does_not_want_is_taken_back(store_url: str) -> None:
    """RB-002: a prefill worker answers itself then, and what was offered is given up."""
    async with running_cluster(store_url, [prefill("p0"), prefill("p1"), decoder()]) as cluster:
        cluster["d0"].refuse_with = "hash_mismatch"
        for seed in range(6):
            call = make_call(prompt=[seed + 1] * 40)
            assert (await cluster.ask(call)).tokens() == reference(call)
        for name in ("p0", "p1"):
            jobs = cluster[name].jobs
            for offered in [job for job in jobs if job.kind == "prefill"]:
                # A later attempt at the same worker fences the offer; else it has to be told.
                later = [job for job in jobs if job.work.request == offered.work.request]
                assert offered.is_cancelled or len(later) == 2
        assert {job.kind for name in ("p0", "p1") for job in cluster[name].jobs} == {
            "prefill", "whole"
        }  # fmt: skip
        cluster.assert_clean()


async def test_error_at_the_end_of_a_leg_keeps_its_code(store_url: str) -> None:
    async def fails(worker: FakeWorker, job: Job) -> None:
        await decode(worker, job, 1, count=2)
        worker.send_done(
            job,
            reason=common_pb2.FINISH_REASON_ERROR,
            error=common_pb2.Error(code="internal", message="step failed"),
        )

    async with running_cluster(store_url, [prefill(), decoder(script=fails)]) as cluster:
        error = await error_of(cluster)
        assert (error.spec.code, error.message) == ("internal", "step failed")
        cluster.assert_clean()


async def test_client_gone_cancels_at_both_workers(store_url: str) -> None:
    """RB-001: prefill, which handed off, is told as well: decode had nothing yet."""

    async def never(worker: FakeWorker, job: Job) -> None:
        await asyncio.sleep(60)

    async with running_cluster(store_url, [prefill(), decoder(script=never)]) as cluster:
        stream = outputs_of(partial(cluster.router.generate, make_call()))
        assert isinstance(await anext(stream), ChoiceDelta)  # before the handoff ended
        await eventually(lambda: cluster["d0"].jobs)
        await stream.aclose()
        await eventually(lambda: cluster["d0"].cancels and cluster["p0"].cancels, 1.0)
        cluster.assert_clean()


async def test_deadline_ends_the_request_on_every_hop(store_url: str) -> None:
    """RB-091, G2: the router enforces the deadline itself; workers get what remains of it."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.05)]) as cluster:
        started = time.monotonic()
        error = await error_of(cluster, max_tokens=500, timeout_s=0.4)
        assert error.spec.code == "deadline_exceeded"
        assert 0.35 < time.monotonic() - started < 0.8
        assert 0 < cluster["d0"].jobs[0].work.deadline_ms <= 400
        await eventually(lambda: cluster["d0"].cancels, 1.0)
        cluster.assert_clean()


async def test_slow_reader_is_cut_off_and_others_go_on(store_url: str) -> None:
    """RB-127: the buffer is bounded; the worker is told to stop."""
    config = RouterConfig(max_buffered_outputs=20)
    async with running_cluster(
        store_url, [prefill(), decoder(token_delay_s=0.001)], config
    ) as cluster:
        stream = outputs_of(partial(cluster.router.generate, make_call(max_tokens=500)))
        await anext(stream)
        await eventually(lambda: cluster["d0"].cancels)
        with pytest.raises(RequestError) as caught:
            async for _ in stream:
                pass
        assert caught.value.spec.code == "slow_reader"
        cluster.assert_clean()


async def test_no_workers_is_told_at_once_and_heals(store_url: str) -> None:
    """RB-052, RB-117: fast refusals with a time to come back; and not ready till then."""
    async with running_cluster(store_url, []) as cluster:
        started = time.monotonic()
        error = await error_of(cluster)
        assert error.spec.code == "no_workers"
        assert error.retry_after_ms
        assert time.monotonic() - started < 0.2
        assert cluster.router.is_ready()[0] is False
        await cluster.add(prefill())
        await cluster.add(decoder())
        await cluster.until_state("p0", "live")
        await cluster.until_state("d0", "live")
        assert (await cluster.ask(make_call())).end.timing.mode == "REMOTE"
        assert cluster.router.is_ready() == (True, "")


async def test_identity_mismatch_is_refused_by_name(store_url: str) -> None:
    """RB-022, RB-027: a worker of another model is never used, and the view says why."""
    wrong = decoder(identity={"rope": '{"theta":1}'})
    async with running_cluster(store_url, [prefill(), wrong]) as cluster:
        assert cluster.state_of("d0") == "incompatible"
        (view,) = [w for w in cluster.router.view().workers if w.worker_id == "d0"]
        assert "rope" in view.reason
        answer = await cluster.ask(make_call())
        assert answer.end.timing.mode == "STAY"
        error = await error_of(cluster, force_mode="LOCAL")
        assert "rope" in error.message


async def test_same_client_id_twice_does_not_collide(store_url: str) -> None:
    """RB-023: equal ids of two requests, at the same time."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.002)]) as cluster:
        one = make_call(prompt=[1] * 20, request_id="req-same")
        two = make_call(prompt=[2] * 20, request_id="req-same")
        answers = await asyncio.gather(cluster.ask(one), cluster.ask(two))
        assert answers[0].tokens() == reference(one)
        assert answers[1].tokens() == reference(two)


async def test_stop_drains_then_ends_what_is_left(store_url: str) -> None:
    """RB-109: open streams finish or get a code."""
    async with running_cluster(store_url, [prefill(), decoder(token_delay_s=0.01)]) as cluster:
        short = asyncio.create_task(cluster.ask(make_call(max_tokens=10)))
        long = asyncio.create_task(cluster.ask(make_call(max_tokens=2000)))
        await eventually(lambda: len(cluster["d0"].jobs) == 2)
        await cluster.router.stop(drain_s=0.5)
        assert (await short).ends()
        with pytest.raises(RequestError) as caught:
            await long
        assert caught.value.spec.code == "draining"
        assert (await error_of(cluster)).spec.code == "draining"


async def test_the_length_of_answers_is_learned_and_priced(store_url: str) -> None:
    """A price that guesses 256 tokens for ever would move long answers no better than short."""
    async with running_cluster(store_url, [prefill("p0"), decoder("d0")]) as cluster:
        prices = []
        for number in range(7):
            call = make_call(prompt=[number + 1] * 30, max_tokens=512, force_mode="REMOTE")
            await cluster.ask(call)
            report = cluster.router.explain(call.request_id)
            assert report is not None
            prices.append(report.choices[0].terms[0].decode_s)
        # (6 x 512 + 8 x 256) / 14 tokens are expected after six answers, 256 before; each of them
        # also comes a little slower, as more KV is resident.
        assert prices[-1] / prices[0] > 365 / 256
        assert prices == sorted(prices)
