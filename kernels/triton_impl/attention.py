"""Choose between the two paged attention kernels without asking the device anything."""

from collections.abc import Sequence

from torch import Tensor

from kernels.triton_impl.paged_decode import paged_decode
from kernels.triton_impl.paged_prefill import paged_prefill


class TritonKernels:
    """The ops Triton serves on a GPU."""

    def paged_attention(
        self,
        q: Tensor,
        kv_pool: Tensor,
        layer: int,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        more_pools: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """Decode kernel when there are no more rows than sequences, prefill kernel otherwise.

        Both are right for every batch, so the rule only concerns speed and needs no host sync.
        """
        is_decode = q.shape[0] <= context_lens.shape[0]
        launch = paged_decode if is_decode else paged_prefill
        return launch(
            q, kv_pool, layer, block_tables, query_starts, context_lens, scale, more_pools
        )
