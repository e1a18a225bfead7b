"""A request that ends half way, wherever it is, leaves nothing behind on any hop.

It is held where it is by a named fault point that freezes a worker, or by slow steps. Then its
client goes away or its deadline passes, the worker goes on, and counters are read over the wire.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from services.chaos.client import Heard, call
from services.chaos.known_load import Body, computed_answers
from services.chaos.rig import CHANNEL_OPTIONS, Rig, RigPlan, RigWorker, held
from services.chaos.scripted_model import make_scripted_model
from services.common.model_manifest import read_manifest
from services.pb import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.generate import request

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

SPEED = "1500:15"  # prompt tokens a second, ms a step
SHORT, LONG = 40, 3600  # a long prompt takes two seconds and more
ANSWER = 400  # six seconds
LEASE_S = 2.0
GIVEN_UP_S = 2.4  # a frozen worker's requests go elsewhere
DEADLINE_S = 1.2  # before that, and before a long prompt is done
DECODE_DEADLINE_S = 5.0  # before an answer is
PATIENCE_S = 30.0
SETTINGS: dict[str, dict[str, object]] = {"transfer": {"lease_ms": round(LEASE_S * 1000)}}
FROZEN = {
    "before_pull": "decode-0",
    "mid_pull": "decode-0",
    "before_done": "decode-0",
    "after_ticket": "prefill-0",
    "mid_data": "prefill-0",
    "before_final": "prefill-0",
}
Holds = Callable[[], Awaitable[bool]]


class Cluster:
    """A rig of two workers of each role, and one client."""

    def __init__(self, rig: Rig, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        self.rig = rig
        self._stub = stub

    def worker(self, name: str) -> RigWorker:
        """Return a worker by its name."""
        return next(worker for worker in self.rig.workers if worker.name == name)

    def ask(self, body: Body, heard: Heard | None = None) -> asyncio.Task[Heard]:
        """Send a request in mode REMOTE; every prompt is another one, so none is cached."""
        limit_s = PATIENCE_S + body.timeout_ms / 1000
        return asyncio.create_task(
            call(self._stub, body, timeout_s=limit_s, mode="REMOTE", heard=heard)
        )

    async def renew(self, name: str, point: str) -> RigWorker:
        """Give a worker another life, with a fault point armed."""
        worker = self.worker(name)
        worker.child.send(signal.SIGKILL)
        await until_ended(worker)
        worker.spawn(point)
        await self.rig.until_live(PATIENCE_S)
        return worker

    async def only(self, name: str) -> None:
        """Let new work go to one worker of its role: the other one is drained."""
        await self.undrain(name)
        other = _other(name)
        stub = worker_pb2_grpc.WorkerStub(self.worker(other).channel)
        await stub.Drain(worker_pb2.DrainRequest(deadline_ms=1), timeout=PATIENCE_S)
        await until_true(lambda: self._is_only(name))

    async def _is_only(self, name: str) -> bool:
        status = await self.rig.routers[0].status()
        if status is None:
            return False
        live = {w.worker_id for w in status.workers if w.state == "live"}
        return name in live and _other(name) not in live

    async def undrain(self, name: str) -> None:
        """Let a worker take work again."""
        stub = worker_pb2_grpc.WorkerStub(self.worker(name).channel)
        await stub.Undrain(worker_pb2.UndrainRequest(), timeout=PATIENCE_S, wait_for_ready=True)

    async def both(self) -> None:
        """Let everybody take work."""
        for worker in self.rig.workers:
            await self.undrain(worker.name)
        await self.rig.until_live(PATIENCE_S)

    async def is_at_rest(self) -> bool:
        """Say whether neither workers nor the router hold anything for anybody."""
        statuses = await self.rig.statuses()
        if held(statuses):
            return False
        for status in statuses.values():
            assert status is not None
            assert status.blocks_free + status.blocks_cached == status.blocks_total
            if status.load.running or status.load.waiting:
                return False
        router = await self.rig.routers[0].status()
        if router is None or router.requests_open:
            return False
        return not any(worker.in_flight for worker in router.workers)


def _other(name: str) -> str:
    role, _, number = name.partition("-")
    return f"{role}-{1 - int(number)}"


@asynccontextmanager
async def running(model_dir: Path) -> AsyncIterator[Cluster]:
    plan = RigPlan(model_dir, speed=SPEED, settings=SETTINGS, planes=("zmq",))
    async with Rig(plan, lambda _worker: "") as rig:
        await rig.until_live(60.0)
        async with grpc.aio.insecure_channel(rig.grpc, options=CHANNEL_OPTIONS) as channel:
            yield Cluster(rig, inference_pb2_grpc.InferenceStub(channel))


async def until_true(check: Holds) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await check():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


async def until(check: Callable[[], object]) -> None:
    async def holds() -> bool:
        return bool(check())

    await until_true(holds)


async def until_answering(heard: Heard, at: int = 5) -> None:
    """Wait for a token beyond that one."""
    await until(lambda: len(heard.token_ids.get(0, ())) > at)


async def is_held(worker: RigWorker, task: asyncio.Task[Heard]) -> bool:
    """Wait until a worker stands still, or the request has ended before it did; say which."""
    await until(lambda: worker.is_frozen() or task.done())
    return worker.is_frozen()


async def until_ended(worker: RigWorker) -> None:
    await until(lambda: not worker.child.is_running)


def body(number: int, prompt: int, *, timeout_s: float = PATIENCE_S) -> Body:
    """A request whose prompt no other has."""
    ids = [3 + number % 200, *(3 + (number * 7 + i) % 250 for i in range(prompt - 1))]
    made = request(ids, max_tokens=ANSWER)
    made.ignore_eos, made.timeout_ms = True, round(timeout_s * 1000)
    return made


async def end(task: asyncio.Task[Heard], *, by_deadline: bool) -> None:
    """Take the client away, or wait until its time is over."""
    if by_deadline:
        heard = await task
        assert heard.code == "deadline_exceeded", heard
        return
    task.cancel()
    await asyncio.wait([task])


async def hold_in_prefill(cluster: Cluster, timeout_s: float) -> asyncio.Task[Heard]:
    heard = Heard()
    task = cluster.ask(body(1, LONG, timeout_s=timeout_s), heard)

    async def computes() -> bool:
        status = await cluster.worker("prefill-0").status()
        return task.done() or (status is not None and status.blocks_in_use > 0)

    await until_true(computes)
    assert not heard.token_ids, "its prompt was done too soon"
    return task


async def hold_in_queue(cluster: Cluster, timeout_s: float) -> asyncio.Task[Heard]:
    """Behind two prompts, which end as it does."""
    tasks = [cluster.ask(body(10 + i, LONG, timeout_s=timeout_s)) for i in range(3)]
    router = cluster.rig.routers[0]
    await until(lambda: router.metric("isthmus_queued") > 0)

    async def all_of_them() -> Heard:
        return (await asyncio.gather(*tasks))[-1]

    return asyncio.create_task(all_of_them())


async def hold_in_decode(cluster: Cluster, timeout_s: float) -> asyncio.Task[Heard]:
    heard = Heard()
    task = cluster.ask(body(2, SHORT, timeout_s=timeout_s), heard)
    await until_answering(heard)
    return task


async def end_while_it_is_worked_on(cluster: Cluster, *, by_deadline: bool) -> None:
    await cluster.only("prefill-0")
    holds = [(hold_in_prefill, DEADLINE_S), (hold_in_decode, DECODE_DEADLINE_S)]
    if not by_deadline:
        # Who knows how slow prefill is refuses to queue what would be too late.
        holds.append((hold_in_queue, PATIENCE_S))
    for hold, deadline_s in holds:
        task = await hold(cluster, deadline_s if by_deadline else PATIENCE_S)
        await end(task, by_deadline=by_deadline)
        await until_true(cluster.is_at_rest)
    await cluster.both()


async def end_in_a_handoff(cluster: Cluster, point: str, *, by_deadline: bool) -> None:
    """Its worker stands still at that point, and goes on when nobody waits any more."""
    worker = await cluster.renew(FROZEN[point], f"{point}:1:stop")
    await cluster.only(worker.name)
    timeout_s = DEADLINE_S if by_deadline else PATIENCE_S
    task = cluster.ask(body(20 + len(point), SHORT, timeout_s=timeout_s))
    while not await is_held(worker, task):  # on a busy machine it may be too late before
        task = cluster.ask(body(20 + len(point), SHORT, timeout_s=timeout_s))
    await end(task, by_deadline=by_deadline)
    worker.child.send(signal.SIGCONT)
    await until_true(cluster.is_at_rest)
    await cluster.both()


async def end_when_it_is_about_to_go_on_elsewhere(cluster: Cluster, leave: str) -> None:
    """The second decode worker stands still when it is about to take the request over."""
    target = await cluster.renew("decode-1", "before_pull:1:stop")
    await cluster.only("decode-0")
    source, heard = cluster.worker("decode-0"), Heard()
    task = cluster.ask(body(40 + len(leave), SHORT), heard)
    await until_answering(heard)
    if leave == "migration":
        await cluster.only("decode-1")
    else:
        await cluster.both()  # else nobody is seen who could take over
        source.child.send(signal.SIGKILL)
    await until(target.is_frozen)
    assert not task.done()
    await end(task, by_deadline=False)
    target.child.send(signal.SIGCONT)
    if leave == "replay":
        await until_ended(source)
        source.spawn()
    await cluster.both()
    await until_true(cluster.is_at_rest)


async def freeze_until_it_is_answered(cluster: Cluster, model_dir: Path, role: str) -> None:
    """What a worker says when it is back is of a fenced attempt."""
    asked, heard = body(60 + len(role), SHORT, timeout_s=60.0), Heard()
    worker = await cluster.renew(f"{role}-0", "after_ticket:1:stop" if role == "prefill" else "")
    await cluster.only(f"{role}-0")
    task, at = cluster.ask(asked, heard), 5
    if role == "decode":
        await until_answering(heard)
        worker.child.send(signal.SIGSTOP)
        at = len(heard.token_ids[0]) + 20  # more than was on its way
    await until(worker.is_frozen)
    await cluster.undrain(f"{role}-1")
    await until_answering(heard, at)
    worker.child.send(signal.SIGCONT)
    answer = await task
    assert not answer.code
    (expected,) = computed_answers([asked], read_manifest(model_dir))
    assert answer.token_ids == expected
    await cluster.both()
    await until_true(cluster.is_at_rest)


async def test_a_request_that_ends_anywhere_leaves_nothing_on_any_hop(tmp_path: Path) -> None:
    """G3, G4, RB-059: queue, prefill, every point of a handoff, decode, migration, replay."""
    async with running(make_scripted_model(tmp_path)) as cluster:
        for by_deadline in (True, False):
            await end_while_it_is_worked_on(cluster, by_deadline=by_deadline)
            for point in ("before_pull", "after_ticket") if by_deadline else FROZEN:
                await end_in_a_handoff(cluster, point, by_deadline=by_deadline)
        for leave in ("migration", "replay"):
            await end_when_it_is_about_to_go_on_elsewhere(cluster, leave)


async def test_a_worker_that_is_back_after_its_request_went_elsewhere_leaves_nothing(
    tmp_path: Path,
) -> None:
    """I4, I6: its blocks are free, no token is double, the answer is the one of any worker."""
    model_dir = make_scripted_model(tmp_path)
    async with running(model_dir) as cluster:
        for role in ("decode", "prefill"):
            await freeze_until_it_is_answered(cluster, model_dir, role)
