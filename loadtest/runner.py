"""Sends a schedule to a server: on time whatever it answers, bounded, and stopped cleanly.

An open loop never waits for answers. What is due while `max_in_flight` requests are open is not
sent: it is a failure of this client, recorded as the error `client_full`. Only an offline load and
a closed loop, which have no instants to keep, wait for room.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from loadtest.records import PlannedRequest, RequestRecord, Sample, Status
from loadtest.run_log import RunLog
from loadtest.schedule import MAX_REQUESTS, Schedule, Session
from loadtest.target import ClusterLook, LiveTarget, LookingTarget, TargetFacts
from services.common.wording import counted

CLIENT_FULL = "client_full"
_TICK_S = 0.02  # how often the lag of the loop is looked at
_SAMPLE_S = 0.1
_LOOK_S = 1.0  # rare: a look costs the server something
_WARMING_AT_ONCE = 8
_EARLY_S = 50e-6
_CANCEL_S = 5.0  # for targets to let go of cancelled requests

_Children: TypeAlias = dict[int | None, list[PlannedRequest]]  # by the request they wait for


class RunClock:
    """Seconds since the run began, monotonic; 0 until then.

    Of whole nanoseconds, which are short in the raw file.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began: float | None = None

    def start(self) -> None:
        """Begin the run now."""
        self._began = self._now()

    def __call__(self) -> float:
        """Return the time of the run."""
        return 0.0 if self._began is None else round(self._now() - self._began, 9)


class Runner:
    """One run of a schedule; `log` and `in_flight` are current while it goes on."""

    def __init__(
        self, schedule: Schedule, target: LiveTarget, facts: TargetFacts, clock: RunClock
    ) -> None:
        self.scenario = schedule.scenario
        self.log = RunLog(facts, datetime.now(UTC).isoformat(timespec="seconds"))
        self.in_flight = 0
        self.clock = clock
        self._schedule = schedule
        self._target = target
        limit = self.scenario.client.max_in_flight
        self._room = asyncio.Semaphore(limit) if schedule.waits_for_room else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sleepers: set[asyncio.Future[None]] = set()
        self._stopped = asyncio.Event()
        self._fault: BaseException | None = None
        self._is_over = False  # nothing more is sent
        self._is_full = False  # a closed loop has sent all it may
        self._num_cut = 0
        self._seen: ClusterLook | None = None

    def stop(self, why: str = "") -> None:
        """End the run now, with what there is; the result says why if that is told."""
        if why and not self._stopped.is_set():
            self._note(why)
        self.log.is_interrupted = True
        self._stopped.set()

    async def run(self) -> RunLog:
        """Run to the end of the schedule or of its budget, or until stopped; once."""
        sessions = [] if self._schedule.is_closed else self._schedule.sessions()
        if self.scenario.cache == "warm":
            await self._warm_in_time()
        with _rare_collections():
            self.clock.start()
            helpers = [asyncio.ensure_future(self._sample()), asyncio.ensure_future(self._look())]
            work = asyncio.ensure_future(self._send_all(sessions))
            helpers.append(asyncio.ensure_future(self._wait_until_stopped(work)))
            try:
                await asyncio.wait((work,), timeout=self.scenario.budget_s)
                if not work.done():
                    self.log.is_interrupted = True
                    self._note(f"the budget of {self.scenario.budget_s:g} s ended the run")
            finally:
                self._is_over = True
                await self._cancel(work, *helpers, *self._tasks)
                self.log.duration_s = self.clock()
        for task in (work, *helpers):
            if not task.done():
                self._note(
                    f"the target did not let go of what was cancelled within {_CANCEL_S:g} s"
                )
            elif not task.cancelled():
                task.result()  # a fault of ours is no result
        if self._fault is not None:
            raise self._fault
        if self._num_cut:
            self._note(f"the end of the run cut {counted(self._num_cut, 'session')} short")
        return self.log

    async def _wait_until_stopped(self, work: asyncio.Future[None]) -> None:
        await self._stopped.wait()
        work.cancel()

    async def _cancel(self, *tasks: asyncio.Future[Any]) -> None:  # Any: whatever they return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_S)

    def _note(self, sentence: str) -> None:
        self.log.notes.append(sentence)

    # -- what is due when ----------------------------------------------------------------------

    async def _send_all(self, sessions: Sequence[Session]) -> None:
        end_s = self.scenario.phases.end_s
        if self._schedule.is_closed:
            for lane in range(self._schedule.num_lanes):
                self._spawn(self._run_lane(lane))
        for session in sessions:
            due_s = session[0].at_s or 0.0
            await self._sleep_until(due_s)
            self._spawn(self._run_session(session, due_s))
        if end_s is not None:
            await self._sleep_until(end_s)  # later turns of sessions may be due until then
        elif self._tasks:
            await asyncio.wait(self._tasks)
        self._is_over = True
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.scenario.client.drain_s)

    async def _run_lane(self, lane: int) -> None:
        turn = 0
        while not self._is_over and len(self.log.records) < MAX_REQUESTS:
            session = self._schedule.next_of_lane(lane, turn, self.clock())
            await self._run_session(session, self.clock() + session[0].wait_s)
            turn += 1
        if not self._is_over and not self._is_full:  # a server that fails at once is asked fast
            self._is_full = True
            self._note(f"after {MAX_REQUESTS} requests users began no more sessions")

    async def _run_session(self, session: Session, due_s: float) -> None:
        children: _Children = defaultdict(list)
        for request in session[1:]:
            children[request.after].append(request)
        if not await self._run_branch(session[0], due_s, children):
            self._num_cut += 1

    async def _run_branch(self, request: PlannedRequest, due_s: float, children: _Children) -> bool:
        """Send a request when it is due, and all that waits for its end; False if cut short."""
        await self._sleep_until(due_s)
        if self._is_over:
            return False
        await self._send(request, due_s)
        ended_s = self.clock()
        later = [
            self._run_branch(child, max(child.at_s or 0.0, ended_s + child.wait_s), children)
            for child in children.get(request.number, ())
        ]
        if len(later) == 1:
            return await later[0]
        return all(await asyncio.gather(*later))

    async def _sleep_until(self, due_s: float) -> None:
        """Wait until then, or until nothing more is sent."""
        delay_s = due_s - self.clock()
        if delay_s > 0 and not self._is_over:
            loop = asyncio.get_running_loop()
            sleeper: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(delay_s, _wake, sleeper)
            self._sleepers.add(sleeper)
            try:
                await sleeper
            finally:
                timer.cancel()
                self._sleepers.discard(sleeper)
        # Timers are rounded to milliseconds, and down as often as up.
        while due_s - self.clock() > _EARLY_S and not self._is_over:  # noqa: ASYNC110 - a part of one
            await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
            self._stopped.set()

    # -- one request ---------------------------------------------------------------------------

    async def _send(self, request: PlannedRequest, due_s: float) -> None:
        record = RequestRecord(
            number=request.number,
            scheduled_s=due_s,
            phase=self.scenario.phases.at(due_s),
            session=request.session,
            kind=request.kind,
            tenant=request.tenant,
            priority=request.priority,
            isl=request.prompt.num_tokens,
        )
        self.log.records.append(record)
        async with self._room or contextlib.nullcontext():
            if self._is_over:
                return  # there was no room before the end
            if self.in_flight >= self.scenario.client.max_in_flight:
                self.log.num_shed += 1
                record.status, record.code = Status.ERROR, CLIENT_FULL
                return
            self.in_flight += 1
            try:
                await self._target.send(request, record, self.scenario.client.timeout_s)
            finally:
                self.in_flight -= 1

    async def _warm_in_time(self) -> None:
        """Warm the cache; the budget bounds that too, and a stop ends it."""
        warming = asyncio.ensure_future(self._warm())
        stopping = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait(
            (warming, stopping),
            timeout=self.scenario.budget_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        is_warm = warming.done()
        await self._cancel(warming, stopping)
        if is_warm:
            warming.result()  # a fault of ours is no result
        else:
            self._note("the run ended before the cache was warm")
            self.stop()

    async def _warm(self) -> None:
        """Send every shared prefix once; what comes of it is no part of the run."""
        requests = self._schedule.warming()
        if not requests:
            self._note("nothing is shared in this workload, so there was no cache to warm")
        gate = asyncio.Semaphore(_WARMING_AT_ONCE)
        failed: list[RequestRecord] = []

        async def send(request: PlannedRequest) -> None:
            record = RequestRecord(request.number, 0.0)
            async with gate:
                if not self._stopped.is_set():
                    await self._target.send(request, record, self.scenario.client.timeout_s)
            if record.status is not Status.OK:
                failed.append(record)

        await asyncio.gather(*map(send, requests))
        if failed:
            self._note(f"{len(failed)} of {len(requests)} prefixes could not be sent ahead")

    async def _look(self) -> None:
        """See what is behind the target, now and then; not again if it cannot be seen at first."""
        if not isinstance(self._target, LookingTarget):
            return
        self._seen = await self._target.look()
        while self._seen is not None:
            await asyncio.sleep(_LOOK_S)
            self._seen = await self._target.look() or self._seen

    async def _sample(self) -> None:
        """Look at this client's own loop: what it does late it measures late."""
        worst_s, next_s = 0.0, 0.0
        while True:
            wanted = self.clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = self.clock()
            worst_s = max(worst_s, now - wanted)
            if now >= next_s:
                self.log.samples.append(self._sample_of(now, worst_s))
                worst_s, next_s = 0.0, now + _SAMPLE_S

    def _sample_of(self, now: float, lag_s: float) -> Sample:
        if self._seen is None:
            return Sample(now, self.in_flight, lag_s)
        seen = self._seen
        return Sample(now, self.in_flight, lag_s, seen.replicas, seen.queued, seen.pools)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Keep the collector from walking over all plans and records in the middle of a measurement."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
