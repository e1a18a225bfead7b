from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.common.clock import ManualClock
from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.registry.base import LoadReport
from services.registry.brief import Hold
from services.router.admission import Admission, AdmissionConfig
from services.router.api import GenerateCall
from services.router.gate import Gate
from services.router.hooks import RouterHooks
from services.router.legs import Progress
from services.router.policy import Links, PolicyConfig, RequestFacts, choose
from services.router.request import LogicalRequest
from services.router.timing import Marks
from services.router.view import SUSPECT, ClusterView, WorkerView
from tests.support.cluster import DigitText, eventually, make_call
from tests.unit.router.test_policy import make_worker

CONFIG = AdmissionConfig()
WAIT_S = 5.0
FULL = LoadReport(queued_uncached_tokens=4000, rate_tok_s=1000.0, kv_free=100, kv_total=100)
FREE = replace(FULL, queued_uncached_tokens=0)


class Heard(RouterHooks):
    """Keeps what the gate says."""

    def __init__(self) -> None:
        self.admissions: list[Admission] = []
        self.predictions: list[tuple[float, float]] = []

    def admitted(self, call: GenerateCall, admission: Admission) -> None:
        self.admissions.append(admission)

    def ttft_predicted(self, predicted_s: float, measured_s: float) -> None:
        self.predictions.append((predicted_s, measured_s))


class Rig:
    """A gate before workers whose loads a test sets; requests are sent as soon as they may."""

    def __init__(self, config: AdmissionConfig = CONFIG) -> None:
        self.clock = ManualClock(1000.0)
        self.workers: tuple[WorkerView, ...] = ()
        self.heard = Heard()
        self.broken = Links()
        self.lag_s = 0.0
        self.gate = Gate(
            config, PolicyConfig(), self, self.clock, self.heard, wait_s=WAIT_S,
            lag_s=lambda: self.lag_s,
        )  # fmt: skip
        self.started: list[str] = []
        self._last_number = 0
        self.set_loads(FREE)

    def view(self) -> ClusterView:
        return ClusterView(self.workers, self.clock.now())

    def links(self) -> Links:
        return self.broken

    def is_anyone_coming(self) -> bool:
        return any(w.state == SUSPECT for w in self.workers)

    def set_loads(self, prefill: LoadReport, decode: LoadReport = FREE) -> None:
        self.workers = (make_worker("p0", prefill), make_worker("d0", decode))

    def lose_all(self) -> None:
        """Let every worker be suspect, as after a moment's silence of all Links."""
        self.workers = tuple(replace(w, state=SUSPECT) for w in self.workers)

    def progress(self, name: str, *, mode: str = "REMOTE", **changes: object) -> Progress:
        self._last_number += 1
        now = self.clock.now()
        call = replace(make_call(request_id=name), received_at=now, deadline=now + 600.0, **changes)  # type: ignore[arg-type]  # a test's fields are right
        facts = RequestFacts(name, len(call.token_ids), call.sampling.max_tokens, force_mode=mode)
        return Progress(
            self._last_number, call, facts, (), LogicalRequest(call, DigitText()), Marks(now)
        )

    async def run(self, progress: Progress) -> None:
        """A request until a worker has it; it is over when its client leaves."""
        try:
            await self.gate.enter(progress, dict)
            self.started.append(progress.call.request_id)
            self.gate.sent(progress)
            await asyncio.Event().wait()
        finally:
            self.gate.ended(progress)

    async def begin(self, progress: Progress) -> asyncio.Task[None]:
        """Let a request run as far as it gets now."""
        task = asyncio.create_task(self.run(progress))
        for _ in range(3):
            await asyncio.sleep(0)
        self.gate.check_integrity()
        return task


async def leave(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End requests as their clients would."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def error_of(task: asyncio.Task[None]) -> RequestError:
    """Return what a request was refused with."""
    with pytest.raises(RequestError) as caught:
        await task
    return caught.value


async def test_requests_start_while_workers_have_room() -> None:
    rig = Rig()
    tasks = [await rig.begin(rig.progress(f"r{i}")) for i in range(3)]
    assert rig.started == ["r0", "r1", "r2"]
    assert [a.reason for a in rig.heard.admissions] == ["room"] * 3
    await leave(tasks)
    rig.gate.check_integrity()


async def test_what_is_on_its_way_to_prefill_makes_no_decode_worker_look_full() -> None:
    rig = Rig()
    rig.set_loads(replace(FREE, rate_tok_s=1e6), replace(FREE, rate_tok_s=0.0))

    def choose() -> dict[WorkerId, int]:
        raise AssertionError("it starts wherever it is sent")

    requests = [rig.progress(f"r{i}") for i in range(20)]
    assert sum(progress.facts.num_tokens for progress in requests) > 1024
    for progress in requests:
        await rig.gate.enter(progress, choose)
    for progress in requests:
        rig.gate.ended(progress)
    rig.gate.check_integrity()


async def test_hints_are_looked_up_only_for_requests_whose_start_depends_on_them() -> None:
    rig, asked = Rig(), list[Progress]()
    holder = rig.workers[0].worker_id

    async def enter(progress: Progress) -> None:
        def hints() -> dict[WorkerId, int]:
            asked.append(progress)
            return {holder: 1}

        await rig.gate.enter(progress, hints)

    free, hurried = rig.progress("free"), rig.progress("hurried", slo_ttft_ms=60_000)
    await enter(free)
    assert asked == []
    await enter(hurried)
    assert asked == [hurried]
    assert hurried.depth == {holder: 1}
    for progress in (free, hurried):
        rig.gate.ended(progress)
    rig.gate.check_integrity()


async def test_requests_wait_for_room_and_start_in_order() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    tasks = [await rig.begin(rig.progress(f"r{i}", priority=i)) for i in range(3)]
    assert rig.started == []
    assert rig.gate.num_queued == 3
    rig.set_loads(FREE)
    await eventually(lambda: len(rig.started) == 3)
    assert rig.started == ["r2", "r1", "r0"]
    assert rig.gate.num_queued == 0
    await leave(tasks)
    rig.gate.check_integrity()


async def test_what_was_let_go_counts_until_a_worker_has_it() -> None:
    """RB-058: a burst that comes before any load report does not all start at once."""
    rig = Rig()
    progresses = [rig.progress(f"r{i}") for i in range(15)]
    waiters = [asyncio.create_task(rig.gate.enter(p, dict)) for p in progresses]
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(task.done() for task in waiters) == 11  # 100 tokens each, 1,024 and one more
    assert rig.gate.num_queued == 4
    rig.gate.check_integrity()
    rig.gate.sent(progresses[0])
    await eventually(lambda: sum(task.done() for task in waiters) == 12)
    await leave(waiters)
    for progress in progresses:
        rig.gate.ended(progress)
    rig.gate.check_integrity()


async def test_full_decode_workers_hold_back_what_would_go_there() -> None:
    rig = Rig()
    rig.set_loads(FREE, replace(FREE, waiting=20))
    held = await rig.begin(rig.progress("remote"))
    staying = await rig.begin(rig.progress("stay", mode="STAY"))
    assert rig.started == []  # it waits its turn: the first may go to the same workers
    rig.set_loads(FREE)
    await eventually(lambda: rig.started == ["remote", "stay"])
    await leave([held, staying])


async def test_one_pool_does_not_hold_up_the_other() -> None:
    rig = Rig()
    rig.set_loads(FREE, FULL)
    local = await rig.begin(rig.progress("local", mode="LOCAL"))
    remote = await rig.begin(rig.progress("remote", mode="REMOTE"))
    assert rig.started == ["remote"]
    await leave([local, remote])
    rig.gate.check_integrity()


async def test_a_client_that_leaves_leaves_the_queue_at_once() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    tasks = [await rig.begin(rig.progress(f"r{i}")) for i in range(2)]
    await leave(tasks[:1])
    assert rig.gate.num_queued == 1
    rig.gate.check_integrity()
    await leave(tasks[1:])


async def test_the_deadline_ends_waiting() -> None:
    rig = Rig()
    progress = rig.progress("r")
    progress.call = replace(progress.call, deadline=rig.clock.now() + 0.5)
    rig.set_loads(FREE, replace(FREE, waiting=20))
    error = await error_of(await rig.begin(progress))
    assert error.spec.code == "deadline_exceeded"
    assert rig.gate.num_queued == 0
    rig.gate.check_integrity()


async def test_an_slo_that_passes_while_waiting_ends_it_with_a_time_to_come_back() -> None:
    rig = Rig()
    rig.set_loads(FREE, replace(FREE, waiting=20))
    error = await error_of(await rig.begin(rig.progress("r", slo_ttft_ms=300)))
    assert error.spec.code == "overloaded"
    assert error.retry_after_ms
    assert rig.gate.num_queued == 0
    rig.gate.check_integrity()


async def test_a_hopeless_slo_under_load_is_refused_at_once() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    error = await error_of(await rig.begin(rig.progress("r", slo_ttft_ms=1000)))
    assert error.spec.code == "overloaded"
    assert error.retry_after_ms == pytest.approx((4.0 - (0.8 - 0.1)) * 1000)
    assert rig.gate.num_queued == 0


async def test_a_router_that_is_too_slow_itself_refuses_what_would_be_late_by_it() -> None:
    rig = Rig()
    rig.lag_s = 0.2
    assert (await error_of(await rig.begin(rig.progress("r", slo_ttft_ms=500)))).retry_after_ms
    refused = rig.heard.admissions[-1]
    assert refused.reason == "ttft_slo"
    assert refused.predicted_ttft_s == pytest.approx(0.5)
    patient = [
        await rig.begin(rig.progress("s", slo_ttft_ms=900)),
        await rig.begin(rig.progress("t")),
    ]
    assert rig.started == ["s", "t"]
    hurried = rig.progress("u")
    hurried.call = replace(hurried.call, deadline=rig.clock.now() + 0.3)
    await error_of(await rig.begin(hurried))
    assert rig.heard.admissions[-1].reason == "deadline"
    await leave(patient)
    rig.gate.check_integrity()


async def test_the_policys_slo_holds_for_requests_that_name_none() -> None:
    rig = Rig(replace(CONFIG, slo_ttft_s=1.0))
    rig.set_loads(FULL)
    assert (await error_of(await rig.begin(rig.progress("r")))).spec.code == "overloaded"
    named = await rig.begin(rig.progress("s", slo_ttft_ms=60_000))
    assert rig.gate.num_queued == 1
    await leave([named])


async def test_a_full_queue_makes_room_for_who_has_less() -> None:
    rig = Rig(replace(CONFIG, max_queued=2))
    rig.set_loads(FULL)
    flood = [await rig.begin(rig.progress(f"a{i}", tenant="a")) for i in range(3)]
    assert (await error_of(flood[2])).spec.code == "overloaded"
    other = await rig.begin(rig.progress("b0", tenant="b"))
    assert (await error_of(flood[1])).spec.code == "overloaded"
    assert rig.gate.num_queued == 2
    rig.gate.check_integrity()
    rig.set_loads(FREE)
    await eventually(lambda: sorted(rig.started) == ["a0", "b0"])
    await leave([flood[0], other])


async def test_bytes_are_bounded_too() -> None:
    rig = Rig(replace(CONFIG, max_queued_bytes=3000))
    rig.set_loads(FULL)
    first = await rig.begin(rig.progress("r0"))
    assert (await error_of(await rig.begin(rig.progress("r1")))).spec.code == "overloaded"
    await leave([first])


async def test_without_workers_it_is_not_the_gate_that_answers() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    waiting = await rig.begin(rig.progress("r0"))
    rig.workers = ()
    await eventually(lambda: rig.started == ["r0"])
    late = await rig.begin(rig.progress("r1"))
    assert rig.started == ["r0", "r1"]
    await leave([waiting, late])
    rig.gate.check_integrity()


async def test_predictions_are_compared_with_what_came() -> None:
    rig = Rig()
    progress = rig.progress("r0")
    progress.decision = choose(progress.facts, rig.view(), {}, PolicyConfig())
    task = await rig.begin(progress)
    progress.marks.sent = rig.clock.now()
    rig.clock.advance(0.3)
    rig.gate.first_token(progress)
    (prediction,) = rig.heard.predictions
    assert prediction == pytest.approx((0.1, 0.3))
    assert rig.gate.ttft_ratio == pytest.approx((0.3 + 0.05) / (0.1 + 0.05))
    await leave([task])
    late = rig.progress("r1")
    late.num_retries = 1
    rig.gate.first_token(late)
    assert len(rig.heard.predictions) == 1


async def test_closing_wakes_whoever_waits() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    task = await rig.begin(rig.progress("r0"))
    rig.gate.close()
    assert (await error_of(task)).spec.code == "draining"
    assert rig.gate.num_queued == 0
    rig.gate.check_integrity()


async def test_what_waited_to_be_sent_is_measured_by_the_decision_it_was_sent_by() -> None:
    rig = Rig()
    progress = rig.progress("r0")
    task = await rig.begin(progress)  # nobody could be sent it yet
    rig.clock.advance(3.0)
    progress.decision = choose(progress.facts, rig.view(), {}, PolicyConfig())
    progress.marks.sent = rig.clock.now()
    rig.clock.advance(0.1)
    rig.gate.first_token(progress)
    assert rig.gate.ttft_ratio == pytest.approx(1.0)
    (prediction,) = rig.heard.predictions
    assert prediction == pytest.approx((3.1, 3.1))
    await leave([task])


async def test_a_prediction_of_nothing_teaches_nothing() -> None:
    rig = Rig()
    progress = rig.progress("r0")
    decision = choose(progress.facts, rig.view(), {}, PolicyConfig())
    terms = (decision.terms[0]._replace(prefill_s=0.0),)
    progress.decision = replace(decision, terms=terms)
    task = await rig.begin(progress)
    progress.marks.sent = rig.clock.now()
    rig.clock.advance(0.3)
    rig.gate.first_token(progress)
    assert rig.gate.ttft_ratio == 1.0
    await leave([task])


async def test_the_queue_is_kept_while_no_worker_can_be_used_for_a_moment() -> None:
    """What waits does not all start on the first worker that is back."""
    rig = Rig()
    rig.set_loads(FULL)
    tasks = [await rig.begin(rig.progress(f"r{i}")) for i in range(3)]
    rig.lose_all()
    rig.gate._start_others()
    rig.clock.advance(1.0)
    rig.gate._start_others()
    assert rig.gate.num_queued == 3
    rig.set_loads(FULL)
    rig.gate._start_others()
    rig.lose_all()
    rig.clock.advance(4.5)
    rig.gate._start_others()
    assert rig.gate.num_queued == 3  # the first time is over
    rig.set_loads(FREE)
    await eventually(lambda: rig.started == ["r0", "r1", "r2"])
    await leave(tasks)
    rig.gate.check_integrity()


async def test_workers_that_do_not_come_back_are_not_waited_for_for_ever() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    tasks = [await rig.begin(rig.progress(f"r{i}")) for i in range(2)]
    rig.lose_all()
    rig.gate._start_others()
    rig.clock.advance(5.0)
    rig.gate._start_others()
    assert [(await error_of(task)).spec.code for task in tasks] == ["no_workers"] * 2
    assert rig.started == []
    assert rig.gate.num_queued == 0
    rig.gate.check_integrity()


async def test_what_comes_while_no_worker_is_usable_waits_behind_what_the_queue_kept() -> None:
    """Before, it waited beside the queue and was sent the moment a worker was back."""
    rig = Rig()
    rig.set_loads(FULL)
    kept = [await rig.begin(rig.progress(f"kept{i}")) for i in range(2)]
    rig.lose_all()
    rig.gate._start_others()
    late = [await rig.begin(rig.progress(f"late{i}")) for i in range(2)]
    urgent = await rig.begin(rig.progress("urgent", priority=1))
    assert rig.gate.num_queued == 5
    assert [a.reason for a in rig.heard.admissions][-3:] == ["no_worker"] * 3
    rig.set_loads(FREE)
    await eventually(lambda: len(rig.started) == 5)
    assert rig.started == ["urgent", "kept0", "kept1", "late0", "late1"]
    await leave([*kept, *late, urgent])
    rig.gate.check_integrity()


async def test_workers_that_come_up_are_waited_for_with_an_empty_queue_too() -> None:
    rig = Rig()
    rig.lose_all()
    first = rig.progress("first")
    waiting = await rig.begin(first)
    rig.gate._start_others()
    rig.clock.advance(3.0)
    late = rig.progress("late", slo_ttft_ms=50_000)
    late_task = await rig.begin(late)
    rig.clock.advance(2.0)
    rig.gate._start_others()  # the first has waited as long as it may, the other has not
    assert (await error_of(waiting)).spec.code == "no_workers"
    assert rig.gate.num_queued == 1
    rig.set_loads(FREE)
    await eventually(lambda: rig.started == ["late"])
    assert (first.marks.queued_s, late.marks.queued_s) == (5.0, 2.0)
    await leave([late_task])
    rig.gate.check_integrity()


async def test_a_mode_of_its_own_holds_nobody_up_while_nobody_can_take_it() -> None:
    rig = Rig()
    rig.workers = (make_worker("d0", FREE), replace(make_worker("p0", FREE), state=SUSPECT))
    progress = rig.progress("own", mode="STAY")
    progress.call = replace(progress.call, force_mode="STAY")
    task = await rig.begin(progress)
    assert rig.started == ["own"]  # who sends it says what becomes of it
    await leave([task])


async def test_a_time_without_workers_makes_no_queue_look_slow() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    task = await rig.begin(rig.progress("r0"))
    rate = rig.gate._pools["prefill"].drain.rate(1000.0)
    rig.lose_all()
    for _ in range(4):
        rig.gate._start_others()
        rig.clock.advance(1.0)
    rig.set_loads(FULL)
    rig.gate._start_others()
    assert rig.gate._pools["prefill"].drain.rate(1000.0) == rate
    await leave([task])


async def test_a_full_queue_refuses_what_nobody_can_take() -> None:
    rig = Rig(replace(CONFIG, max_queued=1))
    rig.lose_all()
    task = await rig.begin(rig.progress("r0"))
    error = await error_of(await rig.begin(rig.progress("r1")))
    assert error.spec.code == "overloaded"
    assert error.retry_after_ms
    await leave([task])
    rig.gate.check_integrity()


async def test_room_at_a_worker_whose_link_is_broken_is_none() -> None:
    rig = Rig()
    rig.workers = (make_worker("p0", FREE), make_worker("p1", FULL), make_worker("d0", FREE))
    rig.broken = Links(broken=frozenset({(WorkerId("p0"), WorkerId("d0"))}))
    task = await rig.begin(rig.progress("r0"))
    assert rig.gate.num_queued == 1
    rig.broken = Links()
    await eventually(lambda: rig.started == ["r0"])
    await leave([task])
    rig.gate.check_integrity()


async def test_requests_of_a_cluster_scaled_to_zero_are_held_until_a_worker_comes() -> None:
    rig = Rig()
    rig.workers = ()
    rig.gate.hold = Hold(limit=2, timeout_s=600.0)
    held = [await rig.begin(rig.progress(name, slo_ttft_ms=5)) for name in ("a", "b")]
    assert (rig.gate.num_held, rig.started) == (2, [])
    rig.clock.advance(500.0)  # far beyond what is waited for a worker that is lost
    rig.set_loads(FREE)
    await eventually(lambda: rig.started == ["a", "b"])
    assert rig.gate.num_held == 0
    await leave(held)


async def test_no_more_are_held_than_the_policy_says() -> None:
    rig = Rig()
    rig.workers = ()
    rig.gate.hold = Hold(limit=1, timeout_s=600.0)
    held = await rig.begin(rig.progress("a"))
    refused = await error_of(await rig.begin(rig.progress("b")))
    assert refused.spec.code == "overloaded"
    assert rig.gate.num_held == 1
    await leave([held])


async def test_held_requests_end_when_no_worker_comes_in_time() -> None:
    rig = Rig()
    rig.workers = ()
    rig.gate.hold = Hold(limit=1, timeout_s=60.0)
    held = await rig.begin(rig.progress("a"))
    rig.clock.advance(1.0)
    await asyncio.sleep(0.03)  # the gate looks, and sees that nobody can take it
    rig.clock.advance(61.0)
    assert (await error_of(held)).spec.code == "no_workers"


async def test_tokens_that_wait_are_told_by_pool() -> None:
    rig = Rig()
    rig.set_loads(FULL)
    task = await rig.begin(rig.progress("a"))
    tokens = rig.gate.queued_tokens()
    assert tokens["prefill"] == len(make_call().token_ids)
    await leave([task])
    assert sum(rig.gate.queued_tokens().values()) == 0
