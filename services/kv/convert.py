"""KV of one block from one layout into another: dtype, layer and head ranges, token ranges.

Pure numpy, so that a worker without torch converts exactly like one with it, and a single worker
can round its own KV the same way. The rules:

* bfloat16 is the upper half of a float32, rounded to nearest, ties to even; back is exact.
* float16 is IEEE rounding to nearest even; beyond its range lies infinity.
* int8 is symmetric per row of `head_dim` values (one token of one head, K or V of one layer):
  `scale = float16(max|x| / 127)`, `q = clip(rint(x / scale), -127, 127)`, `x' = q * scale`, all
  but the rounding in float32. A scale that rounds to zero gives zeros, one beyond float16 its
  largest value; a row with a value that is not finite gets the scale NaN, and so comes back as
  NaN instead of looking like KV.

Equal dtypes are copied byte by byte, scales too: moving int8 KV never rounds it twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.kv.layout import KvLayout

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_Q_MAX = 127
_F16_MAX = float(np.finfo(np.float16).max)
# How elements are kept: numpy has no bfloat16, so its bits are.
_STORED: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
}
_LOSSLESS = {
    ("bfloat16", "float32"),
    ("float16", "float32"),
}


def is_lossless(src: str, dst: str) -> bool:
    """Tell whether every value of one dtype has an equal one in another."""
    return src == dst or (src, dst) in _LOSSLESS


class Values(NamedTuple):
    """One block, or a part of one, as arrays over its bytes."""

    data: npt.NDArray[Any]  # [L, 2, H, T, D] in the stored dtype
    scales: npt.NDArray[np.float16] | None  # [L, 2, H, T] of int8


class Part(NamedTuple):
    """Which part of a block, ranges [lo, hi): layers and heads in the model's numbers."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    tokens: tuple[int, int]  # inside the block


def whole(layout: KvLayout) -> Part:
    """Return the part that is all of a block."""
    return Part(layout.layers, layout.heads, (0, layout.block_size))


def values_of(layout: KvLayout, block: Bytes, part: Part | None = None) -> Values:
    """View a block, or a part of it, as elements; writing to the view writes to the block."""
    data = block[: layout.data_bytes].view(_STORED[layout.kv_dtype]).reshape(layout.block_shape)
    scales = None
    if layout.kv_dtype == "int8":
        scales = block[layout.data_bytes :].view(np.float16).reshape(layout.block_shape[:4])
    if part is None:
        return Values(data, scales)
    at = (
        slice(part.layers[0] - layout.first_layer, part.layers[1] - layout.first_layer),
        slice(None),
        slice(part.heads[0] - layout.first_head, part.heads[1] - layout.first_head),
        slice(*part.tokens),
    )
    return Values(data[at], None if scales is None else scales[at])


def convert_part(
    src: KvLayout, source: Bytes, src_part: Part, dst: KvLayout, dest: Bytes, dst_part: Part
) -> None:
    """Write a part of one block into a part of another, of the same shape."""
    left, right = values_of(src, source, src_part), values_of(dst, dest, dst_part)
    if left.data.shape != right.data.shape:
        raise ValueError(f"parts of {left.data.shape} and {right.data.shape} values")
    if src.kv_dtype == dst.kv_dtype:
        np.copyto(right.data, left.data)
        if left.scales is not None and right.scales is not None:
            np.copyto(right.scales, left.scales)
        return
    values = to_float32(src.kv_dtype, left)
    if dst.kv_dtype == "int8":
        assert right.scales is not None
        quantise(values, right.data, right.scales)
    elif dst.kv_dtype == "bfloat16":
        np.copyto(right.data, round_bfloat16(values))
    else:
        with np.errstate(over="ignore"):  # float16: too large becomes infinite, as it says above
            np.copyto(right.data, values, casting="same_kind")


def to_float32(dtype: str, values: Values) -> F32:
    """Return the numbers that values of a dtype stand for."""
    if dtype == "bfloat16":
        return widen_bfloat16(values.data)
    if dtype == "int8":
        assert values.scales is not None
        return dequantise(values.data, values.scales)
    return values.data.astype(np.float32)


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> F32:
    """Return the float32 of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bfloat16(values: F32) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # the largest NaNs wrap around here; they are replaced below
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        result[is_nan] = 0x7FC0
    return result


def quantise(values: F32, data: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> None:
    """Write values `[..., D]` as int8 `[..., D]` with scales `[...]`."""
    peak = np.abs(values).max(axis=-1)
    is_broken = ~np.isfinite(peak)
    with np.errstate(invalid="ignore"):  # rows that are broken, as it says above
        np.copyto(scales, np.minimum(peak / np.float32(_Q_MAX), _F16_MAX), casting="same_kind")
        scales[is_broken] = np.nan
        scale = scales.astype(np.float32)
        scale[scale == 0] = np.inf
        steps = values / scale[..., None]
    # In place from here on: this is what an int8 link spends its time with.
    np.rint(steps, out=steps)
    np.clip(steps, -_Q_MAX, _Q_MAX, out=steps)
    if is_broken.any():
        steps[is_broken] = 0
    np.copyto(data, steps, casting="unsafe")


def dequantise(data: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> F32:
    """Return the numbers int8 values with scales stand for."""
    return data.astype(np.float32) * scales.astype(np.float32)[..., None]


def round_trip(layout: KvLayout, block: Bytes, dtypes: tuple[str, ...]) -> Bytes:
    """Return a block as it comes back after a way through other dtypes, in its own layout.

    This is how a single worker rounds its KV to be equal to what crossed a lossy link.
    """
    current, content = layout, block
    for dtype in (*dtypes, layout.kv_dtype):
        target = replace(layout, kv_dtype=dtype)
        result = np.zeros(target.block_bytes, np.uint8)
        convert_part(current, content, whole(current), target, result, whole(target))
        current, content = target, result
    return content
