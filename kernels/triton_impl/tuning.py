"""Tile sizes and compute types of the Triton kernels, by geometry; the tuning table."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SPLIT_KEYS = 512  # keys of one decode split: fixed, so a row's sums do not depend on the batch
FP_FUSION = True  # a * b + c in one rounding; said aloud because Triton is changing its default


@dataclass(frozen=True, slots=True)
class Tiling:
    """Compile-time sizes of one launch."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def prefill_tiling(group: int, head_dim: int, itemsize: int) -> Tiling:
    """Pick the prefill tile: 64 rows is what sm_90's warp-group instructions want.

    Not tuned on a GPU yet: chosen so that q, two stages of K and V and the accumulator fit.
    """
    block_d = padded_dim(head_dim)
    block_m = max(64, triton.next_power_of_2(group))
    block_n = 32 if itemsize == 4 or block_d > 128 else 64
    return Tiling(block_m, block_n, block_d, num_warps=4, num_stages=2)


def decode_tiling(group: int, head_dim: int, itemsize: int) -> Tiling:
    """Pick the decode tile: the group's heads padded to the smallest matrix instruction."""
    block_d = padded_dim(head_dim)
    block_n = 32 if itemsize == 4 or block_d > 128 else 64
    return Tiling(max(16, triton.next_power_of_2(group)), block_n, block_d, 4, num_stages=2)


def padded_dim(head_dim: int) -> int:
    """Return the power of two, at least 16, that holds a head."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def compute_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> tl.dtype:
    """Return the type of the matrix operands; sums are always float32.

    Mixed storage computes in float32. So does bf16 in the interpreter, whose numpy has no bf16
    and would multiply the raw bits.
    """
    if q_dtype != kv_dtype or q_dtype == torch.float32:
        return tl.float32
    if q_dtype == torch.bfloat16:
        return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    return tl.float16
