"""Run the Triton attention kernels in Triton's interpreter and print their errors as JSON.

A program of its own: `TRITON_INTERPRET` is read when the kernels are defined, so it cannot be
switched on in a process that also compiles them.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from kernels.reference.attention import paged_attention
from kernels.triton_impl.attention import TritonKernels
from kernels.triton_impl.paged_decode import paged_decode
from kernels.triton_impl.paged_prefill import paged_prefill
from tests.support.paged_batch import PagedBatch, make_batch, make_queries, spread_over_pools

KERNELS = {"paged_prefill": paged_prefill, "paged_decode": paged_decode}
LENGTHS = (1, 7, 15, 16, 17, 100)


def max_error(kernel: str, batch: PagedBatch, q: Tensor) -> float:
    """Return the largest difference to the reference; infinite for a NaN."""
    scale = q.shape[2] ** -0.5
    args = (1, batch.block_tables, batch.query_starts, batch.context_lens, scale)
    expected = paged_attention(q.float(), batch.kv_pool.float(), *args)
    actual = KERNELS[kernel](q, batch.kv_pool, *args).float()
    return float((actual - expected).abs().nan_to_num(torch.inf).max())


def run_case(kernel: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the error of each batch shape under its name."""
    prefill = [(n, n + prefix) for n, prefix in zip(LENGTHS, (0, 5, 16, 0, 31, 7), strict=True)]
    shapes = {
        "decode": ([(1, n) for n in LENGTHS], 2, 3, 64, 16),
        "prefill with prefix": (
            prefill if kernel == "paged_prefill" else prefill[:4],
            1,
            3,
            64,
            16,
        ),
        "head size not a power of two": ([(5, 21), (1, 17)], 2, 1, 80, 16),
        "blocks of 32, one head a group": ([(0, 9), (3, 40), (1, 33)], 2, 1, 16, 32),
        "several splits": ([(1, 1100), (1, 512), (1, 513)], 1, 2, 32, 16),
    }
    errors = {}
    for name, (seqs, kv_heads, group, head_dim, block_size) in shapes.items():
        batch = make_batch(
            seqs, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        q = make_queries(batch.num_tokens, kv_heads * group, head_dim, dtype)
        errors[name] = max_error(kernel, batch, q)
    return errors


def mixed_storage_error() -> float:
    """Return the error with float32 queries over a bf16 pool."""
    batch = make_batch([(3, 40), (1, 20)], dtype=torch.bfloat16)
    return max_error("paged_prefill", batch, make_queries(4, 4, 64))


def strided_views_agree() -> bool:
    """Say whether q may be a view of a fused projection, and whether both kernels serve it."""
    batch = make_batch([(3, 40)])
    q = make_queries(3, 8, 64)[:, 2:6]
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)
    expected = paged_attention(q, batch.kv_pool, *args)
    results = [kernel(q, batch.kv_pool, *args) for kernel in KERNELS.values()]
    results.append(TritonKernels().paged_attention(q, batch.kv_pool, *args))
    return all(torch.allclose(result, expected, atol=1e-5) for result in results)


def many_pools_error(kernel: str) -> float:
    """Return the largest difference when blocks lie in several pools."""
    batch = make_batch([(1, 40), (1, 100), (1, 17)])
    moved, more_pools = spread_over_pools(batch, 4)
    q = make_queries(batch.num_tokens, 4, 64)
    rest = (batch.query_starts, batch.context_lens, 0.125)
    expected = paged_attention(q, batch.kv_pool, 1, batch.block_tables, *rest)
    actual = KERNELS[kernel](q, moved.kv_pool, 1, moved.block_tables, *rest, more_pools)
    return float((actual - expected).abs().nan_to_num(torch.inf).max())


def main() -> None:
    """Print `{kernel: {dtype: {shape: error}}}` and two single checks."""
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    report = {
        "errors": {
            kernel: {name: run_case(kernel, dtype) for name, dtype in dtypes.items()}
            for kernel in KERNELS
        },
        "mixed_storage": mixed_storage_error(),
        "strided_views": strided_views_agree(),
        "many_pools": {kernel: many_pools_error(kernel) for kernel in KERNELS},
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
