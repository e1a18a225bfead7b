"""Block tables over several pools: an entry's high bits name the pool, a table says where it is.

With one pool nothing of this is compiled in. Compiled and run in the interpreter; not yet run on
a GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.attention import MAX_POOLS, POOL_SHIFT

SPAN = tl.constexpr(1 << POOL_SHIFT)  # entries of a block table per pool


@triton.jit
def block_offsets(entries, pool_offsets, kv_block_stride, key_ok, MANY_POOLS: tl.constexpr):
    """Return the elements from our own pool's start to each entry's block."""
    if not MANY_POOLS:
        return entries.to(tl.int64) * kv_block_stride
    starts = tl.load(pool_offsets + entries // SPAN, mask=key_ok, other=0)
    return starts + (entries % SPAN).to(tl.int64) * kv_block_stride


def pool_table(kv_pool: Tensor, more_pools: Sequence[Tensor | None]) -> Tensor:
    """Return `[MAX_POOLS]` int64: elements from `kv_pool` to each pool, 0 where there is none."""
    own = kv_pool.data_ptr()
    starts = [0 if pool is None else pool.data_ptr() - own for pool in more_pools]
    if any(start % kv_pool.itemsize for start in starts):
        raise ValueError("pools must lie whole elements apart")
    elements = [0, *(start // kv_pool.itemsize for start in starts)]
    elements += [0] * (MAX_POOLS - len(elements))
    return torch.tensor(elements, dtype=torch.int64, device=kv_pool.device)
