"""The scripts in Python: same meaning, same answers, `now_ms` given. For simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.ids import BlockHash, WorkerId
from services.registry.answers import JoinAnswer
from services.registry.base import HintAnswer, LoadReport, WorkerInfo, WorkerRecord
from services.registry.schema import (
    LEASE_MS,
    MAX_OWNERS,
    MAX_SLOTS,
    NUM_BUCKETS,
    RECLAIM_MS,
    SCHEMA,
    bucket_of,
    pack_fields,
    stride_hashes,
)

Owner = tuple[int, int]  # slot, slot_gen


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
    sweep_buckets: int = 256
    version: str | None = None
    info_version: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _names: dict[WorkerId, int] = field(default_factory=dict)
    _hints: dict[bytes, list[Owner]] = field(default_factory=dict)
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
            slot = next((s for s in range(MAX_SLOTS) if self._is_free(s, now_ms)), None)
            if slot is None:
                return JoinAnswer("FULL")
        old = self._slots.get(slot)
        if old is not None:
            self._sweep_until = self._cursor + NUM_BUCKETS
            if old.info is not None:
                self._names.pop(old.info.worker_id, None)
        gen = (old.gen if old else proposed_gen) % 65535 + 1
        self._slots[slot] = _Slot(gen, state, now_ms + self.lease_ms, 0, load, info)
        self._names[info.worker_id] = slot
        self.info_version = (self.info_version or now_ms) + 1
        return JoinAnswer("OK", slot, gen)

    def renew(self, slot: int, gen: int, state: str, load: LoadReport, now_ms: int) -> str:
        """Extend a lease and scrub a few buckets."""
        held = self._live(slot, gen, now_ms)
        if held is None:
            return "GONE"
        held.state, held.load, held.deadline_ms = state, load, now_ms + self.lease_ms
        if self.sweep_buckets:
            self._sweep(now_ms)
        return "OK"

    def leave(self, slot: int, gen: int) -> str:
        """Give a slot back."""
        held = self._slots.get(slot)
        if held is None or held.state == "" or held.gen != gen:
            return "GONE"
        self._bury(held)
        return "OK"

    def publish(
        self,
        owner: Owner,
        seq: int,
        added: Sequence[BlockHash],
        removed: Sequence[BlockHash],
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
        held.state, held.load, held.deadline_ms = state, load, now_ms + self.lease_ms
        held.seq = seq
        if is_again:
            return "OK"
        valid = self._valid(now_ms)
        for hashes, is_add in ((removed, False), (added, True)):
            for field_name in _fields(hashes):
                self._edit(field_name, (slot, gen), valid, is_add=is_add)
        return "OK"

    def lookup(self, hashes: Sequence[BlockHash], now_ms: int) -> HintAnswer:
        """Return workers and hint depths for a prompt's whole hash chain."""
        valid = {(s, h.gen) for s, h in self._slots.items() if h.state}
        owners = [
            {slot & 0x3FFF for slot, gen in self._hints.get(f, ()) if (slot & 0x3FFF, gen) in valid}
            for f in _fields(stride_hashes(hashes))
        ]
        return HintAnswer(self.snapshot(now_ms), depths(owners))

    def snapshot(self, now_ms: int) -> tuple[WorkerRecord, ...]:
        """Return all workers, expired ones included."""
        return tuple(
            WorkerRecord(slot, h.gen, h.state, h.deadline_ms - now_ms, h.load, h.info)
            for slot, h in sorted(self._slots.items())
            if h.state and h.info is not None
        )

    def flush(self) -> None:
        """Forget everything, as a store that restarted empty."""
        self._slots.clear()
        self._names.clear()
        self._hints.clear()
        self.version, self.info_version = None, 0
        self._cursor = self._sweep_until = 0

    def num_hints(self) -> int:
        """Return how many hashes have owners."""
        return len(self._hints)

    def _live(self, slot: int, gen: int, now_ms: int) -> _Slot | None:
        held = self._slots.get(slot)
        if held is None or held.state == "" or held.gen != gen:
            return None
        return held if held.deadline_ms + self.reclaim_ms >= now_ms else None

    def _is_free(self, slot: int, now_ms: int) -> bool:
        held = self._slots.get(slot)
        return held is None or held.state == "" or held.deadline_ms + self.reclaim_ms < now_ms

    def _bury(self, held: _Slot) -> None:
        if held.info is not None:
            self._names.pop(held.info.worker_id, None)
        held.state, held.info = "", None
        self._sweep_until = self._cursor + NUM_BUCKETS
        self.info_version += 1

    def _valid(self, now_ms: int) -> set[Owner]:
        return {
            (slot, held.gen)
            for slot, held in self._slots.items()
            if held.state and held.deadline_ms + self.reclaim_ms >= now_ms
        }

    def _sweep(self, now_ms: int) -> None:
        for held in self._slots.values():
            if held.state and held.deadline_ms + self.reclaim_ms < now_ms:
                self._bury(held)
        valid = self._valid(now_ms)
        stop = max(self._cursor, min(self._cursor + self.sweep_buckets, self._sweep_until))
        swept = {i % NUM_BUCKETS for i in range(self._cursor, stop)}
        self._cursor = stop
        for field_name in [f for f in self._hints if bucket_of(f) in swept]:
            self._store(field_name, [o for o in self._hints[field_name] if o in valid])

    def _edit(self, field_name: bytes, mine: Owner, valid: set[Owner], *, is_add: bool) -> None:
        kept = [o for o in self._hints.get(field_name, ()) if o in valid and o[0] != mine[0]]
        if is_add and len(kept) < MAX_OWNERS:
            kept.append(mine)
        self._store(field_name, kept)

    def _store(self, field_name: bytes, owners: list[Owner]) -> None:
        if owners:
            self._hints[field_name] = owners
        else:
            self._hints.pop(field_name, None)


def depths(owners: Sequence[set[int]]) -> dict[int, int]:
    """Return, per slot, how many leading strides it holds; looks only where owner sets differ."""
    num = len(owners)
    if num == 0:
        return {}
    depth = dict.fromkeys(owners[0], num)

    def bisect(lo: int, hi: int, at_lo: set[int], at_hi: set[int]) -> None:
        if len(at_lo) == len(at_hi):
            return
        if hi - lo == 1:
            for slot in at_lo - at_hi:
                depth[slot] = lo
            return
        mid = (lo + hi) // 2
        at_mid = owners[mid - 1] & at_lo
        bisect(lo, mid, at_lo, at_mid)
        bisect(mid, hi, at_mid, at_hi & at_mid)

    if num > 1:
        bisect(1, num, owners[0], owners[-1] & owners[0])
    return depth


def _fields(hashes: Sequence[BlockHash]) -> list[bytes]:
    packed = pack_fields(hashes)
    return [packed[i : i + 8] for i in range(0, len(packed), 8)]
