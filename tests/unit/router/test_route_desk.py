"""The desk over the registry's twin: batches, replicas, reservations, and a store that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from services.common.clock import ManualClock
from services.common.errors import StoreUnavailable
from services.common.ids import BlockHash, Incarnation, WorkerId
from services.registry.base import LoadReport
from services.router.policy import NO_LINKS, REMOTE, Links, PolicyConfig, RequestFacts
from services.router.route_desk import GATHER_S, HOLD_EVERY_S, MAX_BATCH, RouteDesk
from services.router.view import ClusterView, WorkerView
from tests.support.cluster import eventually
from tests.support.registry import make_chain, make_worker_info
from tests.support.twin_reader import TwinReader

LOAD = LoadReport(kv_free=9000, kv_total=9000, rate_tok_s=9000, tbt_a_us=9000)
NAMES = ("p0", "p1", "p2", "d0", "d1")


class Surroundings:
    """A cluster that does not change, and a store one may ask unless told otherwise."""

    def __init__(self, reader: TwinReader) -> None:
        self.workers = tuple(self._worker(reader, name) for name in NAMES)
        self.is_open = True
        self.errors = 0

    def _worker(self, reader: TwinReader, name: str) -> WorkerView:
        info = make_worker_info(name, role="prefill" if name[0] == "p" else "decode")
        slot, gen = reader.join(info, LOAD)
        return WorkerView(
            worker_id=info.worker_id, role=info.role, state="live", reason="", info=info,
            incarnation=info.incarnation, slot=slot, slot_gen=gen, lease_left_ms=2000, load=LOAD,
            booked=reader.twin.reservations.booked((slot, gen)), up_since=None,
        )  # fmt: skip

    def view(self) -> ClusterView:
        """Return the workers."""
        return ClusterView(self.workers, 1.0)

    def links(self) -> Links:
        """Return no news."""
        return NO_LINKS

    def may_ask_store(self) -> bool:
        """Say what the test wants."""
        return self.is_open

    def note_store_call(self, op: str, started: float, error: StoreUnavailable | None) -> None:
        """Count failures."""
        self.errors += error is not None


class Replicas:
    """Some routers over one store."""

    def __init__(self, num_desks: int = 1) -> None:
        self.clock = ManualClock(100.0)
        self.gather_s = GATHER_S
        self.reader = TwinReader(self.clock)
        self.around = Surroundings(self.reader)
        policy = PolicyConfig(bypass_tokens=0)
        self.desks = [
            RouteDesk(policy, Incarnation(i + 1), self.reader, self.clock, self.around)
            for i in range(num_desks)
        ]

    async def route(self, number: int, chain: Sequence[BlockHash] = (), desk: int = 0) -> WorkerId:
        """Let a replica decide; return the worker."""
        facts = RequestFacts(f"r{number}", max(1, len(chain) * 16), 64, prefix_root=b"root")
        route = await self.desks[desk].route(facts, chain, number, self.gather_s)
        assert route is not None
        assert not route.decision.is_local
        return route.decision.worker.worker_id

    @property
    def open_reservations(self) -> int:
        """Count what the store holds."""
        return len(self.reader.twin.reservations)


async def test_decisions_of_one_tick_share_a_round_trip() -> None:
    replicas = Replicas()
    await asyncio.gather(*(replicas.route(i) for i in range(MAX_BATCH + 4)))
    assert replicas.reader.batches == [MAX_BATCH, 4]
    await replicas.route(99)
    assert replicas.reader.batches == [MAX_BATCH, 4, 1]


async def test_one_alone_is_asked_at_once_and_what_follows_gathers() -> None:
    replicas = Replicas()
    replicas.gather_s = 3600.0
    await replicas.route(1)
    later = []
    for number in (2, 3, 4):
        later.append(asyncio.create_task(replicas.route(number)))
        await asyncio.sleep(0)
    assert replicas.reader.batches == [1]
    replicas.desks[0]._flush()  # as its timer does
    await asyncio.gather(*later)
    assert replicas.reader.batches == [1, 3]


async def test_replicas_spread_equal_prompts_evenly() -> None:
    """RB-057, RB-058: a reservation is seen by every replica before the next decision."""
    replicas = Replicas(num_desks=4)
    counts = dict.fromkeys(NAMES[:3], 0)
    for number in range(60):
        counts[await replicas.route(number, desk=number % 4)] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


async def test_replicas_send_a_new_prefix_to_one_worker() -> None:
    """Who was just sent a prefix will hold it: every replica knows before the worker says so."""
    replicas = Replicas(num_desks=3)
    chain = make_chain(1, 1024)
    first = await replicas.route(0, chain)
    replicas.clock.advance(1.0)
    for number, desk in ((1, 1), (2, 2)):
        assert await replicas.route(number, chain, desk) == first


async def test_without_a_store_nobody_waits_for_it() -> None:
    replicas = Replicas()
    replicas.around.is_open = False
    assert await replicas.desks[0].route(RequestFacts("r", 10, 10), (), 1) is None
    assert replicas.reader.batches == []


async def test_a_failing_store_is_noted_and_may_have_reserved() -> None:
    """The answer was lost, perhaps not the call: the reservation is released when it is back."""
    replicas = Replicas()
    desk, replicas.reader.is_down = replicas.desks[0], True
    assert await desk.route(RequestFacts("r", 10, 10), (), 1) is None
    assert replicas.around.errors == 1
    replicas.reader.is_down = False
    await desk.close()
    assert replicas.reader.released == ["1.1"]


async def test_a_release_still_to_be_sent_does_not_end_the_next_reservation() -> None:
    replicas = Replicas()
    desk, source = replicas.desks[0], replicas.around.workers[0]
    facts = RequestFacts("r", 10, 10)
    replicas.reader.is_down = True
    assert await desk.take_over(facts, source, 1, frozenset()) is None
    replicas.reader.is_down = False
    assert await desk.take_over(facts, source, 1, frozenset()) is not None
    await desk._release()
    assert replicas.open_reservations == 1
    await desk.close()
    assert replicas.open_reservations == 0


async def test_what_ended_is_released_and_lies_are_withdrawn() -> None:
    replicas = Replicas()
    chain, keeper = make_chain(1, 64), asyncio.create_task(replicas.desks[0].keep())
    worker = await replicas.route(1, chain)
    source = next(w for w in replicas.around.workers if w.worker_id == worker)
    facts = RequestFacts("r1", 1024, 64)
    decision = await replicas.desks[0].take_over(facts, source, 1, frozenset())
    assert decision is not None
    assert decision.worker.worker_id in ("d0", "d1")
    assert replicas.open_reservations == 2
    replicas.desks[0].ended(1, chain[3::4])
    await eventually(lambda: replicas.open_reservations == 0)
    assert len(replicas.reader.twin.speculation) == 0
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_a_handoff_ends_the_prefill_reservation_alone_and_withdraws_lies() -> None:
    replicas = Replicas()
    desk, chain = replicas.desks[0], make_chain(1, 64)
    worker = await replicas.route(1, chain)
    source = next(w for w in replicas.around.workers if w.worker_id == worker)
    assert await desk.take_over(RequestFacts("r1", 1024, 64), source, 1, frozenset()) is not None
    desk.handed_off(1, chain[3::4])
    await desk._release()
    assert replicas.reader.released == ["1.1"]
    assert len(replicas.reader.twin.speculation) == 0
    desk.ended(1)
    await desk._release()
    assert replicas.reader.released == ["1.1", "1.1d"]
    assert replicas.open_reservations == 0


async def test_a_client_that_left_before_the_answer_holds_nothing() -> None:
    replicas = Replicas()
    task = asyncio.create_task(replicas.route(1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.01)
    await replicas.desks[0].close()
    assert replicas.open_reservations == 0


async def test_a_long_request_keeps_its_reservation() -> None:
    replicas = Replicas()
    await replicas.route(1)
    for _ in range(6):
        replicas.clock.advance(HOLD_EVERY_S + 1)
        await replicas.desks[0]._hold()
    replicas.reader.twin.reservations.sweep(replicas.clock.now() * 1000)
    assert replicas.open_reservations == 1


async def test_reservations_are_held_while_others_end_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends come many times a second; what is open is looked through once in a while."""
    replicas = Replicas()
    desk, held = replicas.desks[0], list[tuple[str, ...]]()
    hold = replicas.reader.hold

    async def noted(rids: Sequence[str]) -> None:
        held.append(tuple(rids))
        await hold(rids)

    monkeypatch.setattr(replicas.reader, "hold", noted)
    await replicas.route(1)
    keeper = asyncio.create_task(desk.keep())
    for number in range(2, 12):
        replicas.clock.advance(HOLD_EVERY_S / 8)
        await replicas.route(number)
        desk.ended(number)
        await eventually(partial(replicas.reader.released.__contains__, f"1.{number}"))
        # Nothing but the desk's own task may run the look that is due.
        await eventually(lambda: bool(held) or replicas.clock.now() < 100 + HOLD_EVERY_S * 1.25)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert held == [("1.1",)]


async def test_own_routes_are_remembered_for_local_mode() -> None:
    replicas = Replicas()
    desk, chain = replicas.desks[0], make_chain(1, 128)
    desk.sent(chain, WorkerId("p1"))
    assert desk.local_depth(chain) == {"p1": 32}
    assert desk.local_depth(chain[:64]) == {"p1": 16}
    decision = desk.choose(
        RequestFacts("r", 2048, 64, prefix_root=b"x"), desk.local_depth(chain), frozenset()
    )
    assert (decision.mode, decision.worker.worker_id, decision.is_local) == (REMOTE, "p1", True)
    replicas.clock.advance(121)
    assert desk.local_depth(chain) == {}


async def test_a_pool_the_store_has_lost_is_used_all_the_same() -> None:
    """It was flushed: decode has joined again, prefill is linked and has not yet."""
    replicas = Replicas()
    for worker in replicas.around.workers[:3]:
        assert worker.slot is not None
        replicas.reader.twin.leave(worker.slot, worker.slot_gen)
    desk = replicas.desks[0]
    assert await desk.route(RequestFacts("r", 10, 10), (), 1) is None
    assert desk.choose(RequestFacts("r", 10, 10), {}, frozenset()).mode == REMOTE


async def test_a_fault_does_not_end_the_upkeep_of_reservations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replicas()
    desk, release = replicas.desks[0], replicas.reader.release
    faults: list[Sequence[tuple[str, bytes]]] = []

    async def fail_once(ends: Sequence[tuple[str, bytes]]) -> None:
        if not faults:
            faults.append(ends)
            raise ValueError("nobody expected this")
        await release(ends)

    monkeypatch.setattr(replicas.reader, "release", fail_once)
    keeper = asyncio.create_task(desk.keep())
    for number in (1, 2):
        await replicas.route(number)
        desk.ended(number)
        await eventually(lambda: not desk._ends)
    await eventually(lambda: replicas.reader.released == ["1.2"])
    assert len(faults) == 1
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
