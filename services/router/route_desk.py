"""Decisions of one router: asked of the store, one round trip for those of a moment, or made here.

The store decides with the loads and reservations of all replicas. Where it does not answer, has
no candidate or is known to be away, the router decides alone: newest loads it knows, its own
bookings, and where it sent which prefixes in the last two minutes. No request fails by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.ids import BlockHash, Incarnation, WorkerId
from services.common.light_value import light_value
from services.registry import cost
from services.registry.depth import Depths
from services.registry.reader import RegistryReader
from services.registry.schema import field_names, pack_fields, stride_hashes
from services.registry.scripts import RouteAsk
from services.registry.speculation import Speculation
from services.router.policy import (
    STRIDE_TOKENS,
    Decision,
    Field,
    Links,
    PolicyConfig,
    RequestFacts,
    any_pair,
    ask_for,
    ask_to_take_over,
    choose,
    choose_decode,
    decision_of,
    lay_out,
)
from services.router.view import ClusterView, WorkerView
from services.telemetry.logs import get_logger

log = get_logger(__name__)

# Of many requests, those of this long share a call; one that comes alone does not wait.
GATHER_S = 0.002
# Where requests wait for workers, which have more than this in hand, calls can be fewer.
BUSY_GATHER_S = 0.01
MAX_BATCH = 16  # decisions of one call: it holds the store for half a millisecond
LOCAL_FIELDS = 65_536  # prefixes remembered for local mode
LOCAL_TTL_S = 120
HOLD_EVERY_S = 20.0  # a third of a reservation's life
HOLD_LOOK_S = HOLD_EVERY_S / 4
MAX_ENDS = 4096  # reservations waiting to be released; the rest run out by themselves
ENDS_A_CALL = 128
GATHER_ENDS_S = 0.05  # a call costs more than the little that is reserved for too long


@light_value
class Route:
    """A decision, and the strides each worker holds, for later choices about this request."""

    decision: Decision
    depth: Mapping[WorkerId, int]


@light_value
class _Waiting:
    facts: RequestFacts
    fields: bytes
    exclude: frozenset[WorkerId]
    rid: str
    source: WorkerView | None
    answer: asyncio.Future[Decision | None]


class Surroundings(Protocol):
    """What the desk is told by whoever watches the cluster."""

    def view(self) -> ClusterView:
        """Return the cluster as it is now."""
        ...

    def links(self) -> Links:
        """Return the ways between workers."""
        ...

    def may_ask_store(self) -> bool:
        """Say whether the store may be asked now."""
        ...

    def note_store_call(self, op: str, started: float, error: StoreUnavailable | None) -> None:
        """Learn what became of a call."""
        ...


class RouteDesk:
    """Asks for decisions and ends reservations. Belongs to the event loop."""

    def __init__(
        self,
        policy: PolicyConfig,
        incarnation: Incarnation,
        reader: RegistryReader,
        clock: Clock,
        around: Surroundings,
    ) -> None:
        self._policy = policy
        self._prefix = f"{incarnation:x}."
        self._reader = reader
        self._clock = clock
        self._around = around
        self._index: Speculation[WorkerId] = Speculation(LOCAL_FIELDS)
        self._waiting: list[_Waiting] = []
        self._flushed_at = float("-inf")  # by the loop's clock
        self._flush_handle: asyncio.Handle | None = None
        self._flush_due = 0.0  # of it
        self._open: dict[str, float] = {}  # reservations -> when they were made or held last
        self._ends: dict[str, bytes] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- decisions ---------------------------------------------------------------------------

    async def route(
        self,
        facts: RequestFacts,
        hashes: Sequence[BlockHash],
        number: int,
        gather_s: float = GATHER_S,
    ) -> Route | None:
        """Let the store decide and reserve; None when it cannot.

        Args:
            gather_s: how long after the last call this one may wait for others to share it.
        """
        fields = pack_fields(stride_hashes(hashes))
        decision = await self._ask(facts, fields, frozenset(), self._rid(number), None, gather_s)
        if decision is None:
            return None
        depth = {t.worker_id: t.hint_tokens // STRIDE_TOKENS for t in decision.terms}
        return Route(decision, depth)

    async def take_over(
        self,
        facts: RequestFacts,
        source: WorkerView,
        number: int,
        exclude: frozenset[WorkerId],
    ) -> Decision | None:
        """Let the store choose and reserve a decode worker; None when it cannot."""
        return await self._ask(facts, b"", exclude, self._rid(number) + "d", source)

    def choose(
        self, facts: RequestFacts, depth: Mapping[WorkerId, int], exclude: frozenset[WorkerId]
    ) -> Decision:
        """Decide alone, with hints from an earlier answer. Raises RequestError: no_workers."""
        view, links = self._around.view(), self._around.links()
        return choose(facts, view, depth, self._policy, exclude, links)

    def choose_decode(
        self, facts: RequestFacts, source: WorkerView, exclude: frozenset[WorkerId]
    ) -> Decision | None:
        """Choose a decode worker alone; None when nobody can take over."""
        view, links = self._around.view(), self._around.links()
        return choose_decode(facts, source, view, self._policy, exclude, links)

    def local_depth(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """Return where this router sent a prompt's prefix lately, in strides."""
        fields = field_names(stride_hashes(hashes))
        known = {w.worker_id for w in self._around.view().workers}
        now_ms = self._clock.now() * 1000
        return self._index.strides(fields, known, Depths(), now_ms).by_owner()

    def sent(self, hashes: Sequence[BlockHash], worker_id: WorkerId) -> None:
        """Remember who computes a prompt."""
        now = self._clock.now()
        fields = field_names(stride_hashes(hashes))
        self._index.note(fields, worker_id, 0, int(now) + LOCAL_TTL_S, now * 1000)

    # -- reservations ------------------------------------------------------------------------

    def handed_off(self, number: int, lies: Sequence[BlockHash] = ()) -> None:
        """Release what was reserved for a prefill; `lies` are hints its worker did not honour."""
        self._give_back(self._rid(number), pack_fields(lies))

    def ended(self, number: int, lies: Sequence[BlockHash] = ()) -> None:
        """Release all a request still has reserved."""
        self.handed_off(number, lies)
        self._give_back(self._rid(number) + "d", b"")

    async def keep(self) -> None:
        """Release and hold reservations until cancelled."""
        hold_at = 0.0  # releases come many times a second, and a look at all that is open is long
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(GATHER_ENDS_S)
            try:
                await self._release()
                if self._clock.now() >= hold_at:
                    await self._hold()
                    hold_at = self._clock.now() + HOLD_LOOK_S
            except Exception:
                # The outermost loop: a fault here must not end reservations' upkeep for ever.
                log.exception("router.reservations_fault")

    async def close(self) -> None:
        """Release what has ended, once, and let go of calls under way."""
        for name in list(self._open):
            self._ends[name] = b""
        self._open.clear()
        await self._release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------------

    def _rid(self, number: int) -> str:
        return f"{self._prefix}{number}"

    async def _ask(
        self,
        facts: RequestFacts,
        fields: bytes,
        exclude: frozenset[WorkerId],
        rid: str,
        source: WorkerView | None,
        gather_s: float = GATHER_S,
    ) -> Decision | None:
        if not self._around.may_ask_store():
            return None
        answer: asyncio.Future[Decision | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(facts, fields, exclude, rid, source, answer))
        self._flush_within(gather_s)
        return await answer

    def _flush_within(self, gather_s: float) -> None:
        loop, due = asyncio.get_running_loop(), self._flushed_at + gather_s
        if self._flush_handle is not None:
            if self._flush_due <= due:
                return
            self._flush_handle.cancel()
        self._flush_due = due
        if due <= loop.time():
            self._flush_handle = loop.call_soon(self._flush)
        else:
            self._flush_handle = loop.call_at(due, self._flush)

    def _flush(self) -> None:
        """Send what has gathered."""
        waiting, self._waiting, self._flush_handle = self._waiting, [], None
        self._flushed_at = asyncio.get_running_loop().time()
        for lo in range(0, len(waiting), MAX_BATCH):
            task = asyncio.create_task(self._decide(waiting[lo : lo + MAX_BATCH]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _decide(self, batch: Sequence[_Waiting]) -> None:
        answers: Sequence[Decision | None] = [None] * len(batch)
        try:
            answers = await self._ask_store(batch)
        finally:
            # Whatever happened: nobody waits for an answer that will not come.
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
                else:
                    self._give_back(waiting.rid, b"")  # its client has gone meanwhile

    async def _ask_store(self, batch: Sequence[_Waiting]) -> Sequence[Decision | None]:
        view, links = self._around.view(), self._around.links()
        sources = [w.source for w in batch if w.source is not None]
        arena = lay_out(view, self._policy, links, sources=sources, by_slot=True)
        asks = [RouteAsk(self._put(w, arena), w.fields, w.rid) for w in batch]
        started = self._clock.now()
        try:
            verdicts = await self._reader.route(arena.weights, arena.candidates, arena.pairs, asks)
            answers = [
                self._read(waiting, verdict, arena)
                for waiting, verdict in zip(batch, verdicts, strict=True)
            ]
        except StoreUnavailable as error:
            self._around.note_store_call("route", started, error)
            for waiting in batch:  # it may have been done although no answer came
                self._end(waiting.rid, b"")
            return [None] * len(batch)
        self._around.note_store_call("route", started, None)
        return answers

    def _put(self, waiting: _Waiting, arena: Field) -> cost.Ask:
        if waiting.source is None:
            return ask_for(waiting.facts, self._policy, arena, waiting.exclude)
        return ask_to_take_over(waiting.facts, waiting.source, self._policy, arena, waiting.exclude)

    def _read(
        self, waiting: _Waiting, verdict: cost.Verdict | None, arena: Field
    ) -> Decision | None:
        if verdict is None:
            return None
        if verdict.chosen.slot not in arena.workers:
            raise StoreUnavailable("the store chose a worker that was no candidate")
        is_new = waiting.source is None and waiting.facts.force_mode is None
        if is_new and not verdict.can_remote and self._is_pair_left(waiting):
            # The store knows a whole pool no more, or not yet, that is linked to us.
            self._end(waiting.rid, b"")
            return None
        self._open[waiting.rid] = self._clock.now()
        self._ends.pop(waiting.rid, None)  # of a call before, whose answer was lost
        return decision_of(verdict, arena, waiting.facts, is_local=False)

    def _give_back(self, rid: str, lies: bytes) -> None:
        if self._open.pop(rid, None) is not None:
            self._end(rid, lies)

    def _end(self, rid: str, lies: bytes) -> None:
        if len(self._ends) < MAX_ENDS:
            self._ends[rid] = lies
            self._wake.set()

    def _is_pair_left(self, waiting: _Waiting) -> bool:
        return any_pair(self._around.view(), self._around.links(), waiting.exclude)

    async def _release(self) -> None:
        while self._ends and self._around.may_ask_store():
            names = list(self._ends)[:ENDS_A_CALL]
            ends = [(name, self._ends.pop(name)) for name in names]
            started = self._clock.now()
            try:
                await self._reader.release(ends)
            except StoreUnavailable as error:
                self._around.note_store_call("release", started, error)
                return  # they run out by themselves
            self._around.note_store_call("release", started, None)

    async def _hold(self) -> None:
        now = self._clock.now()
        due = [name for name, since in self._open.items() if now - since > HOLD_EVERY_S]
        for lo in range(0, len(due), ENDS_A_CALL):
            if not self._around.may_ask_store():
                return
            names = due[lo : lo + ENDS_A_CALL]
            try:
                await self._reader.hold(names)
            except StoreUnavailable as error:
                self._around.note_store_call("hold", now, error)
                return
            self._open.update((name, now) for name in names if name in self._open)
