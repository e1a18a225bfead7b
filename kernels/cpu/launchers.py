"""Torch tensors in, C calls out: one lean method per op of the CPU library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_long, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 128
_MAX_POOLS = 8
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

ERRORS = {
    2: "slot_mapping points outside the pool",
    3: "query_starts and context_lens do not describe the rows of q",
    4: "block_tables lacks a block of a context or names one outside the pool",
    5: "positions point outside the rotary table",
    6: "logit_rows are not rows of the step, or more than it has",
}
_NO_MEMORY = 1


class KvLayer(ctypes.Structure):
    """One layer of the pool, as attention.h declares it."""

    _fields_: ClassVar[Any] = [
        ("pool", c_void_p),
        ("block_stride", c_long),
        ("kv_stride", c_long),
        ("head_stride", c_long),
        ("num_blocks", c_long),
        ("num_kv_heads", c_long),
        ("block_size", c_long),
        ("head_dim", c_long),
        ("dtype", c_int),
        ("num_more", c_int),
        ("more_pools", c_void_p * (_MAX_POOLS - 1)),
        ("more_blocks", c_long * (_MAX_POOLS - 1)),
    ]


class _Rows(ctypes.Structure):
    """`[num_tokens, heads, head_dim]` with any token and head stride, in bytes."""

    _fields_: ClassVar[Any] = [
        ("data", c_void_p),
        ("token_stride", c_long),
        ("head_stride", c_long),
        ("dtype", c_int),
    ]


class _Heads(ctypes.Structure):
    """`[num_tokens, num_heads, head_dim]` float32, strides in elements."""

    _fields_: ClassVar[Any] = [
        ("data", c_void_p),
        ("token_stride", c_long),
        ("head_stride", c_long),
        ("num_heads", c_long),
    ]


class Batch(ctypes.Structure):
    """Which rows belong to which sequence, and where its context is."""

    _fields_: ClassVar[Any] = [
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("num_seqs", c_long),
        ("max_blocks", c_long),
        ("num_tokens", c_long),
        ("num_heads", c_long),
    ]


MorePools = Sequence[Tensor | None]  # pools 1, 2, .. of block tables; see paged_attention


_SIGNATURES: dict[str, list[Any]] = {
    "isthmus_pack_panels": [c_void_p, c_long, c_long, c_long, c_void_p],
    "isthmus_linear": [c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_long, c_long, c_long],
    "isthmus_rms_norm": [c_void_p, c_long, c_void_p, c_float, c_void_p, c_long, c_long],
    "isthmus_add_rms_norm": [
        *(c_void_p, c_long, c_void_p, c_long, c_void_p, c_float),
        *(c_void_p, c_void_p, c_long, c_long),
    ],
    "isthmus_rope": [_Heads, _Heads, c_void_p, c_void_p, c_long, c_long, c_long],
    "isthmus_silu_mul": [c_void_p, c_long, c_void_p, c_long, c_long],
    "isthmus_write_kv": [POINTER(KvLayer), _Rows, _Rows, c_void_p, c_long],
    "isthmus_paged_attention": [POINTER(KvLayer), POINTER(Batch), _Rows, _Rows, c_float],
}


class CpuKernels:
    """The ops of the loaded library; callers have checked shapes, `can_*` says what it takes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, argtypes in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argtypes, c_int
        library.isthmus_panel_width.restype = c_long
        library.isthmus_set_num_threads.argtypes = [c_int]
        library.isthmus_set_num_threads.restype = None
        library.isthmus_compiled_for.restype = c_char_p
        self._library = library
        self._linear = library.isthmus_linear
        self._rms_norm = library.isthmus_rms_norm
        self._add_rms_norm = library.isthmus_add_rms_norm
        self._rope = library.isthmus_rope
        self._silu_mul = library.isthmus_silu_mul
        self._write_kv = library.isthmus_write_kv
        self._paged_attention = library.isthmus_paged_attention
        self.decoder_step = library.isthmus_decoder_step
        self._panel_width: int = library.isthmus_panel_width()

    def set_num_threads(self, num_threads: int) -> None:
        """Let later calls use up to this many threads."""
        self._library.isthmus_set_num_threads(num_threads)

    def get_num_threads(self) -> int:
        """Return how many threads a call may use."""
        return int(self._library.isthmus_get_num_threads())

    def describe(self) -> str:
        """Name the instruction set and the threads in one line."""
        target = self._library.isthmus_compiled_for().decode()
        return f"C library ({target}, {self.get_num_threads()} threads)"

    def is_float32(self, *tensors: Tensor) -> bool:
        """Say whether all are float32 with a contiguous last axis."""
        return all(t.dtype is torch.float32 and t.stride(-1) == 1 for t in tensors)

    def can_attend(self, q: Tensor, kv_pool: Tensor) -> bool:
        """Say whether attention takes these dtypes, sizes and strides."""
        block_size, head_dim = kv_pool.shape[4], kv_pool.shape[5]
        return (
            q.dtype in _DTYPE_CODES
            and kv_pool.dtype in _DTYPE_CODES
            and head_dim <= _MAX_HEAD_DIM
            and block_size <= _MAX_BLOCK_SIZE
            and kv_pool.stride(5) == 1
            and kv_pool.stride(4) == head_dim
            and q.stride(2) == 1
        )

    def can_write(self, k: Tensor, v: Tensor, kv_pool: Tensor) -> bool:
        """Say whether the KV write takes these dtypes and strides."""
        return (
            k.dtype in _DTYPE_CODES
            and v.dtype in _DTYPE_CODES
            and kv_pool.dtype in _DTYPE_CODES
            and kv_pool.stride(5) == 1
            and kv_pool.stride(4) == kv_pool.shape[5]
            and k.stride(2) == 1
            and v.stride(2) == 1
        )

    def pack_panels(self, weights: Sequence[Tensor]) -> Tensor:
        """Pack `[out_i, in]` float32, joined, into `[num_panels, in, panel_width]`, zero padded."""
        width = self._panel_width
        if any(weight.shape[0] % width for weight in weights[:-1]):
            weights = (torch.cat(tuple(weights)),)  # a panel would hold rows of two weights
        num_panels = sum(-(-weight.shape[0] // width) for weight in weights)
        panels = weights[0].new_empty(num_panels, weights[0].shape[1], width)
        first = 0
        for weight in weights:
            count = -(-weight.shape[0] // width)
            self._pack(weight, panels[first : first + count])
            first += count
        return panels

    def _pack(self, weight: Tensor, panels: Tensor) -> None:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        out_features, in_features = weight.shape
        pack = self._library.isthmus_pack_panels
        check(
            pack(weight.data_ptr(), weight.stride(0), in_features, out_features, panels.data_ptr())
        )

    def linear(self, x: Tensor, panels: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
        """Multiply by packed panels."""
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, in_features = x.shape
        out = x.new_empty(num_rows, out_features)
        check(
            self._linear(
                x.data_ptr(),
                x.stride(0),
                panels.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                num_rows,
                in_features,
                out_features,
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm each row of `[..., size]`."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        num_rows, size = rows.shape
        out = x.new_empty(x.shape)
        check(
            self._rms_norm(
                rows.data_ptr(),
                rows.stride(0),
                weight.data_ptr(),
                eps,
                out.data_ptr(),
                num_rows,
                size,
            )
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add, then norm each row."""
        num_rows, size = x.shape
        out, total = x.new_empty(num_rows, size), x.new_empty(num_rows, size)
        check(
            self._add_rms_norm(
                x.data_ptr(),
                x.stride(0),
                residual.data_ptr(),
                residual.stride(0),
                weight.data_ptr(),
                eps,
                out.data_ptr(),
                total.data_ptr(),
                num_rows,
                size,
            )
        )
        return out, total

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        """Rotate q and k in place."""
        max_pos, rotary_dim = table.shape
        positions, table = positions.contiguous(), table.contiguous()
        check(
            self._rope(
                _Heads(q.data_ptr(), q.stride(0), q.stride(1), q.shape[1]),
                _Heads(k.data_ptr(), k.stride(0), k.stride(1), k.shape[1]),
                positions.data_ptr(),
                table.data_ptr(),
                max_pos,
                rotary_dim,
                q.shape[0],
            )
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate each row."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        check(self._silu_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, size))
        return out

    def write_kv(
        self, k: Tensor, v: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor
    ) -> None:
        """Store new keys and values."""
        slots = slot_mapping.contiguous()
        pool = kv_layer(kv_pool, layer)
        check(self._write_kv(pool, _rows(k), _rows(v), slots.data_ptr(), slots.shape[0]))

    def paged_attention(
        self,
        q: Tensor,
        kv_pool: Tensor,
        layer: int,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        more_pools: MorePools = (),
    ) -> Tensor:
        """Attend straight from the pools."""
        tables, starts, lens = (
            block_tables.contiguous(),
            query_starts.contiguous(),
            context_lens.contiguous(),
        )
        out = q.new_empty(q.shape)
        batch = batch_view(tables, starts, lens, q.shape[0], q.shape[1])
        pool = kv_layer(kv_pool, layer, more_pools)
        check(self._paged_attention(pool, batch, _rows(q), _rows(out), scale))
        return out


def batch_view(
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    num_heads: int,
) -> Batch:
    """Point at contiguous int32 tensors, which the caller keeps alive."""
    return Batch(
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        block_tables.shape[1],
        num_tokens,
        num_heads,
    )


def kv_layer(kv_pool: Tensor, layer: int, more_pools: MorePools = ()) -> KvLayer:
    """Point at one layer of the pool, and of the others it may be read with."""
    num_blocks, _, _, num_kv_heads, block_size, head_dim = kv_pool.shape
    block, layer_stride, kv, head, _, _ = kv_pool.stride()
    itemsize = kv_pool.itemsize
    offset = layer * layer_stride * itemsize
    described = KvLayer(
        kv_pool.data_ptr() + offset,
        block * itemsize,
        kv * itemsize,
        head * itemsize,
        num_blocks,
        num_kv_heads,
        block_size,
        head_dim,
        _DTYPE_CODES[kv_pool.dtype],
        len(more_pools),
    )
    for at, pool in enumerate(more_pools):
        if pool is not None:
            described.more_pools[at] = pool.data_ptr() + offset
            described.more_blocks[at] = pool.shape[0]
    return described


def _rows(tensor: Tensor) -> _Rows:
    token, head, _ = tensor.stride()
    itemsize = tensor.itemsize
    return _Rows(tensor.data_ptr(), token * itemsize, head * itemsize, _DTYPE_CODES[tensor.dtype])


def check(error: int) -> None:
    """Raise what an error number of the library means."""
    if error == 0:
        return
    if error == _NO_MEMORY:
        raise MemoryError("the CPU library could not allocate its scratch memory")
    raise ValueError(ERRORS[error])
