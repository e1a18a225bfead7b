"""Decisions by the index are those among all: two twins, equal events, equal verdicts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.registry.base import HintChange, LoadReport, WorkerInfo
from services.registry.candidate_index import CandidateIndex
from services.registry.cost import DECODE, MAX_ROWS, Ask, Candidate, Weights
from services.registry.scripts import RouteAsk
from services.registry.twin import RegistryTwin

WEIGHTS = Weights()
PROMPTS = [tuple(f"{p}:{i:06d}".encode() for i in range(12)) for p in range(4)]


def info(worker_id: str, role: str) -> WorkerInfo:
    """Describe a worker."""
    return WorkerInfo(
        WorkerId(worker_id), Incarnation(1), "127.0.0.1:1", role, "m", "fp", {}, "0" * 64, 16, 1, 0
    )


def drawn_load(rng: random.Random, kinds: Sequence[float]) -> LoadReport:
    """Few values, so that there are ties of every kind; some have not measured themselves."""
    return LoadReport(
        queued_uncached_tokens=rng.choice((0, 0, 500, 501, 8000)),
        resident_tokens=rng.choice((0, 1000, 1001, 50_000)),
        kv_free=rng.choice((0, 500, 1000)),
        kv_total=1000,
        rate_tok_s=rng.choice((0.0, 1000.0, 3000.0)),
        tbt_a_us=rng.choice((0.0, 9000.0, 12_000.0)),
        tbt_b_us=rng.choice(kinds),
        running=rng.choice((0, 3)),
        waiting=rng.choice((0, 0, 1, 2)),
    )


@dataclass(slots=True)
class Pair:
    """A twin that looks at all, and one that looks at few."""

    num_prefill: int
    num_decode: int
    rng: random.Random
    all_: RegistryTwin = field(default_factory=lambda: RegistryTwin(sweep_buckets=0))
    few: RegistryTwin = field(default_factory=lambda: RegistryTwin(sweep_buckets=0))
    now_ms: int = 1000
    candidates: tuple[Candidate, ...] = ()
    index: CandidateIndex | None = None
    num_asked: int = 0
    kinds: tuple[float, ...] = (0.0, 1.0, 1.1)

    @property
    def twins(self) -> tuple[RegistryTwin, RegistryTwin]:
        """Both, to be told the same."""
        return self.all_, self.few

    def build(self) -> None:
        """Let all join."""
        for i in range(self.num_prefill + self.num_decode):
            self.join(i)
        self.lay_out()

    def join(self, i: int) -> None:
        """Let one worker join, or join again."""
        who = info(f"w{i}", "prefill" if i < self.num_prefill else "decode")
        load = drawn_load(self.rng, self.kinds)
        for twin in self.twins:
            twin.join(who, "live", load, proposed_gen=1, is_rejoin=False, now_ms=self.now_ms)

    def lay_out(self) -> None:
        """Choose among those that are there now; some are new."""
        draw = random.Random(self.rng.random())
        self.candidates = tuple(
            Candidate(r.slot, r.slot_gen, r.info.role == "prefill", draw.getrandbits(32),
                      draw.choice((0.0, 0.0, 0.0, 0.5)))
            for r in self.all_.snapshot(self.now_ms)
        )  # fmt: skip
        if self.index is None:
            self.index = self.few.index(self.candidates)
        else:
            self.index.replace(self.candidates)

    def report(self) -> None:
        """Let some workers publish."""
        records = self.all_.snapshot(self.now_ms)
        for record in self.rng.sample(records, len(records) // 2):
            prompt = self.rng.choice(PROMPTS)
            names = tuple(BlockHash(n) for n in prompt[: self.rng.randrange(13)])
            change = HintChange(names, (), self.rng.choice((0, 0, 1)))
            load, owner = drawn_load(self.rng, self.kinds), (record.slot, record.slot_gen)
            seq = self.all_._slots[record.slot].seq + 1
            state = self.rng.choice(("live", "live", "live", "draining"))
            for twin in self.twins:
                twin.publish(owner, seq, change, load=load, now_ms=self.now_ms, state=state)

    def leave(self) -> None:
        """Let one worker leave."""
        records = self.all_.snapshot(self.now_ms)
        if records:
            record = self.rng.choice(records)
            for twin in self.twins:
                twin.leave(record.slot, record.slot_gen)

    def release(self) -> None:
        """End one request."""
        if self.num_asked:
            rid = f"r{self.rng.randrange(self.num_asked)}"
            lies = self.rng.choice((b"", b"".join(PROMPTS[0][:2])))
            for twin in self.twins:
                twin.release(rid, lies)

    def decide(self) -> None:
        """Ask both for the same."""
        asks = []
        for _ in range(self.rng.randrange(1, 4)):
            force = self.rng.choice((0, 0, 0, DECODE))
            slots = [c.slot for c in self.candidates] or [0]
            fields = b"".join(self.rng.choice(PROMPTS)[: self.rng.randrange(13)])
            excluded = self.rng.sample(slots, min(len(slots), self.rng.choice((0, 2))))
            ask = Ask(
                self.rng.choice((100, 800, 4000)), 100, 1000, bypass_tokens=512,
                root=self.rng.getrandbits(32), force=force, source=self.rng.choice(slots),
                excluded=frozenset(excluded),
            )  # fmt: skip
            rid = self.rng.choice(("", f"r{self.num_asked}"))
            asks.append(RouteAsk(ask, b"" if force == DECODE else fields, rid))
            self.num_asked += 1
        assert self.index is not None
        among_all = self.all_.route(WEIGHTS, self.candidates, {}, asks, self.now_ms)
        among_few = self.few.route_indexed(WEIGHTS, self.index, {}, asks, self.now_ms)
        assert among_few == among_all


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([(3, 2), (40, 40), (80, 5), (5, 80)]))
def test_the_index_decides_as_a_look_at_all_does(seed: int, sizes: tuple[int, int]) -> None:
    rng = random.Random(seed)
    pair = Pair(*sizes, rng)
    pair.build()
    for _ in range(15):
        pair.now_ms += rng.choice((1, 1, 1, 1, 160, 160, 400, 1200))
        act = rng.choice((pair.report, pair.report, pair.leave, pair.release, pair.lay_out))
        act()
        if rng.randrange(6) == 0:
            pair.join(rng.randrange(sum(sizes)))
        pair.decide()


def test_few_of_many_are_looked_at() -> None:
    """With a thousand idle workers a decision prices no more than with a hundred."""
    pair = Pair(900, 100, random.Random(0))
    pair.kinds = (1.0,)
    pair.build()
    assert pair.index is not None
    pair.index.replace([c._replace(newness=0.0) for c in pair.candidates])
    pair.index.refresh(pair.now_ms)
    unmeasured = sum(
        (c.is_prefill and pair.few._slots[c.slot].load.rate_tok_s == 0)
        or (not c.is_prefill and pair.few._slots[c.slot].load.tbt_a_us == 0)
        for c in pair.candidates
    )
    slots, census = pair.index.promising([7], Ask(100, 10, 100))
    assert 7 in set(slots)
    assert census.num_rows == 1000
    assert len(list(slots)) - unmeasured <= MAX_ROWS
