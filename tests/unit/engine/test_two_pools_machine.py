"""Two engines with tiny pools and slow transfers between them, in any order of events.

The reader copies one block at a time, as a throttled peer does, while both engines prefill,
decode, preempt, evict, unpin, cancel and end leases.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.ids import BlockId
from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CancelReceive,
    CancelSource,
    EndReason,
    EngineEvent,
    OfferReady,
    PrefillFinished,
    UnpinWanted,
    WorkKind,
)
from tests.support.engine_rig import EngineRig, Output, make_request, prompt_of
from tests.support.fake_model import reference_tokens

BLOCK = 16
LENGTHS = st.one_of(st.integers(1, 100), st.sampled_from([64, 80, 90, 96, 100]))


@dataclass
class Lent:
    """A block as it was when it was lent."""

    block_id: BlockId
    gen: int
    content: npt.NDArray[np.float32]


@dataclass(eq=False)
class Transfer:
    """One handoff; blocks are counted in token order, the tail last."""

    key: str
    prompt: npt.NDArray[np.uint32]
    params: SamplingParams
    lent: list[Lent] = field(default_factory=list)
    final: PrefillFinished | None = None
    dest: dict[int, Lent] = field(default_factory=dict)  # as reserved, later as written
    pulled: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)  # unpinned
    is_unpinning: bool = False
    is_lent: bool = False  # prefill has not got its blocks back
    is_reserved: bool = False
    is_receiving: bool = False  # decode has not got its blocks back
    is_source_cancelled: bool = False
    is_sink_cancelled: bool = False

    @property
    def num_full(self) -> int:
        return len(self.prompt) // BLOCK

    def is_complete(self) -> bool:
        return (
            self.is_reserved
            and self.final is not None
            and all(index in self.pulled for index in self.dest)
        )


def _tiny(num_blocks: int) -> EngineRig:
    return EngineRig(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_step_tokens=48,
        max_chunk_tokens=20,
        initial_chunk_tokens=20,
    )


class TwoPools(RuleBasedStateMachine):
    """RB-001, RB-010, RB-013, RB-014, RB-016: nothing under transfer is ever rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill, self.decode = _tiny(13), _tiny(12)
        for rig in (self.prefill, self.decode):
            for _ in range(16):
                rig.scheduler.stats.ended(2)  # expect little: let too many in, have to preempt
        self.transfers: dict[str, Transfer] = {}
        self.seen: dict[tuple[str, str], int] = {}  # events of a work item looked at so far
        self.local: dict[str, tuple[EngineRig, npt.NDArray[np.uint32], SamplingParams]] = {}
        self.num_keys = 0
        self.num_refused_reads = 0

    # -- requests ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.transfers) < 12)
    @rule(
        length=LENGTHS,
        family=st.integers(0, 2),
        max_tokens=st.integers(2, 40),
        n=st.sampled_from([1, 1, 1, 2]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 1),
    )
    def hand_off(
        self, length: int, family: int, max_tokens: int, n: int, temperature: float, priority: int
    ) -> None:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens, n=n)
        key, prompt = self._next_key("t"), prompt_of(100, family)[:length]
        transfer = self.transfers[key] = Transfer(key, prompt, params)
        request = make_request(key, prompt, params, WorkKind.PREFILL, priority=priority)
        self.prefill.submit(request)
        self._hear()
        assert transfer.key == key

    @precondition(lambda self: len(self.local) < 16)
    @rule(
        length=LENGTHS,
        family=st.integers(0, 3),
        max_tokens=st.integers(1, 60),
        priority=st.integers(0, 2),
        on_decode=st.booleans(),
    )
    def compute_locally(
        self, length: int, family: int, max_tokens: int, priority: int, on_decode: bool
    ) -> None:
        """Others on the same pools: they want blocks, share prefixes and preempt."""
        rig = self.decode if on_decode else self.prefill
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        key, prompt = self._next_key("l"), prompt_of(100, family)[:length]
        self.local[key] = (rig, prompt, params)
        rig.submit(make_request(key, prompt, params, priority=priority))
        self._hear()

    @rule(count=st.integers(1, 5), on_decode=st.booleans())
    def steps(self, count: int, on_decode: bool) -> None:
        rig = self.decode if on_decode else self.prefill
        for _ in range(count):
            rig.step()
        self._hear()

    @precondition(lambda self: self._is_lending() and len(self.local) < 16)
    @rule(family=st.integers(4, 9), count=st.integers(1, 3), num_steps=st.integers(1, 8))
    def crowd_prefill(self, family: int, count: int, num_steps: int) -> None:
        """Prompts that share nothing: what is cached is evicted, what is lent is asked back."""
        for number in range(count):
            params = SamplingParams(temperature=0.0, max_tokens=1)
            key, prompt = self._next_key("l"), prompt_of(90, family + 10 * number)
            self.local[key] = (self.prefill, prompt, params)
            self.prefill.submit(make_request(key, prompt, params))
        for _ in range(num_steps):
            self.prefill.step()
        self._hear()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), on_decode=st.booleans(), mid_step=st.booleans())
    def cancel(self, data: st.DataObject, on_decode: bool, mid_step: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.transfers)))
        rig = self.decode if on_decode else self.prefill
        if mid_step:
            rig.step(between=lambda: rig.cancel(key))
        else:
            rig.cancel(key)
        self._hear()

    # -- the slow link ----------------------------------------------------------------------

    @precondition(lambda self: self._readable())
    @rule(data=st.data(), count=st.integers(1, 3), says_so=st.booleans())
    def pull(self, data: st.DataObject, count: int, says_so: bool) -> None:
        transfer = data.draw(st.sampled_from(self._readable()))
        self._pull(transfer, count)
        if says_so and transfer.is_unpinning and transfer.is_lent and transfer.final is not None:
            self._unpin(transfer, sorted(self._pulled_full(transfer) - transfer.given))

    @precondition(lambda self: any(t.is_complete() for t in self._receiving()))
    @rule(data=st.data())
    def receive_ends(self, data: st.DataObject) -> None:
        complete = [t for t in self._receiving() if t.is_complete()]
        self._deliver(data.draw(st.sampled_from(complete)))

    @precondition(lambda self: any(t.is_unpinning for t in self.transfers.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """PULLED arrives for some of what was pulled."""
        asked = [t for t in self.transfers.values() if t.is_unpinning and t.is_lent]
        asked = [t for t in asked if t.final is not None and self._pulled_full(t) - t.given]
        if not asked:
            return
        transfer = data.draw(st.sampled_from(asked))
        some = sorted(self._pulled_full(transfer) - transfer.given)
        self._unpin(transfer, some[: data.draw(st.integers(1, len(some)))])

    @precondition(lambda self: self._is_lending())
    @rule(data=st.data(), mid_step=st.booleans(), is_lease_over=st.integers(0, 4))
    def sender_lets_go(self, data: st.DataObject, mid_step: bool, is_lease_over: int) -> None:
        """DONE or ABORTED came, or the lease ran out while the reader still reads."""
        lent = sorted(t.key for t in self.transfers.values() if t.is_lent)
        if is_lease_over:
            lent = [key for key in lent if not self.transfers[key].is_receiving]
        if not lent:
            return
        transfer = self.transfers[data.draw(st.sampled_from(lent))]
        transfer.is_lent = False
        if mid_step:
            self.prefill.step(between=lambda: self.prefill.release(transfer.key))
        else:
            self.prefill.release(transfer.key)
        self._hear()

    @precondition(lambda self: self._receiving())
    @rule(data=st.data(), recompute=st.booleans())
    def receive_fails(self, data: st.DataObject, recompute: bool) -> None:
        self._fail(data.draw(st.sampled_from(self._receiving())), recompute=recompute)

    # -- what must hold ---------------------------------------------------------------------

    @invariant()
    def blocks_are_counted(self) -> None:
        for rig in (self.prefill, self.decode):
            rig.scheduler.check_integrity()
            counts = rig.pool.counts()
            assert counts.free + counts.cached + counts.in_use == counts.total

    @invariant()
    def what_is_lent_stays_as_it_was(self) -> None:
        for transfer in self.transfers.values():
            if transfer.is_lent:
                kept = [b for i, b in enumerate(transfer.lent) if i not in transfer.given]
                assert all(self._is_as_lent(self.prefill, lent) for lent in kept)

    @invariant()
    def what_is_reserved_is_written_by_the_receiver_alone(self) -> None:
        for transfer in self._receiving():
            for lent in transfer.dest.values():
                assert self._is_as_lent(self.decode, lent)
                assert lent.gen % 2 == 1

    def teardown(self) -> None:
        """Let everything end: nothing is stuck and nothing is held."""
        rng = random.Random(self.num_keys)
        for turn in range(5000):
            self._end_what_can(rng)
            if turn % 7 == 0 and self._is_lending() and len(self.local) < 24:
                self.crowd_prefill(rng.randrange(4, 10), 1, 1)
            self.prefill.step()
            self.decode.step()
            self._hear()
            self.what_is_lent_stays_as_it_was()
            self.what_is_reserved_is_written_by_the_receiver_alone()
            rigs = (self.prefill, self.decode)
            if not any(rig.scheduler.load().requests_open for rig in rigs):
                break
        for rig in (self.prefill, self.decode):
            rig.assert_at_rest()
            for output in rig.outputs.values():
                assert output.num_ends == 1
        for transfer in self.transfers.values():
            self._check_answer(transfer)
        for key, (rig, prompt, params) in self.local.items():
            if rig.outputs[key].refused is None:
                assert rig.outputs[key].tokens[0] == reference_tokens(prompt, params)

    # -- the wire ---------------------------------------------------------------------------

    def _hear(self) -> None:
        """Carry what the engines said to the other side."""
        for transfer in self.transfers.values():
            for event in self._news("p", self.prefill.outputs[transfer.key], transfer.key):
                self._from_prefill(transfer, event)
            output = self.decode.outputs.get(transfer.key)
            if output is not None:
                for event in self._news("d", output, transfer.key):
                    self._from_decode(transfer, event)

    def _news(self, side: str, output: Output, key: str) -> list[EngineEvent]:
        start = self.seen.get((side, key), 0)
        self.seen[side, key] = len(output.events)
        return output.events[start:]

    def _from_prefill(self, transfer: Transfer, event: EngineEvent) -> None:
        if isinstance(event, OfferReady):
            transfer.is_lent = transfer.is_receiving = True
            request = make_request(
                transfer.key, transfer.prompt, transfer.params, WorkKind.CONTINUE
            )
            if self.decode.submit(request).refused is not None:
                transfer.is_receiving = False
            for news in self._news("d", self.decode.outputs[transfer.key], transfer.key):
                self._from_decode(transfer, news)
        elif isinstance(event, BlocksSealed):
            assert event.lo == len(transfer.lent)
            transfer.lent += [self._as_lent(self.prefill, block) for block in event.block_ids]
            assert all(lent.gen % 2 == 0 for lent in transfer.lent[event.lo :])
        elif isinstance(event, PrefillFinished):
            transfer.final = event
            if event.tail_block is not None:
                transfer.lent.append(self._as_lent(self.prefill, event.tail_block))
        elif isinstance(event, UnpinWanted):
            transfer.is_unpinning = True
        elif isinstance(event, CancelSource):
            transfer.is_source_cancelled = True

    def _from_decode(self, transfer: Transfer, event: EngineEvent) -> None:
        if isinstance(event, BlocksReserved):
            transfer.is_reserved = True
            blocks = (*event.block_ids, event.tail_block)
            for index, block in enumerate(blocks):
                if block is not None:
                    transfer.dest[index] = self._as_lent(self.decode, block)
        elif isinstance(event, CancelReceive):
            transfer.is_sink_cancelled = True

    def _pull(self, transfer: Transfer, count: int) -> None:
        """Copy blocks, each under the check of its generation; a refused one ends the receive."""
        wanted = sorted(set(transfer.dest) - transfer.pulled)
        for index in [i for i in wanted if i < len(transfer.lent)][:count]:
            lent = transfer.lent[index]
            found = self.prefill.cells[lent.block_id].copy()
            if self.prefill.pool.gen(lent.block_id) != lent.gen:
                assert not transfer.is_lent or index in transfer.given
                self.num_refused_reads += 1
                self._fail(transfer, recompute=True)
                return
            valid = min(BLOCK, len(transfer.prompt) - index * BLOCK)
            assert np.array_equal(found[:, :valid], lent.content[:, :valid])
            dest = transfer.dest[index]
            self.decode.cells[dest.block_id, :, :valid] = found[:, :valid]
            transfer.dest[index] = self._as_lent(self.decode, dest.block_id)
            transfer.pulled.add(index)

    def _unpin(self, transfer: Transfer, some: list[int]) -> None:
        transfer.given.update(some)
        ids = tuple(transfer.lent[index].block_id for index in some)
        self.prefill.unpin(transfer.key, ids)
        self._hear()

    def _deliver(self, transfer: Transfer) -> None:
        assert transfer.final is not None
        transfer.is_receiving = False
        transfer.dest.clear()
        self.decode.reserved.pop(transfer.key, None)
        del self.decode.opened[transfer.key]
        request = self.decode.outputs[transfer.key]
        self.decode.scheduler.received(
            make_request(transfer.key, transfer.prompt).key, transfer.final.first, self.decode.now
        )
        self.decode.collect()
        assert request.of(BlocksReserved)
        self._hear()

    def _fail(self, transfer: Transfer, *, recompute: bool) -> None:
        transfer.is_receiving = False
        transfer.dest.clear()
        is_wanted = recompute and not transfer.is_sink_cancelled
        self.decode.fail_receive(transfer.key, recompute=is_wanted)
        self._hear()

    def _is_lending(self) -> bool:
        return any(transfer.is_lent for transfer in self.transfers.values())

    # -- helpers ----------------------------------------------------------------------------

    def _next_key(self, kind: str) -> str:
        self.num_keys += 1
        return f"{kind}{self.num_keys}"

    def _receiving(self) -> list[Transfer]:
        return [t for t in self.transfers.values() if t.is_receiving]

    def _readable(self) -> list[Transfer]:
        return [t for t in self._receiving() if set(t.dest) - t.pulled]

    def _pulled_full(self, transfer: Transfer) -> set[int]:
        had = set(range(transfer.num_full)) - set(transfer.dest) if transfer.dest else set()
        done = transfer.pulled | (had if transfer.is_receiving else set())
        return {index for index in done if index < min(transfer.num_full, len(transfer.lent))}

    def _as_lent(self, rig: EngineRig, block_id: BlockId) -> Lent:
        return Lent(block_id, rig.pool.gen(block_id), rig.cells[block_id].copy())

    def _is_as_lent(self, rig: EngineRig, lent: Lent) -> bool:
        is_held = rig.pool.num_refs(lent.block_id) > 0
        is_same = np.array_equal(rig.cells[lent.block_id], lent.content, equal_nan=True)
        return is_held and is_same and rig.pool.gen(lent.block_id) == lent.gen

    def _end_what_can(self, rng: random.Random) -> None:
        """Go on as the two transfer layers do, slowly; now and then a lease ends too early."""
        for transfer in self._receiving():
            if transfer.is_sink_cancelled:
                self._fail(transfer, recompute=False)
            elif transfer.is_complete():
                self._deliver(transfer)
            elif transfer.is_source_cancelled or (not transfer.is_lent and rng.random() < 0.1):
                self._fail(transfer, recompute=True)
            elif set(transfer.dest) - transfer.pulled:
                self._pull(transfer, rng.randrange(3))
            if transfer.is_unpinning and transfer.is_lent and transfer.final is not None:
                self._unpin(transfer, sorted(self._pulled_full(transfer) - transfer.given))
        for transfer in self.transfers.values():
            if transfer.is_lent and (not transfer.is_receiving or rng.random() < 0.01):
                transfer.is_lent = False
                self.prefill.release(transfer.key)
        self._hear()

    def _check_answer(self, transfer: Transfer) -> None:
        """Tokens of both sides together are those of one worker, unless it ended with a code."""
        output = self.decode.outputs.get(transfer.key)
        if output is None or output.refused is not None:
            return
        if output.end.reason in (EndReason.CANCELLED, EndReason.ERROR):
            return
        for choice, start in output.first_index.items():
            expected = reference_tokens(transfer.prompt, transfer.params, choice=choice)
            assert output.tokens[choice] == expected[start:]


TestTwoPools = TwoPools.TestCase
# Shrinking replays whole lives of two engines: minutes for a rule or two less.
TestTwoPools.settings = settings(
    phases=(Phase.reuse, Phase.generate), max_examples=30, stateful_step_count=50, deadline=None
)
