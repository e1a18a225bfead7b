"""Paged attention and KV writes against the torch reference."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.attention import paged_attention, write_kv
from kernels.reference import attention as reference
from tests.support.paged_batch import make_batch, make_queries

LENGTHS = [1, 7, 15, 16, 17, 33, 100]


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128, 256])
def test_matches_reference_on_odd_context_lengths(head_dim: int) -> None:
    batch = make_batch([(1, n) for n in LENGTHS], head_dim=head_dim)
    q = make_queries(batch.num_tokens, 6, head_dim)
    args = (1, batch.block_tables, batch.query_starts, batch.context_lens, head_dim**-0.5)

    out = paged_attention(q, batch.kv_pool, *args)

    torch.testing.assert_close(
        out, reference.paged_attention(q, batch.kv_pool, *args), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("block_size", [4, 16, 32, 48, 128])
def test_matches_reference_for_prefill_with_prefix(block_size: int) -> None:
    seqs = [(n, n + prefix) for n in LENGTHS for prefix in (0, 5, 16)]
    batch = make_batch(seqs, block_size=block_size, num_kv_heads=1)
    q = make_queries(batch.num_tokens, 3, 64)
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)

    out = paged_attention(q, batch.kv_pool, *args)

    torch.testing.assert_close(
        out, reference.paged_attention(q, batch.kv_pool, *args), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_computes_in_float32_whatever_the_storage(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch([(20, 50), (1, 33)], dtype=kv_dtype, head_dim=head_dim)
    q = make_queries(batch.num_tokens, 4, head_dim, q_dtype)
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)

    out = paged_attention(q, batch.kv_pool, *args)
    expected = reference.paged_attention(q.float(), batch.kv_pool.float(), *args)

    assert out.dtype == q_dtype
    tolerance = 1e-5 if q_dtype == torch.float32 else 8e-3
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def test_takes_queries_that_are_views_of_a_fused_projection() -> None:
    batch = make_batch([(5, 20)])
    qkv = make_queries(5, 8, 64).reshape(5, -1)
    q = qkv[:, : 4 * 64].view(5, 4, 64)
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)

    out = paged_attention(q, batch.kv_pool, *args)

    assert torch.equal(out, paged_attention(q.contiguous(), batch.kv_pool, *args))


def test_large_scores_neither_overflow_nor_lose_the_maximum() -> None:
    batch = make_batch([(3, 40)])
    q = make_queries(3, 4, 64) * 1000
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 1.0)

    out = paged_attention(q, batch.kv_pool, *args)

    torch.testing.assert_close(
        out, reference.paged_attention(q, batch.kv_pool, *args), rtol=1e-4, atol=1e-4
    )


def test_empty_step_gives_no_rows() -> None:
    batch = make_batch([])
    out = paged_attention(
        make_queries(0, 4, 64),
        batch.kv_pool,
        0,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        0.125,
    )
    assert out.shape == (0, 4, 64)


def test_sequence_without_queries_is_left_out() -> None:
    batch = make_batch([(2, 10), (0, 30), (3, 20)])
    q = make_queries(5, 4, 64)
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)

    out = paged_attention(q, batch.kv_pool, *args)

    torch.testing.assert_close(
        out, reference.paged_attention(q, batch.kv_pool, *args), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "layer 2"),
        ({"q": torch.zeros(3, 3, 64)}, "multiple of 2 KV heads"),
        ({"q": torch.zeros(3, 4, 32)}, "q"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int64)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)}, "block_tables"),
        ({"query_starts": torch.zeros(3, dtype=torch.int32)}, "query_starts"),
        ({"kv_pool": torch.zeros(2, 2, 3, 2, 16, 64)}, "kv_pool must be"),
        ({"kv_pool": torch.zeros(2, 2, 2, 2, 16, 64, dtype=torch.int32)}, "dtype"),
    ],
)
def test_refuses_wrong_shapes_by_name(change: dict[str, object], message: str) -> None:
    batch = make_batch([(3, 20)])
    args = {
        "q": make_queries(3, 4, 64),
        "kv_pool": batch.kv_pool,
        "layer": 0,
        "block_tables": batch.block_tables,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(args | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
def test_write_kv_matches_reference_and_touches_nothing_else(
    kv_dtype: torch.dtype, source_dtype: torch.dtype
) -> None:
    pool = torch.zeros(5, 3, 2, 2, 16, 24, dtype=kv_dtype)
    expected = pool.clone()
    qkv = make_queries(9, 6, 24, source_dtype)
    k, v = qkv[:, 2:4], qkv[:, 4:6]
    slots = torch.tensor([79, 0, 15, 16, 17, 40, 41, 3, 64])

    write_kv(k, v, pool, 1, slots)
    reference.write_kv(k, v, expected, 1, slots)

    assert torch.equal(pool, expected)
    assert int(pool.count_nonzero()) == k.numel() + v.numel()


def test_write_kv_rounds_to_bf16_as_torch_does() -> None:
    pool = torch.zeros(1, 1, 2, 1, 16, 16, dtype=torch.bfloat16)
    values = torch.tensor([1.00390625, 1.01171875, -0.0, 3e38, 3.4e38, 1e-40, torch.inf, torch.nan])
    k = values.repeat(2).view(1, 1, 16)

    write_kv(k, -k, pool, 0, torch.tensor([3]))

    expected = k.flatten().to(torch.bfloat16)
    torch.testing.assert_close(pool[0, 0, 0, 0, 3], expected, rtol=0, atol=0, equal_nan=True)


def test_write_kv_refuses_wrong_shapes() -> None:
    pool = torch.zeros(2, 1, 2, 1, 16, 8)
    k = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match="must be"):
        write_kv(k, torch.zeros(2, 1, 4), pool, 0, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="int64"):
        write_kv(k, k, pool, 0, torch.tensor([0, 1], dtype=torch.int32))
