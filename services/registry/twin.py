"""The scripts in Python: same meaning, same answers, `now_ms` given. For simulation and tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from services.common.ids import WorkerId
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry.answers import JoinAnswer
from services.registry.base import HintChange, LoadReport, WorkerInfo, WorkerRecord
from services.registry.candidate_index import CandidateIndex
from services.registry.cost import (
    DECODE,
    Booked,
    Candidate,
    Pairs,
    Row,
    Verdict,
    Weights,
    decide,
    prefill_tokens,
    resident_tokens,
)
from services.registry.depth import Depths, depths, depths_of_one_level
from services.registry.owners import SLOT_MASK, TIER_SHIFT, Known, Owner, Tagged
from services.registry.reservations import Reservations
from services.registry.schema import (
    LEASE_MS,
    MAX_OWNERS,
    MAX_SLOTS,
    NUM_BUCKETS,
    RECLAIM_MS,
    SCHEMA,
    TURN_MS,
    bucket_of,
    field_names,
    unpack_fields,
)
from services.registry.scripts import RouteAsk
from services.registry.speculation import Speculation, expiry_s

_STRIDE_TOKENS = BLOCK_TOKENS * HINT_STRIDE_BLOCKS
_NO_HIT = (0.0, 0.0)


class _Hits(Protocol):
    """The tokens of a prompt that workers hold, will hold, and said that they hold."""

    def of(self, owner: Owner) -> tuple[float, float]:
        """Return what one holds or will hold, and what it said."""
        ...

    def confirmed(self, owner: Owner) -> int:
        """Return the whole strides that one holds in GPU memory."""
        ...

    def __iter__(self) -> Iterator[int]:
        """Go through the slots of all who hold something, the longest hits first."""
        ...


@dataclass(frozen=True, slots=True)
class _PlainHits:
    """All in GPU memory. Hundreds of workers may hold a prefix, of whom few are asked for."""

    held: Depths[Owner]
    coming: Depths[Owner]  # with what is held

    def of(self, owner: Owner) -> tuple[float, float]:
        held = self.held.of(owner)
        return _STRIDE_TOKENS * max(held, self.coming.of(owner)), _STRIDE_TOKENS * held

    def confirmed(self, owner: Owner) -> int:
        return self.held.of(owner)

    def __iter__(self) -> Iterator[int]:
        told: set[Owner] = set()
        groups = sorted((*self.held.groups, *self.coming.groups), key=lambda group: -group[0])
        for _, equal in groupby(groups, key=lambda group: group[0]):
            owners = {o for _, group in equal for o in group - told}
            yield from sorted([slot for slot, _ in owners])
            told |= owners


@dataclass(frozen=True, slots=True)
class _TieredHits:
    """Some of it in slower memory, which is worth less."""

    tokens: Mapping[Owner, tuple[float, float]]
    gpu: Mapping[Owner, int]

    def of(self, owner: Owner) -> tuple[float, float]:
        return self.tokens.get(owner, _NO_HIT)

    def confirmed(self, owner: Owner) -> int:
        return self.gpu.get(owner, 0)

    def __iter__(self) -> Iterator[int]:
        ranked = sorted((-hit, owner[0]) for owner, (hit, _) in self.tokens.items())
        return (slot for _, slot in ranked)


@dataclass(slots=True)
class _Slot:
    gen: int
    state: str  # "live" | "draining" | "" for a tombstone
    deadline_ms: int
    seq: int
    load: LoadReport
    info: WorkerInfo | None


@dataclass(slots=True)
class RegistryTwin:
    """One namespace of the registry in memory."""

    lease_ms: int = LEASE_MS
    reclaim_ms: int = RECLAIM_MS
    max_slots: int = MAX_SLOTS
    sweep_buckets: int = 256
    version: str | None = None
    info_version: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _names: dict[WorkerId, int] = field(default_factory=dict)
    # Owners of a field; fields that share them hold one and the same tuple.
    _hints: dict[bytes, tuple[Tagged, ...]] = field(default_factory=dict)
    reservations: Reservations = field(default_factory=Reservations)
    speculation: Speculation[Owner] = field(default_factory=Speculation)
    _has_tiers: bool = False  # some hint is not of GPU memory
    _is_stale: bool = False  # some owner of a hint may have begun another life
    _valid_until: float = math.inf  # no worker is given up before
    _turn_until: float = 0
    _cursor: int = 0
    _sweep_until: int = 0

    def join(
        self,
        info: WorkerInfo,
        state: str,
        load: LoadReport,
        *,
        proposed_gen: int,
        is_rejoin: bool,
        now_ms: int,
        schema: str = SCHEMA,
    ) -> JoinAnswer:
        """Take a slot and raise its generation."""
        if self.version is not None and self.version != schema:
            return JoinAnswer("VERSION", detail=self.version)
        self.version = schema
        slot = self._names.get(info.worker_id)
        if slot is not None:
            held = self._slots.get(slot)
            holder = held.info if held is not None and held.deadline_ms > now_ms else None
            if is_rejoin and holder and holder.incarnation != info.incarnation:
                return JoinAnswer("SUPERSEDED")
        else:
            held_by = self._slots.get
            # Joins take the first free slot: while nobody is gone, all up to the last are taken.
            first = len(self._slots) if self._are_valid(now_ms) else 0
            slot = next(
                (
                    s
                    for s in range(first, self.max_slots)
                    if (held := held_by(s)) is None or self._is_free(held, now_ms)
                ),
                None,
            )
            if slot is None:
                return JoinAnswer("FULL")
        old = self._slots.get(slot)
        if old is not None:
            self._is_stale = True
            self._sweep_until = self._cursor + NUM_BUCKETS
            if old.info is not None:
                self._names.pop(old.info.worker_id, None)
        gen = (old.gen if old else proposed_gen) % 65535 + 1
        self.reservations.touched.add(slot)
        self._slots[slot] = joined = _Slot(gen, state, 0, 0, load, info)
        self._lend(joined, now_ms)
        self._names[info.worker_id] = slot
        self.info_version = (self.info_version or now_ms) + 1
        return JoinAnswer("OK", slot, gen)

    def renew(self, slot: int, gen: int, state: str, load: LoadReport, now_ms: int) -> str:
        """Extend a lease and scrub a few buckets."""
        held = self._live(slot, gen, now_ms)
        if held is None:
            return "GONE"
        held.state, held.load = state, load
        self._lend(held, now_ms)
        self.reservations.touched.add(slot)
        self.reservations.settle((slot, gen), now_ms)
        if self.sweep_buckets and self._turn_until <= now_ms:
            self._turn_until = now_ms + TURN_MS
            self._sweep(now_ms)
        return "OK"

    def leave(self, slot: int, gen: int) -> str:
        """Give a slot back."""
        held = self._slots.get(slot)
        if held is None or held.state == "" or held.gen != gen:
            return "GONE"
        self._bury(slot, held)
        return "OK"

    def publish(
        self,
        owner: Owner,
        seq: int,
        change: HintChange,
        *,
        load: LoadReport,
        now_ms: int,
        state: str = "live",
    ) -> str:
        """Change hints of one worker."""
        slot, gen = owner
        held = self._live(slot, gen, now_ms)
        if held is None:
            return "GONE"
        if seq not in (held.seq, held.seq + 1):
            return "RESYNC"
        is_again = seq == held.seq
        held.state, held.load = state, load
        self._lend(held, now_ms)
        held.seq = seq
        self.reservations.touched.add(slot)
        self.reservations.settle(owner, now_ms)
        if is_again:
            return "OK"
        self._has_tiers = self._has_tiers or change.tier > 0
        mine = (slot | change.tier << TIER_SHIFT, gen)
        for hashes, is_add in ((change.removed, False), (change.added, True)):
            names = field_names(hashes)
            self.speculation.drop_all(names, owner)
            if is_add:
                self._add(names, mine, now_ms)
            else:
                self._take_out(names, mine, now_ms)
        return "OK"

    def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
        now_ms: int,
    ) -> tuple[Verdict | None, ...]:
        """Decide for some requests, reserve, and note what the chosen will hold."""
        self.reservations.sweep(now_ms)
        listed = [c for c in candidates if self._is_usable(c, now_ms)]
        return tuple(self._route_one(weights, listed, pairs, ask, now_ms) for ask in asks)

    def index(self, candidates: Sequence[Candidate]) -> CandidateIndex:
        """Keep candidates in order of load; there can be one such index at a time."""
        return CandidateIndex(self, self.reservations.touched, candidates)

    def route_indexed(
        self,
        weights: Weights,
        index: CandidateIndex,
        pairs: Pairs,
        asks: Sequence[RouteAsk],
        now_ms: int,
    ) -> tuple[Verdict | None, ...]:
        """Decide as `route` does among all of the index, looking at few of them."""
        self.reservations.sweep(now_ms)
        verdicts = []
        for ask in asks:
            index.refresh(now_ms)
            fields = unpack_fields(ask.fields)
            hits = self._hits(fields, index.known, now_ms)
            slots, census = index.promising(hits, ask.ask)
            rows = self._rows([index.candidate(slot) for slot in slots], hits)
            verdict = decide(weights, ask.ask, rows, pairs, census)
            self._book(ask, fields, hits, verdict, now_ms)
            verdicts.append(verdict)
        return tuple(verdicts)

    def load_of(self, candidate: Candidate, now_ms: int) -> LoadReport | None:
        """Return the load of a candidate that may be chosen; None of another."""
        return self._slots[candidate.slot].load if self._is_usable(candidate, now_ms) else None

    def booked(self, owner: Owner) -> Booked:
        """Return the work a worker has coming."""
        return self.reservations.booked(owner)

    def lease_until(self, slot: int) -> float:
        """Return the moment from which a worker may not be chosen."""
        return self._slots[slot].deadline_ms

    def release(self, rid: str, lies: bytes = b"") -> None:
        """End a reservation; withdraw hints its worker turned out not to hold."""
        owner = self.reservations.release(rid)
        if owner is None:
            return
        for name in unpack_fields(lies):
            self.speculation.drop(name, owner)
            held = self._hints.get(name, ())
            self._store(name, tuple(o for o in held if (o[0] & SLOT_MASK, o[1]) != owner))

    def snapshot(self, now_ms: int) -> tuple[WorkerRecord, ...]:
        """Return all workers, expired ones included."""
        return tuple(
            WorkerRecord(slot, h.gen, h.state, h.deadline_ms - now_ms, h.load, h.info)
            for slot, h in sorted(self._slots.items())
            if h.state and h.info is not None
        )

    def flush(self) -> None:
        """Forget everything, as a store that restarted empty."""
        self.reservations.touched.update(self._slots)
        self._slots.clear()
        self._names.clear()
        self._hints.clear()
        self.reservations.clear()
        self.speculation.clear()
        self.version, self.info_version = None, 0
        self._has_tiers = self._is_stale = False
        self._valid_until = math.inf
        self._turn_until = 0
        self._cursor = self._sweep_until = 0

    def num_hints(self) -> int:
        """Return how many hashes have owners."""
        return len(self._hints)

    def _is_usable(self, candidate: Candidate, now_ms: int) -> bool:
        held = self._slots.get(candidate.slot)
        return (
            held is not None
            and held.gen == candidate.gen
            and held.state == "live"
            and held.deadline_ms > now_ms
        )

    def _route_one(
        self,
        weights: Weights,
        listed: Sequence[Candidate],
        pairs: Pairs,
        ask: RouteAsk,
        now_ms: int,
    ) -> Verdict | None:
        fields = unpack_fields(ask.fields)
        hits = self._hits(fields, Known({(c.slot, c.gen) for c in listed}), now_ms)
        verdict = decide(weights, ask.ask, self._rows(listed, hits), pairs)
        self._book(ask, fields, hits, verdict, now_ms)
        return verdict

    def _hits(self, fields: Sequence[bytes], known: Known, now_ms: int) -> _Hits:
        if self._has_tiers:
            return self._tiered_hits(fields, known, now_ms)
        hints = self._hints
        held = depths_of_one_level(
            lambda i: known.holders(hints.get(fields[i - 1], ())), len(fields)
        )
        return _PlainHits(held, self.speculation.strides(fields, known.owners, held, now_ms))

    def _tiered_hits(self, fields: Sequence[bytes], known: Known, now_ms: int) -> _Hits:
        levels = depths(lambda i: self._owners(fields[i - 1], known), len(fields))
        gpu = levels[3]
        hits: dict[Owner, tuple[float, float]] = {}
        for owner, on_disk in levels[1].items():
            on_gpu, on_host = gpu.get(owner, 0), levels[2].get(owner, 0)
            parts = on_gpu + 0.9 * (on_host - on_gpu) + 0.5 * (on_disk - on_host)
            hits[owner] = (_STRIDE_TOKENS * parts, _STRIDE_TOKENS * parts)
        ranked = sorted(gpu.items(), key=lambda item: -item[1])
        held = [
            (n, {o for o, _ in equal}) for n, equal in groupby(ranked, key=lambda item: item[1])
        ]
        coming = self.speculation.strides(fields, known.owners, Depths(held), now_ms)
        for owner, strides in coming.by_owner().items():
            hit, hint = hits.get(owner, _NO_HIT)
            if _STRIDE_TOKENS * strides > hit:
                hits[owner] = (_STRIDE_TOKENS * strides, hint)
        return _TieredHits(hits, gpu)

    def _rows(self, candidates: Sequence[Candidate], hits: _Hits) -> list[Row]:
        rows = []
        for candidate in candidates:
            owner = (candidate.slot, candidate.gen)
            load, booked = self._slots[candidate.slot].load, self.reservations.booked(owner)
            rows.append(Row(candidate, load, booked, *hits.of(owner)))
        return rows

    def _book(
        self,
        ask: RouteAsk,
        fields: Sequence[bytes],
        hits: _Hits,
        verdict: Verdict | None,
        now_ms: int,
    ) -> None:
        """Reserve what was chosen, and note what it will hold."""
        if verdict is None or not ask.rid:
            return
        chosen = verdict.chosen
        owner = (chosen.slot, self._slots[chosen.slot].gen)
        self.reservations.reserve(
            ask.rid, owner, prefill_tokens(chosen), resident_tokens(chosen, ask.ask), now_ms
        )
        if chosen.kind != DECODE:
            until_s = expiry_s(now_ms, chosen.prefill_s)
            self.speculation.note(fields, owner, hits.confirmed(owner), until_s, now_ms)

    def _owners(self, name: bytes, known: Known) -> Mapping[Owner, int]:
        """Owners of a field, each with the level of its best tier."""
        return known.levels(self._hints.get(name, ()))

    def _live(self, slot: int, gen: int, now_ms: int) -> _Slot | None:
        held = self._slots.get(slot)
        if held is None or held.state == "" or held.gen != gen:
            return None
        return held if held.deadline_ms + self.reclaim_ms >= now_ms else None

    def _is_free(self, held: _Slot, now_ms: int) -> bool:
        return held.state == "" or held.deadline_ms + self.reclaim_ms < now_ms

    def _bury(self, slot: int, held: _Slot) -> None:
        self.reservations.touched.add(slot)
        self._is_stale = True
        if held.info is not None:
            self._names.pop(held.info.worker_id, None)
        held.state, held.info = "", None
        self._sweep_until = self._cursor + NUM_BUCKETS
        self.info_version += 1

    def _are_valid(self, now_ms: int) -> bool:
        """Whether all owners of all hints are still there: mostly, and found at once."""
        if now_ms > self._valid_until and not self._is_stale:
            deadlines = [held.deadline_ms for held in self._slots.values() if held.state]
            self._valid_until = min(deadlines, default=math.inf) + self.reclaim_ms
            self._is_stale = now_ms > self._valid_until
        return not self._is_stale

    def _lend(self, held: _Slot, now_ms: int) -> None:
        held.deadline_ms = now_ms + self.lease_ms
        self._valid_until = min(self._valid_until, held.deadline_ms + self.reclaim_ms)

    def _is_valid(self, tagged: Tagged, now_ms: int) -> bool:
        held = self._slots.get(tagged[0] & SLOT_MASK)
        return (
            held is not None
            and held.gen == tagged[1]
            and held.state != ""
            and held.deadline_ms + self.reclaim_ms >= now_ms
        )

    def _sweep(self, now_ms: int) -> None:
        for slot, held in self._slots.items():
            if held.state and held.deadline_ms + self.reclaim_ms < now_ms:
                self._bury(slot, held)
        stop = max(self._cursor, min(self._cursor + self.sweep_buckets, self._sweep_until))
        swept = {i % NUM_BUCKETS for i in range(self._cursor, stop)}
        self._cursor = stop
        for field_name in [f for f in self._hints if bucket_of(f) in swept]:
            self._store(
                field_name, tuple(o for o in self._hints[field_name] if self._is_valid(o, now_ms))
            )

    def _add(self, names: Sequence[bytes], mine: Tagged, now_ms: int) -> None:
        """Add an owner to many fields: most have none, and neighbours in a prompt share theirs."""
        hints, alone = self._hints, (mine,)
        was: tuple[Tagged, ...] | None = None
        becomes: tuple[Tagged, ...] = ()
        for name in names:
            owners = hints.setdefault(name, alone)
            if owners is alone:
                continue
            if owners is not was:
                was, becomes = owners, self._edited(owners, mine, now_ms, is_add=True)
            hints[name] = becomes

    def _take_out(self, names: Sequence[bytes], mine: Tagged, now_ms: int) -> None:
        """Remove an owner from many fields."""
        hints = self._hints
        was: tuple[Tagged, ...] | None = None
        becomes: tuple[Tagged, ...] = ()
        for name in names:
            owners = hints.get(name, ())
            if owners is not was:
                was, becomes = owners, self._edited(owners, mine, now_ms, is_add=False)
            if becomes:
                hints[name] = becomes
            elif owners:
                del hints[name]

    def _edited(
        self, owners: tuple[Tagged, ...], mine: Tagged, now_ms: int, *, is_add: bool
    ) -> tuple[Tagged, ...]:
        slot = mine[0] & SLOT_MASK
        if self._are_valid(now_ms):
            kept = tuple([o for o in owners if o[0] & SLOT_MASK != slot])
        else:
            kept = tuple(
                o for o in owners if o[0] & SLOT_MASK != slot and self._is_valid(o, now_ms)
            )
        if is_add and len(kept) < MAX_OWNERS:
            return (*kept, mine)
        return owners if len(kept) == len(owners) else kept

    def _store(self, field_name: bytes, owners: tuple[Tagged, ...]) -> None:
        if owners:
            self._hints[field_name] = owners
        else:
            self._hints.pop(field_name, None)
