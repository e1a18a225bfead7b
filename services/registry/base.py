"""Values of the registry: who serves, with which load, holding which prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.common.light_value import light_value


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What does not change during one life of a worker (`wi`, JSON)."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # host:port of its gRPC server
    role: str  # "prefill" | "decode"
    model: str
    kv_identity_fp: str
    identity_fields: Mapping[str, str]
    weights_digest: str
    block_size: int
    max_model_len: int
    started_unix_ms: int


@light_value
class LoadReport:
    """What changes at every heartbeat (`w`, packed)."""

    queued_uncached_tokens: int = 0
    resident_tokens: int = 0
    kv_free: int = 0  # blocks free or evictable
    kv_total: int = 0
    rate_tok_s: float = 0.0
    tbt_a_us: float = 0.0
    tbt_b_us: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_cached: int = 0  # of kv_free, blocks that hold a prefix: new blocks push them out


@dataclass(frozen=True, slots=True)
class HintChange:
    """Blocks that entered and left one tier of a worker's cache; removals are applied first."""

    added: Sequence[BlockHash]
    removed: Sequence[BlockHash]
    tier: int = 0  # 0 = GPU memory (or the only one), 1 = host, 2 = disk


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker as the store has it."""

    slot: int
    slot_gen: int
    state: str  # "live" | "draining"
    lease_left_ms: int  # judged by the store's clock; <= 0 = expired
    load: LoadReport
    info: WorkerInfo
