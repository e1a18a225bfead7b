from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.autoscaler.controller import Controller, Parts
from services.autoscaler.driver import Capabilities
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.leadership import Lease
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import PoolAutoscalingPolicy
from services.autoscaler.record import DecisionLog, replay
from services.autoscaler.signals import RouterCounts
from services.common.clock import ManualClock
from services.registry.brief import Hold, decode_brief
from services.registry.scaling import Follower
from services.telemetry.metrics import Metrics
from tests.support.cluster import eventually
from tests.support.memory_driver import MemoryDriver, MemoryReader
from tests.support.scaling_policy import make_policy
from tests.support.scaling_twin import ScalingTwin

TICK_S = 5.0
READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING


class Rig:
    """A cluster in memory under one store; controllers of it are made by `controller`."""

    def __init__(self, policy: PoolAutoscalingPolicy | None = None, size: int = 2) -> None:
        self.clock = ManualClock()
        self.store = ScalingTwin(self.clock)
        self.driver = MemoryDriver(self.clock)
        self.reader = MemoryReader(self.driver)
        self.policy = policy or make_policy()
        self.queued = 0
        self.refusal = ""
        for pool in ("prefill", "decode"):
            for _ in range(size):
                self.driver.add(pool)

    def controller(self, name: str = "a", record: DecisionLog | None = None) -> Controller:
        clock = EpochClock(self.clock)
        lease = Lease(self.store, name, self.clock)
        reader: Any = self.reader  # has what a controller calls
        parts = Parts(
            lambda: self.policy, reader, self.driver, lease, clock, Metrics.enabled(), record,
            refusal=lambda: self.refusal,
        )  # fmt: skip
        return Controller(parts)

    def say(self) -> None:
        """Let a router tell that so many tokens wait."""
        now = self.clock.unix_ms() / 1000
        word = RouterCounts("r0", "1", now, queued_tokens={"prefill": self.queued})
        self.reader.routers = (word,)

    async def ticks(self, controller: Controller, num: int = 1) -> None:
        for _ in range(num):
            self.say()
            await controller.tick()
            self.driver.ready()
            self.clock.advance(TICK_S)

    def did(self, name: str) -> list[tuple[str, ...]]:
        return [call[1:] for call in self.driver.calls if call[0] == name]


async def test_pool_grows_while_its_queue_is_long() -> None:
    rig = Rig()
    controller = rig.controller()
    rig.queued = 4_000
    await rig.ticks(controller, 2)
    assert rig.did("start") == [("prefill", "2")]
    assert len(rig.driver.ids("prefill")) == 4
    assert controller.status is not None
    prefill = controller.status.pools[0]
    assert (prefill.name, prefill.ready, prefill.desired) == ("prefill", 4, 4)
    assert [(c.pool, c.from_replicas, c.to_replicas) for c in controller.status.history] == [
        ("prefill", 2, 4)
    ]


async def test_replicas_drain_those_with_least_kv_first_and_stop_once_they_hold_nothing() -> None:
    """RB-105, RB-108: told to leave, refuses work, empties, and only then ends."""
    rig = Rig(size=2)
    first, second = rig.driver.ids("decode")
    rig.reader.used = {first: 900, second: 100}
    rig.reader.held = {first: 5, second: 3}
    controller = rig.controller()
    await rig.ticks(controller, 6)
    assert [call[0] for call in rig.did("drain") if call[0].startswith("decode")] == [second]
    assert rig.driver.ids("decode", DRAINING) == [second]
    assert (second,) not in rig.did("stop")
    rig.reader.held = {first: 5, second: 0}
    await rig.ticks(controller)
    assert (second,) in rig.did("stop")
    assert rig.driver.ids("decode") == [first]


async def test_draining_ends_at_its_deadline_whatever_is_left() -> None:
    rig = Rig(make_policy({"decode": {"drain": {"deadlineSeconds": 12}}}))
    rig.reader.held = dict.fromkeys(rig.driver.ids("decode"), 1)
    controller = rig.controller()
    while not rig.driver.ids("decode", DRAINING):
        await rig.ticks(controller)
    (victim,) = rig.driver.ids("decode", DRAINING)
    await rig.ticks(controller, 2)
    assert (victim,) not in rig.did("stop")
    await rig.ticks(controller)
    assert (victim,) in rig.did("stop")


async def test_replicas_that_start_are_cancelled_before_any_that_serves_is_drained() -> None:
    """RB-104."""
    rig = Rig(size=1)
    controller = rig.controller()
    rig.queued = 3_000
    rig.say()
    await controller.tick()
    starting = rig.driver.ids("prefill", STARTING)
    assert len(starting) == 2
    rig.queued = 0
    for _ in range(20):  # growing at once by a multiple is held for a minute
        rig.clock.advance(TICK_S)
        rig.say()
        await controller.tick()
    assert {replica_id for call in rig.did("cancel") for replica_id in call} == set(starting)
    assert rig.driver.ids("prefill") == ["prefill-0"]
    assert not [call for call in rig.did("drain") if call[0].startswith("prefill")]


async def test_dry_run_decides_and_does_nothing() -> None:
    rig = Rig(make_policy(mode="DryRun"))
    rig.queued = 9_000
    controller = rig.controller()
    await rig.ticks(controller, 3)
    assert {call[0] for call in rig.driver.calls} == {"replicas"}
    assert controller.status is not None
    assert controller.status.pools[0].desired == 4


# -- figures that are not there -------------------------------------------------------------------


async def test_nothing_shrinks_while_routers_say_nothing() -> None:
    rig = Rig(size=3)
    controller = rig.controller()
    await rig.ticks(controller)
    for _ in range(20):
        rig.reader.routers = ()
        await controller.tick()
        rig.clock.advance(TICK_S)
    assert not [call for call in rig.did("drain") if call[0].startswith("prefill")]
    assert controller.status is not None
    stale = next(c for c in controller.status.conditions if c.type == "Stale")
    assert (stale.status, "prefill" in stale.message) == ("True", True)


async def test_nothing_shrinks_by_a_word_that_grows_old() -> None:
    rig = Rig(size=3)
    controller = rig.controller()
    rig.say()
    for _ in range(20):
        await controller.tick()
        rig.clock.advance(TICK_S)
    # The first ticks had a word that was fresh, and a window that had just begun.
    assert not [call for call in rig.did("drain") if call[0].startswith("prefill")]


async def test_tick_without_a_store_does_nothing_and_the_next_goes_on() -> None:
    rig = Rig()
    controller = rig.controller()
    await rig.ticks(controller)
    rig.store.is_down = True
    rig.queued = 9_000
    before = len(rig.driver.calls)
    await rig.ticks(controller, 3)
    assert rig.driver.calls[before:] == []
    rig.store.is_down = False
    await rig.ticks(controller)
    assert rig.did("start") == [("prefill", "2")]


# -- drivers that fail ----------------------------------------------------------------------------


async def test_driver_that_fails_costs_a_tick() -> None:
    rig = Rig()
    controller = rig.controller()
    rig.queued = 4_000
    rig.driver.fails = {"start"}
    await rig.ticks(controller)
    assert rig.driver.ids("prefill", STARTING) == []
    rig.driver.fails = set()
    await rig.ticks(controller)
    assert len(rig.driver.ids("prefill")) == 4


async def test_driver_that_hangs_costs_a_tick_even_when_it_swallows_its_end() -> None:
    """Known of planners: one call that never came back froze scaling for an hour."""
    rig = Rig()
    controller = rig.controller()
    controller._actor._call_s = 0.02
    rig.queued = 4_000
    rig.driver.hangs, rig.driver.swallows_cancel = {"start"}, True
    await rig.ticks(controller)
    await rig.ticks(controller)  # the call before still has not ended: nothing is asked
    assert rig.did("start") == [("prefill", "2")]
    rig.driver.hangs = set()
    await eventually(lambda: controller._actor._stuck is None or controller._actor._stuck.done())
    await rig.ticks(controller)
    assert len(rig.driver.ids("prefill")) == 4


async def test_driver_that_hangs_while_it_is_looked_at_costs_a_tick() -> None:
    rig = Rig()
    controller = rig.controller()
    controller._actor._call_s = 0.02
    rig.driver.hangs = {"replicas"}
    await rig.ticks(controller)
    assert controller.status is None
    rig.driver.hangs = set()
    await rig.ticks(controller)
    assert controller.status is not None


# -- one owner ------------------------------------------------------------------------------------


async def test_policy_that_is_refused_shows_in_the_status_until_it_is_mended() -> None:
    rig = Rig()
    controller = rig.controller()
    for rig.refusal, status in (("spec.pools: bad", "True"), ("", "False")):
        await rig.ticks(controller)
        assert controller.status is not None
        (claim,) = (c for c in controller.status.conditions if c.type == "PolicyRefused")
        assert claim.status == status
        assert rig.refusal in claim.message


async def test_two_controllers_never_both_act() -> None:
    """RB-107: the second one waits until the first one's lease is over."""
    rig = Rig()
    first, second = rig.controller("a"), rig.controller("b")
    rig.queued = 4_000
    for _ in range(4):
        rig.say()
        await second.tick()
        await first.tick()
        rig.clock.advance(TICK_S)
    assert rig.store.owner == "b"
    assert rig.did("start") == [("prefill", "2")]
    assert first.status is None


async def test_controller_that_stood_still_past_its_lease_does_not_act_when_it_goes_on() -> None:
    """RB-107: its decision was made while it led; its write is refused, and so it stops there."""
    rig = Rig()
    first, second = rig.controller("a"), rig.controller("b")
    await rig.ticks(first)
    rig.queued = 4_000
    rig.say()
    original = rig.reader.read

    async def frozen(now: float) -> Any:
        """Stand still for two leases after it led and before it acts; the other takes over."""
        answer = await original(now)
        if rig.store.owner == "a":
            rig.clock.advance(20.0)
            rig.say()
            await second.tick()
        return answer

    rig.reader.read = frozen  # type: ignore[method-assign]  # a moment of the test's own
    await first.tick()
    assert rig.store.owner == "b"
    assert rig.did("start") == [("prefill", "2")]  # of the second alone


async def test_lease_that_ends_amid_actions_stops_them() -> None:
    rig = Rig(size=1)
    controller = rig.controller()
    rig.queued = 4_000
    original = rig.driver.start

    async def slow(pool: str, count: int) -> None:
        await original(pool, count)
        rig.clock.advance(60.0)

    rig.driver.start = slow  # type: ignore[method-assign]  # a moment of the test's own
    rig.reader.used = {"decode-1": 9_000}  # both pools want to grow
    rig.say()
    await controller.tick()
    assert rig.did("start") == [("prefill", "2")]


async def test_next_controller_goes_on_with_windows_drains_and_history() -> None:
    """A restart must not forget what was asked for lately: it would shrink too soon."""
    rig = Rig(size=2)
    rig.reader.held = dict.fromkeys(rig.driver.ids("decode"), 1)
    first = rig.controller("a")
    rig.queued = 4_000
    await rig.ticks(first, 6)
    (victim,) = rig.driver.ids("decode", DRAINING)
    kept = first._kept
    await first._parts.lease.give_back()
    second = rig.controller("b")
    assert await second.lead()
    assert second._kept == kept
    assert kept.state.pools["prefill"].highs
    assert [drain.replica_id for drain in kept.drains] == [victim]
    rig.reader.held = {}
    await rig.ticks(second)
    assert (victim,) in rig.did("stop")
    assert second.status is not None
    assert second.status.history[-1].pool == "prefill"


async def test_replica_that_drains_for_a_controller_that_left_nothing_is_taken_on() -> None:
    rig = Rig(size=2)
    victim = rig.driver.ids("decode")[0]
    await rig.driver.drain(victim, 1.0, rig.policy.spec.pools[1].drain.on_deadline)
    await rig.ticks(rig.controller())
    assert (victim,) in rig.did("stop")


async def test_draining_replica_is_stopped_only_once_its_lease_is_missed_for_long() -> None:
    """RB-105: a heartbeat that comes late must not end answers that are being written."""
    rig = Rig(size=2)
    rig.reader.held = dict.fromkeys(rig.driver.ids("decode"), 1)
    controller, original, missed = rig.controller(), rig.reader.read, set[str]()

    async def late(now: float) -> Any:
        read = await original(now)
        return replace(read, workers=tuple(w for w in read.workers if w.worker_id not in missed))

    rig.reader.read = late  # type: ignore[method-assign]  # a moment of the test's own
    await rig.ticks(controller, 10)
    (victim,) = rig.driver.ids("decode", DRAINING)
    for _ in range(2):
        missed.add(victim)
        await rig.ticks(controller, 2)
        missed.clear()
        await rig.ticks(controller)
    assert (victim,) not in rig.did("stop")
    missed.add(victim)
    await rig.ticks(controller, 4)
    assert (victim,) in rig.did("stop")


async def test_replica_that_an_operator_drains_is_left_alone() -> None:
    """It is out of service by somebody's will, and may come back."""
    rig = Rig(size=2)
    controller = rig.controller()
    original = rig.reader.read

    async def drained(now: float) -> Any:
        read = await original(now)
        workers = tuple(
            replace(w, is_draining=True, refuses_work=True) if w.worker_id == "decode-2" else w
            for w in read.workers
        )
        return replace(read, workers=workers)

    rig.reader.read = drained  # type: ignore[method-assign]  # a moment of the test's own
    await rig.ticks(controller, 8)
    assert ("decode-2",) not in rig.did("stop")
    assert "decode-2" in rig.driver.ids("decode")


# -- what is told ---------------------------------------------------------------------------------


async def test_routers_are_told_sizes_and_to_hold_requests_where_pools_may_be_zero() -> None:
    zero = {"scaleToZero": {"enabled": True, "activationQueueLimit": 9}, "minReplicas": 0}
    rig = Rig(make_policy({"prefill": zero, "decode": zero}))
    await rig.ticks(rig.controller())
    answer = await rig.store.tell("r0", "word")
    brief = decode_brief(answer.text)
    assert answer.is_led
    assert brief is not None
    assert brief.hold == Hold(9, 600.0)
    assert [(p.pool, p.ready, p.desired) for p in brief.pools] == [
        ("prefill", 2, 2), ("decode", 2, 2)
    ]  # fmt: skip


async def test_controller_that_ends_lets_another_one_lead_at_once() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.controller("a").run())
    await eventually(lambda: rig.store.owner == "a")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not isinstance(await rig.store.lead("b", 1000, 0), Follower)


async def test_recorded_decisions_can_be_played_again(tmp_path: Path) -> None:
    rig = Rig()
    path = tmp_path / "decisions.jsonl"
    controller = rig.controller(record=DecisionLog(path))
    rig.queued = 4_000
    await rig.ticks(controller, 3)
    rig.queued = 0
    await rig.ticks(controller, 8)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 11
    assert list(replay(rig.policy.spec, lines)) == []
    other = make_policy({"prefill": {"maxReplicas": 3}})
    assert next(replay(other.spec, lines)).line == 1


async def test_record_keeps_one_older_file_and_each_can_be_played_alone(tmp_path: Path) -> None:
    rig = Rig()
    path = tmp_path / "decisions.jsonl"
    controller = rig.controller(record=DecisionLog(path, max_bytes=10_000))
    await rig.ticks(controller, 40)
    files = sorted(os.listdir(tmp_path))
    assert files == ["decisions.jsonl", "decisions.jsonl.1"]
    for name in files:
        lines = (tmp_path / name).read_bytes().splitlines()
        assert list(replay(rig.policy.spec, lines)) == []
        assert sum(map(len, lines)) < 20_000


async def test_idle_replica_moves_to_the_pool_that_is_short_where_the_driver_can() -> None:
    slow = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}}
    rig = Rig(make_policy({"prefill": slow, "decode": slow}))
    rig.driver.capabilities = Capabilities(can_flip=True, names_victims=True)
    controller = rig.controller()
    await rig.ticks(controller, 8)
    rig.queued = 3_000
    await rig.ticks(controller)
    assert [call[1] for call in rig.did("flip")] == ["prefill"]
    assert (len(rig.driver.ids("prefill")), len(rig.driver.ids("decode"))) == (3, 1)
