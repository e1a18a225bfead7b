"""Pool sizes follow the budget, and a pool that could never serve is refused at start."""

from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.kv.layout import KvLayout
from services.worker.memory_plan import AUTO_MAX_BYTES, MemoryPlan, plan_memory

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64)  # 720 KiB a block
GIB = 1 << 30


def plan(**changes: int) -> MemoryPlan:
    values = {
        "num_blocks": 0,
        "kv_memory_bytes": 0,
        "available_bytes": 16 * GIB,
        "max_model_len": 0,
        "context_length": 8192,
        **changes,
    }
    return plan_memory(LAYOUT, **values)


def test_explicit_blocks_win() -> None:
    assert plan(num_blocks=600, kv_memory_bytes=GIB).num_blocks == 600


def test_bytes_are_turned_into_whole_blocks() -> None:
    assert plan(kv_memory_bytes=GIB).num_blocks == GIB // LAYOUT.block_bytes


def test_default_is_bounded_and_holds_the_longest_request() -> None:
    chosen = plan()
    assert chosen.pool_bytes <= AUTO_MAX_BYTES
    assert chosen.pool_tokens >= chosen.max_model_len == 8192


def test_pool_smaller_than_one_request_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"511 blocks .* 8192 tokens"):
        plan(num_blocks=511)


def test_shorter_model_len_makes_a_small_pool_legal() -> None:
    assert plan(num_blocks=8, max_model_len=128).max_model_len == 128


def test_max_model_len_beyond_the_context_is_an_error() -> None:
    with pytest.raises(ConfigError, match="context of 8192"):
        plan(max_model_len=8193)


def test_too_little_free_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"set model\.max_model_len"):
        plan(available_bytes=100 << 20)
