"""How many KV blocks a worker gets, decided from its budget before anything is allocated. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import ConfigError
from services.kv.layout import KvLayout

# Several workers share a laptop: one of them takes a small part of what is free, and no more
# than serves a demo well. A server sets worker.kv_memory_bytes.
AUTO_SHARE = 0.10
AUTO_MAX_BYTES = 1 << 30
MIN_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits, and why that much."""

    num_blocks: int
    max_model_len: int  # tokens of prompt and output together
    pool_tokens: int
    pool_bytes: int
    reason: str


def plan_memory(
    layout: KvLayout,
    *,
    num_blocks: int,
    kv_memory_bytes: int,
    available_bytes: int,
    max_model_len: int,
    context_length: int,
) -> MemoryPlan:
    """Choose the pool size; zeros mean "not set".

    Raises:
        ConfigError: the pool could not hold one request of max_model_len tokens, or
            max_model_len is longer than the model's context.
    """
    if max_model_len > context_length:
        raise ConfigError(
            f"model.max_model_len {max_model_len} is longer than the model's context "
            f"of {context_length} tokens"
        )
    wanted_len = max_model_len or context_length
    needed = layout.blocks_for(wanted_len)
    if num_blocks:
        blocks, reason = num_blocks, "worker.num_blocks"
    elif kv_memory_bytes:
        blocks, reason = kv_memory_bytes // layout.block_bytes, "worker.kv_memory_bytes"
    else:
        budget = min(int(available_bytes * AUTO_SHARE), AUTO_MAX_BYTES)
        blocks, reason = max(budget // layout.block_bytes, needed), "share of free memory"
        if blocks * layout.block_bytes > available_bytes:
            raise ConfigError(
                f"one request of {wanted_len} tokens needs {needed * layout.block_bytes >> 20} MiB "
                f"of KV, {available_bytes >> 20} MiB of memory are free: set model.max_model_len"
            )
    if blocks < max(needed, MIN_BLOCKS):
        raise ConfigError(
            f"a pool of {blocks} blocks ({reason}) cannot hold one request of {wanted_len} tokens "
            f"({needed} blocks of {layout.block_size}): raise it or lower model.max_model_len"
        )
    return MemoryPlan(
        num_blocks=blocks,
        max_model_len=wanted_len,
        pool_tokens=blocks * layout.block_size,
        pool_bytes=blocks * layout.block_bytes,
        reason=reason,
    )
