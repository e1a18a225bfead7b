"""Key names and packed values of the registry; what they look like is a contract between versions.

One hash tag per base model, so that every key of a model lives in one cluster slot:
  isthmus:{ns}:w    slot -> 64 packed bytes: generation, role, state, lease deadline, load
  isthmus:{ns}:wi   slot -> JSON of WorkerInfo
  isthmus:{ns}:wn   worker id -> slot
  isthmus:{ns}:wv   counter raised whenever `wi` changes
  isthmus:{ns}:ver  schema, block size, hint stride, hash scheme
  isthmus:{ns}:sc   cursor and end of the sweep that follows when a slot changes hands, and until
                    when somebody has the janitor's turn
  isthmus:{ns}:b:N  first 8 bytes of a block hash -> n x (u16 slot, u16 slot_gen)
  isthmus:{ns}:s:N  the same of prompts on their way to a worker, with an expiry in u32 seconds
  isthmus:{ns}:q    slot -> 40 packed bytes: reserved work that no report shows yet
  isthmus:{ns}:r:R  one reservation: slot, slot_gen, epoch, prefill tokens, resident tokens
  isthmus:{ns}:rz   (slot, slot_gen, R) by expiry, for reservations that nobody releases
  isthmus:{ns}:rt   router id -> when it spoke, and JSON of what it counted, for the autoscaler
  isthmus:{ns}:as   the autoscaler: its lease, its state, what it tells routers
Budgets of tenants are of no model: isthmus:{limits}:lim:NAME (services/registry/limits.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.kv.hashing import HASH_SCHEME
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry.base import LoadReport, WorkerInfo

SCHEMA = f"2;block={BLOCK_TOKENS};stride={HINT_STRIDE_BLOCKS};hash={HASH_SCHEME}"
NUM_BUCKETS = 8192
SPEC_BUCKETS = 1024
MAX_SLOTS = 1024  # the 14 low bits of a slot are its number, the 2 high ones a cache tier
MAX_OWNERS = 256  # workers remembered per hash
HASH_FIELD_BYTES = 8
RECORD_BYTES = 64
LEASE_MS = 2000
RECLAIM_MS = 30_000  # an expired worker keeps its slot and its hints for this long
TURN_MS = 100  # of the janitor: many workers sweep no faster than one in a hurry

# gen, role, state, running, waiting, lease deadline, queued, resident, kv_free, kv_total,
# rate, tbt_a, tbt_b, publish sequence, topology, kv_cached
_RECORD = struct.Struct("<HBBHHdIIIIfffdII4x")
_ROLES = {"prefill": 1, "decode": 2}
_STATES = {"live": 1, "draining": 2}
_ROLE_NAMES = {code: name for name, code in _ROLES.items()}
_STATE_NAMES = {code: name for name, code in _STATES.items()}
GONE = 0  # state of a tombstone


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A `w` value, unpacked."""

    gen: int
    role: str
    state: str
    deadline_ms: float
    load: LoadReport


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one namespace."""

    namespace: str

    @property
    def prefix(self) -> str:
        """What every key begins with."""
        return f"isthmus:{{{self.namespace}}}:"

    def fixed(self) -> tuple[str, ...]:
        """The keys each script gets, in the order all of them expect."""
        return _fixed_keys(self.prefix)


@lru_cache(maxsize=16)  # a process has few namespaces, and runs a script or two a request
def _fixed_keys(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in ("w", "wi", "ver", "wv", "wn", "sc"))


def namespace_of(weights_digest: str) -> str:
    """Return the namespace of a base model."""
    return weights_digest[:16]


def pack_record(role: str, state: str, load: LoadReport) -> bytes:
    """Pack what a worker says about itself; the scripts fill in generation, lease and sequence."""
    return _RECORD.pack(
        0,
        _ROLES[role],
        _STATES[state],
        min(load.running, 0xFFFF),
        min(load.waiting, 0xFFFF),
        0.0,
        _u32(load.queued_uncached_tokens),
        _u32(load.resident_tokens),
        _u32(load.kv_free),
        _u32(load.kv_total),
        load.rate_tok_s,
        load.tbt_a_us,
        load.tbt_b_us,
        0.0,
        0,
        _u32(load.kv_cached),
    )


def unpack_record(data: bytes) -> PackedRecord | None:
    """Unpack a `w` value; None for a tombstone or for bytes that are no record."""
    if len(data) != RECORD_BYTES:
        return None
    gen, role, state, running, waiting, deadline, *rest = _RECORD.unpack(data)
    if role not in _ROLE_NAMES or state not in _STATE_NAMES or deadline != deadline:
        return None
    queued, resident, kv_free, kv_total, rate, tbt_a, tbt_b, _seq, _topology, kv_cached = rest
    load = LoadReport(
        queued, resident, kv_free, kv_total, _sane(rate), _sane(tbt_a), _sane(tbt_b),
        running, waiting, kv_cached,
    )  # fmt: skip
    return PackedRecord(gen, _ROLE_NAMES[role], _STATE_NAMES[state], deadline, load)


def encode_info(info: WorkerInfo) -> str:
    """Write a WorkerInfo as JSON. The incarnation is text: Lua numbers hold 53 bits only."""
    fields = {**asdict(info), "identity_fields": dict(info.identity_fields)}
    fields["incarnation"] = str(info.incarnation)
    return json.dumps(fields, sort_keys=True, allow_nan=False)


def decode_info(data: bytes) -> WorkerInfo | None:
    """Read a WorkerInfo; None when the bytes are none, since the store is not to be trusted."""
    try:
        raw = json.loads(data)
        return WorkerInfo(
            worker_id=WorkerId(_text(raw["worker_id"])),
            incarnation=Incarnation(int(_text(raw["incarnation"]))),
            address=_text(raw["address"]),
            role=_text(raw["role"]),
            model=_text(raw["model"]),
            kv_identity_fp=_text(raw["kv_identity_fp"]),
            identity_fields={_text(k): _text(v) for k, v in raw["identity_fields"].items()},
            weights_digest=_text(raw["weights_digest"]),
            block_size=_count(raw["block_size"]),
            max_model_len=_count(raw["max_model_len"]),
            started_unix_ms=_count(raw["started_unix_ms"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def field_names(hashes: Sequence[BlockHash]) -> list[bytes]:
    """Return the 8-byte field names of block hashes."""
    if hashes and len(hashes[0]) == HASH_FIELD_BYTES:
        return list[bytes](hashes)  # names already, as a simulation has them
    return [block_hash[:HASH_FIELD_BYTES] for block_hash in hashes]


def pack_fields(hashes: Sequence[BlockHash]) -> bytes:
    """Join the field names of block hashes."""
    return b"".join(field_names(hashes))


def unpack_fields(packed: bytes) -> list[bytes]:
    """Part what pack_fields joined."""
    return [packed[i : i + HASH_FIELD_BYTES] for i in range(0, len(packed), HASH_FIELD_BYTES)]


def stride_hashes(hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
    """Return the values of a hash chain that hints are asked for."""
    return hashes[HINT_STRIDE_BLOCKS - 1 :: HINT_STRIDE_BLOCKS]


def bucket_of(field: bytes) -> int:
    """Return the bucket of an 8-byte field name."""
    return int.from_bytes(field[:2], "little") % NUM_BUCKETS


def _u32(value: int) -> int:
    return max(0, min(value, 0xFFFFFFFF))


def _sane(value: float) -> float:
    return value if 0.0 <= value < 1e12 else 0.0  # False for NaN too


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError("not a count")
    return value
