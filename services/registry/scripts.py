"""The Lua scripts: their text, their digests, and the arguments each takes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from services.common.light_value import light_value
from services.registry import schema
from services.registry.base import HintChange
from services.registry.cost import Ask, Candidate, Pairs, Weights
from services.registry.reservations import RESERVE_MS, SETTLE_MS
from services.registry.speculation import GRACE_MS

Arg = str | bytes | int
_CANDIDATE = struct.Struct("<HHBxxxId")
_PAIR = struct.Struct("<HHd")


@dataclass(frozen=True, slots=True)
class Script:
    """One script of this package."""

    name: str
    text: str
    sha: str


@light_value
class Invocation:
    """A script with its keys and arguments, ready for EVALSHA."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Arg, ...]


@light_value
class RouteAsk:
    """One request of a decision."""

    ask: Ask
    fields: bytes = b""  # 8 bytes a stride
    rid: str = ""  # of the reservation to make; empty = only answer


@cache
def load_script(name: str) -> Script:
    """Read a script of this package."""
    text = (resources.files("services.registry") / f"{name}.lua").read_text("utf-8")
    # SHA-1 is the store's name for a script, not a safeguard.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class ScriptCalls:
    """Builds invocations for one namespace. `now_ms` None means the store's own clock."""

    keys: schema.Keys
    lease_ms: int = schema.LEASE_MS
    reclaim_ms: int = schema.RECLAIM_MS
    sweep_buckets: int = 256
    reserve_ms: int = RESERVE_MS

    def join(
        self,
        *,
        worker_id: str,
        incarnation: int,
        info: str,
        record: bytes,
        proposed_gen: int,
        is_rejoin: bool,
        now_ms: int | None = None,
    ) -> Invocation:
        """Take a slot. Answers OK slot gen | VERSION theirs | SUPERSEDED | FULL."""
        return self._call(
            "join", schema.SCHEMA, worker_id, str(incarnation), info, record, proposed_gen,
            int(is_rejoin), self.lease_ms, self.reclaim_ms, schema.MAX_SLOTS, schema.NUM_BUCKETS,
            now_ms=now_ms,
        )  # fmt: skip

    def renew(self, slot: int, gen: int, record: bytes, now_ms: int | None = None) -> Invocation:
        """Extend the lease; sweep some buckets if hints became void. Answers OK | GONE."""
        no_change = ("", "", "", 0)
        return self._report(slot, gen, record, no_change, self.sweep_buckets, now_ms)

    def leave(self, slot: int, gen: int) -> Invocation:
        """Give the slot back. Answers OK | GONE."""
        return Invocation(load_script("leave"), self.keys.fixed(), (slot, gen, schema.NUM_BUCKETS))

    def publish(
        self,
        *,
        slot: int,
        gen: int,
        seq: int,
        change: HintChange,
        record: bytes,
        now_ms: int | None = None,
    ) -> Invocation:
        """Change hints; `seq` must follow the last one. Answers OK | RESYNC | GONE."""
        added, removed = schema.pack_fields(change.added), schema.pack_fields(change.removed)
        return self._report(slot, gen, record, (seq, added, removed, change.tier), 0, now_ms)

    def snapshot(self, known_infos: str, now_ms: int | None = None) -> Invocation:
        """Read all workers. Answers now_ms, version, w, wi."""
        return self._call("snapshot", known_infos, now_ms=now_ms)

    def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
        now_ms: int | None = None,
    ) -> Invocation:
        """Decide for some requests, the later ones knowing of the earlier. Answers one each."""
        args: list[Arg] = [
            "" if now_ms is None else now_ms, schema.NUM_BUCKETS, schema.SPEC_BUCKETS,
            self.reserve_ms,
            GRACE_MS, pack_doubles(weights.numbers()),
            b"".join(map(_pack_candidate, candidates)),
            b"".join(_PAIR.pack(p, d, token_s) for (p, d), token_s in pairs.items()),
        ]  # fmt: skip
        for ask in asks:
            args += (
                ask.rid, ask.fields, pack_doubles(ask.ask.numbers()),
                struct.pack(f"<{len(ask.ask.excluded)}H", *sorted(ask.ask.excluded)),
            )  # fmt: skip
        return Invocation(load_script("route"), self.keys.fixed(), tuple(args))

    def release(self, ends: Sequence[tuple[str, bytes]]) -> Invocation:
        """End reservations, each with the hash fields its worker turned out not to hold."""
        flat = [value for end in ends for value in end]
        return Invocation(
            load_script("release"),
            self.keys.fixed(),
            (schema.NUM_BUCKETS, schema.SPEC_BUCKETS, *flat),
        )

    def hold(self, rids: Sequence[str], now_ms: int | None = None) -> Invocation:
        """Extend reservations."""
        clock: Arg = "" if now_ms is None else now_ms
        return Invocation(load_script("hold"), self.keys.fixed(), (self.reserve_ms, clock, *rids))

    def _report(
        self,
        slot: int,
        gen: int,
        record: bytes,
        change: tuple[Arg, ...],
        sweep_buckets: int,
        now_ms: int | None,
    ) -> Invocation:
        return self._call(
            "publish", slot, gen, record, self.lease_ms, self.reclaim_ms, SETTLE_MS,
            schema.NUM_BUCKETS, *change, schema.MAX_OWNERS, schema.SPEC_BUCKETS, sweep_buckets,
            schema.TURN_MS, now_ms=now_ms,
        )  # fmt: skip

    def _call(self, name: str, *args: Arg, now_ms: int | None) -> Invocation:
        clock: Arg = "" if now_ms is None else now_ms
        return Invocation(load_script(name), self.keys.fixed(), (*args, clock))


def _pack_candidate(worker: Candidate) -> bytes:
    return _CANDIDATE.pack(worker.slot, worker.gen, worker.is_prefill, worker.seed, worker.newness)


def pack_doubles(numbers: Sequence[float]) -> bytes:
    """Pack numbers as the scripts read them."""
    return struct.pack(f"<{len(numbers)}d", *numbers)
