"""The Lua scripts: their text, their digests, and the arguments each takes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from services.common.ids import BlockHash
from services.registry import schema

Arg = str | bytes | int


@dataclass(frozen=True, slots=True)
class Script:
    """One script of this package."""

    name: str
    text: str
    sha: str


@dataclass(frozen=True, slots=True)
class Invocation:
    """A script with its keys and arguments, ready for EVALSHA."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Arg, ...]


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
        return self._call(
            "renew", slot, gen, record, self.lease_ms, self.reclaim_ms, self.sweep_buckets,
            schema.NUM_BUCKETS, now_ms=now_ms,
        )  # fmt: skip

    def leave(self, slot: int, gen: int) -> Invocation:
        """Give the slot back. Answers OK | GONE."""
        return Invocation(load_script("leave"), self.keys.fixed(), (slot, gen, schema.NUM_BUCKETS))

    def publish(
        self,
        *,
        slot: int,
        gen: int,
        seq: int,
        added: Sequence[BlockHash],
        removed: Sequence[BlockHash],
        record: bytes,
        now_ms: int | None = None,
    ) -> Invocation:
        """Change hints; `seq` must follow the last one. Answers OK | RESYNC | GONE."""
        return self._call(
            "publish", slot, gen, seq, schema.pack_fields(added), schema.pack_fields(removed),
            record, self.lease_ms, self.reclaim_ms, schema.NUM_BUCKETS, schema.MAX_OWNERS,
            now_ms=now_ms,
        )  # fmt: skip

    def lookup(
        self, strides: Sequence[BlockHash], known_infos: str, now_ms: int | None = None
    ) -> Invocation:
        """Read all workers and hint depths. Answers now_ms, version, w, wi, depths."""
        return self._call(
            "lookup", schema.pack_fields(strides), known_infos, schema.NUM_BUCKETS, now_ms=now_ms
        )

    def _call(self, name: str, *args: Arg, now_ms: int | None) -> Invocation:
        clock: Arg = "" if now_ms is None else now_ms
        return Invocation(load_script(name), self.keys.fixed(), (*args, clock))
