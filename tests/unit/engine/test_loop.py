"""The engine thread: commands in, events out, faults contained, never silently dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from services.common.clock import ManualClock, SystemClock
from services.common.errors import ConfigError, RequestError
from services.engine.api import (
    BlocksReserved,
    CacheDelta,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    EndReason,
    EngineEvent,
    EngineRequest,
    FirstToken,
    PrefillFinished,
    Refused,
    RequestKey,
    TokensOut,
    WorkKind,
)
from services.engine.loop import EngineLoop, Executor
from services.engine.plan import StepPlan, StepResult
from services.engine.runner import EngineFault
from tests.support.engine_rig import EngineRig, Event, greedy, make_request, prompt_of
from tests.support.fake_model import FakeModel, reference_tokens

FAR = time.monotonic() + 1e6


class Listener:
    """Collects events; `wait` blocks until a condition on them holds."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.deltas: list[CacheDelta] = []
        self._changed = threading.Condition()

    def on_events(self, events: Sequence[EngineEvent]) -> None:
        with self._changed:
            self.events.extend(events)
            self._changed.notify_all()

    def on_delta(self, delta: CacheDelta) -> None:
        self.deltas.append(delta)

    def of(self, kind: type[Event], key: str = "a") -> list[Event]:
        return [e for e in self.events if isinstance(e, kind) and e.key == key]

    def tokens(self, key: str) -> list[int]:
        outs = [event for event in self.events if isinstance(event, TokensOut) and event.key == key]
        return [token_id for event in outs for token_id in event.token_ids]

    def wait(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10)

    def wait_end(self, key: str = "a") -> ChoiceDone:
        self.wait(lambda: any(d.all_choices for d in self.of(ChoiceDone, key)))
        done = self.of(ChoiceDone, key)[-1]
        assert isinstance(done, ChoiceDone)
        return done


class Gate:
    """An executor whose steps wait, or break, when told to."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.open = threading.Event()
        self.open.set()
        self.in_step = threading.Event()
        self.fault: Exception | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.in_step.set()
        assert self.open.wait(10)
        if self.fault is not None:
            raise self.fault
        return self.inner.execute(plan)


class Watch:
    """An executor that asks something before every step."""

    def __init__(self, inner: Executor, ask: Callable[[], bool]) -> None:
        self.inner = inner
        self.ask = ask
        self.seen: list[bool] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.seen.append(self.ask())
        return self.inner.execute(plan)


class Engine:
    """A running engine over a fake model."""

    def __init__(self, model: FakeModel | None = None, **config: object) -> None:
        self.rig = EngineRig(num_blocks=256, model=model, **{"idle_wait_s": 0.02} | config)
        self.gate = Gate(self.rig.runner)
        self.listener = Listener()
        self.loop = EngineLoop(self.rig.scheduler, self.gate, SystemClock())
        self.loop.start(self.listener.on_events, self.listener.on_delta)

    def submit(self, key: str = "a", **changes: Any) -> EngineRequest:
        fields: dict[str, Any] = {"prompt": prompt_of(40), "deadline": FAR} | changes
        request = make_request(key, **fields)
        self.loop.submit(request)
        return request


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def factory(model: FakeModel | None = None, **config: object) -> Engine:
        engines.append(Engine(model, **config))
        return engines[-1]

    yield factory
    for engine in engines:
        engine.gate.open.set()
        engine.loop.stop(5)


def test_many_requests_from_many_threads(make: Make) -> None:
    engine = make()
    keys = [f"k{i}" for i in range(12)]
    threads = [
        threading.Thread(target=lambda i=i: engine.submit(keys[i], prompt=prompt_of(20 + i, i)))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, key in enumerate(keys):
        engine.listener.wait_end(key)
        assert engine.listener.tokens(key) == reference_tokens(prompt_of(20 + i, i), greedy())
    load = engine.loop.load()
    assert (load.requests_open, load.blocks_in_use) == (0, 0)


def test_handoff_between_two_engines_gives_the_tokens_of_one(make: Make) -> None:
    prefill, decode = make(), make()
    prompt = prompt_of(72)
    prefill.submit("b", prompt=prompt, kind=WorkKind.PREFILL)
    prefill.listener.wait(lambda: prefill.listener.of(PrefillFinished, "b"))
    finished = prefill.listener.of(PrefillFinished, "b")[0]
    assert isinstance(finished, PrefillFinished)
    decode.submit("b", prompt=prompt, kind=WorkKind.CONTINUE)
    decode.listener.wait(lambda: decode.listener.of(BlocksReserved, "b"))
    reserved = decode.listener.of(BlocksReserved, "b")[0]
    assert isinstance(reserved, BlocksReserved)
    decode.rig.write_kv("b", reserved)
    decode.loop.received(RequestKey("b"), finished.first, finished.prefill_us)
    done = decode.listener.wait_end("b")
    prefill.loop.source_released(RequestKey("b"))
    both = prefill.listener.tokens("b") + decode.listener.tokens("b")
    assert both == reference_tokens(prompt, greedy())
    assert done.times.handoff_us > 0


def test_a_receive_is_asked_for_before_the_step_that_is_due(make: Make) -> None:
    """A decode worker that is busy opens its tickets at once, not one step late."""
    engine = make()
    watch = Watch(engine.gate.inner, lambda: bool(engine.listener.of(BlocksReserved, "b")))
    engine.gate.inner = watch
    engine.gate.open.clear()
    engine.submit("busy", sampling=greedy(max_tokens=4))
    assert engine.gate.in_step.wait(5)
    engine.submit("b", kind=WorkKind.CONTINUE)
    engine.gate.open.set()
    engine.listener.wait_end("busy")
    assert watch.seen[1:] == [True] * (len(watch.seen) - 1)
    assert len(watch.seen) > 2


def test_cache_deltas_tell_what_is_cached(make: Make) -> None:
    engine = make()
    request = engine.submit(prompt=prompt_of(130))
    engine.listener.wait_end()
    hints = request.block_hashes[3::4]
    assert len(hints) == 2
    assert engine.loop.cached_hashes() == hints
    added = [block_hash for delta in engine.listener.deltas for block_hash in delta.added]
    assert tuple(added) == hints


def test_cancel_of_a_running_request_ends_it_within_a_step(make: Make) -> None:
    engine = make()
    engine.submit(sampling=greedy(3000))
    engine.listener.wait(lambda: engine.listener.tokens("a"))
    engine.loop.cancel(RequestKey("a"), "enough")
    assert engine.listener.wait_end().reason is EndReason.CANCELLED
    assert engine.loop.load().blocks_in_use == 0
    engine.loop.cancel(RequestKey("nobody"), "unknown keys are ignored")


def test_deadline_passes_without_any_traffic(make: Make) -> None:
    engine = make(idle_wait_s=30.0)
    engine.submit(kind=WorkKind.CONTINUE, deadline=time.monotonic() + 0.1)
    started = time.monotonic()
    assert engine.listener.wait_end().error_code == "deadline_exceeded"
    assert time.monotonic() - started < 2
    assert engine.listener.of(CancelReceive)
    engine.loop.receive_failed(RequestKey("a"), "handoff_failed", "late", recompute=True)
    while engine.loop.load().requests_open:
        time.sleep(0.005)


def test_poisoned_request_fails_alone(make: Make) -> None:
    engine = make(FakeModel(poison=2))
    engine.gate.open.clear()
    engine.submit("good")
    bad = prompt_of(40, 1)
    bad[3] = 2
    engine.submit("bad", prompt=bad)
    engine.gate.open.set()
    assert engine.listener.wait_end("bad").error_code == "internal"
    engine.listener.wait_end("good")
    assert engine.listener.tokens("good") == reference_tokens(prompt_of(40), greedy())
    assert engine.loop.is_alive()


def test_command_in_the_wrong_state_ends_its_request_only(make: Make) -> None:
    engine = make()
    engine.submit("good", sampling=greedy(500))
    engine.submit(sampling=greedy(3000))
    engine.listener.wait(lambda: engine.listener.tokens("a"))
    engine.loop.received(RequestKey("a"), (FirstToken(0, 5),), 1)
    assert engine.listener.wait_end().error_code == "internal"
    engine.listener.wait_end("good")
    assert engine.listener.tokens("good") == reference_tokens(prompt_of(40), greedy(500))


def test_engine_fault_ends_everything_and_is_seen(make: Make) -> None:
    engine = make()
    engine.gate.open.clear()
    engine.submit(sampling=greedy(500))
    engine.submit("p", kind=WorkKind.PREFILL)
    assert engine.gate.in_step.wait(5)
    engine.submit("late")
    engine.gate.fault = EngineFault("broken")
    engine.gate.open.set()
    assert engine.listener.wait_end().error_code == "internal"
    engine.listener.wait(
        lambda: engine.listener.of(Refused, "late") or engine.listener.of(ChoiceDone, "late")
    )
    deadline = time.monotonic() + 5
    while engine.loop.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(RequestError):
        engine.submit("later")


def test_stop_ends_open_work_as_cancelled_and_asks_for_lent_blocks(make: Make) -> None:
    engine = make()
    engine.submit("p", kind=WorkKind.PREFILL)
    engine.submit("d", kind=WorkKind.CONTINUE, prompt=prompt_of(40, 3))
    engine.submit("w", sampling=greedy(3000), prompt=prompt_of(40, 4))
    engine.listener.wait(lambda: engine.listener.tokens("w"))
    engine.listener.wait(lambda: engine.listener.of(PrefillFinished, "p"))
    engine.loop.stop(5)
    assert engine.listener.wait_end("w").reason is EndReason.CANCELLED
    assert engine.listener.wait_end("d").reason is EndReason.CANCELLED
    assert engine.listener.of(CancelReceive, "d")
    assert engine.listener.of(CancelSource, "p")
    assert not engine.loop.is_alive()
    engine.loop.stop(1)


def test_watchdog_sees_a_step_that_does_not_end() -> None:
    rig, clock = EngineRig(warmup_watchdog_s=20.0, watchdog_s=2.0), ManualClock(1000.0)
    gate, listener = Gate(rig.runner), Listener()
    loop = EngineLoop(rig.scheduler, gate, clock)
    assert not loop.is_alive()
    loop.start(listener.on_events, listener.on_delta)
    loop.submit(make_request("a", prompt_of(20), deadline=FAR))
    listener.wait_end()
    for _ in range(8):  # past warm-up, so that the usual step is known to be short
        rig.scheduler.stats.step_done(
            elapsed_s=0.01, num_prefill=0, num_decode=1, resident_tokens=10
        )
    gate.open.clear()
    gate.in_step.clear()
    loop.submit(make_request("b", prompt_of(20), deadline=FAR))
    assert gate.in_step.wait(5)
    for _ in range(19):
        clock.advance(0.1)
        assert loop.is_alive()
    clock.advance(0.2)
    assert not loop.is_alive()
    gate.open.set()
    listener.wait_end("b")
    loop.stop(5)


def test_too_much_work_within_one_step_is_refused_at_the_door(make: Make) -> None:
    engine = make(max_open_requests=3)
    engine.gate.open.clear()
    engine.submit()
    assert engine.gate.in_step.wait(5)
    for idx in range(3):
        engine.submit(f"more{idx}")
    with pytest.raises(RequestError, match="too much work"):
        engine.submit("last")


def test_role_weights_are_checked_at_once(make: Make) -> None:
    engine = make()
    engine.loop.set_role(1.0, 0.0)
    with pytest.raises(ConfigError):
        engine.loop.set_role(0.0, 0.0)
