"""Paged attention on a real GPU: Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch
from kernels.ops.attention import paged_attention
from kernels.reference import attention as reference
from tests.support.paged_batch import make_batch, make_queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BATCHES = {
    "decode": [(1, n) for n in (1, 7, 15, 16, 17, 100, 1000, 5000)],
    "prefill": [(n, n + prefix) for n in (1, 7, 15, 16, 17, 100, 1000) for prefix in (0, 5, 64)],
    "mixed": [(1, 700), (64, 64), (0, 9), (1, 33), (130, 300)],
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 4, 128), (1, 2, 80)])
def test_matches_reference(
    name: str, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int
) -> None:
    batch = make_batch(BATCHES[name], num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    q = make_queries(batch.num_tokens, kv_heads * group, head_dim, dtype).cuda()
    pool = batch.kv_pool.cuda()
    tensors = (batch.block_tables, batch.query_starts, batch.context_lens)
    args = (1, *(t.cuda() for t in tensors), head_dim**-0.5)

    assert dispatch.triton_kernels(q) is not None, dispatch.describe(q.device)
    out = paged_attention(q, pool, *args)

    expected = reference.paged_attention(q.float(), pool.float(), *args)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
