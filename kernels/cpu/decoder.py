"""A whole decoder step in one C call: the model's pointers, gathered once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kernels.cpu.launchers import Batch, CpuKernels, KvLayer, batch_view, check, kv_layer

if TYPE_CHECKING:
    from kernels.ops.decoder_parts import DecoderGeometry, DecoderLayer, StepInputs
    from kernels.ops.linear import PackedLinear


class _Linear(ctypes.Structure):
    _fields_: ClassVar[Any] = [("panels", c_void_p), ("bias", c_void_p)]


class _Layer(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Linear) for name in ("qkv", "attn_out", "gate_up", "down")),
    ]


class _Model(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("layers", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("rope_table", c_void_p),
        ("num_layers", c_long),
        ("hidden", c_long),
        ("intermediate", c_long),
        ("num_heads", c_long),
        ("max_pos", c_long),
        ("rotary_dim", c_long),
        ("eps", c_float),
        ("scale", c_float),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logit_rows", c_void_p),
        ("num_logits", c_long),
        ("kv", KvLayer),
        ("layer_stride", c_long),
        ("batch", Batch),
    ]


class CpuDecoder:
    """The C view of a model; keeps every tensor it points at alive."""

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        rope_table: Tensor,
        geometry: DecoderGeometry,
    ) -> None:
        self._kernels = kernels
        self._run = kernels.decoder_step
        self._run.argtypes = [POINTER(_Model), POINTER(_Step), c_void_p, c_void_p]
        self._run.restype = c_int
        self._alive = (tuple(layers), final_norm, rope_table)
        self._num_heads = geometry.num_heads
        table = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        self._model = _Model(
            table,
            final_norm.data_ptr(),
            rope_table.data_ptr(),
            len(layers),
            final_norm.shape[0],
            layers[0].down.in_features,
            geometry.num_heads,
            rope_table.shape[0],
            rope_table.shape[1],
            geometry.eps,
            geometry.scale,
        )

    def can_run(self, hidden: Tensor, kv_pool: Tensor) -> bool:
        """Say whether the step's dtypes and strides are those of the C code."""
        heads = hidden.new_empty((0, 1, kv_pool.shape[5]))
        return hidden.dtype is torch.float32 and self._kernels.can_attend(heads, kv_pool)

    def step(self, hidden: Tensor, kv_pool: Tensor, inputs: StepInputs) -> Tensor:
        """Run all layers; `hidden` `[num_tokens, hidden]` is overwritten."""
        # Named, so that copies made here live until the call is over.
        positions, slots = inputs.positions.contiguous(), inputs.slot_mapping.contiguous()
        rows, tables = inputs.logit_rows.contiguous(), inputs.block_tables.contiguous()
        starts, lens = inputs.query_starts.contiguous(), inputs.context_lens.contiguous()
        out = hidden.new_empty((rows.shape[0], hidden.shape[1]))
        step = _Step(
            positions.data_ptr(),
            slots.data_ptr(),
            rows.data_ptr(),
            rows.shape[0],
            kv_layer(kv_pool, 0, inputs.more_pools),
            kv_pool.stride(1) * kv_pool.itemsize,
            batch_view(tables, starts, lens, hidden.shape[0], self._num_heads),
        )
        check(self._run(self._model, step, hidden.data_ptr(), out.data_ptr()))
        return out


def fits(layers: Sequence[DecoderLayer], tensors: Sequence[Tensor]) -> bool:
    """Say whether the C step can run these weights: all packed, all norms plain float32."""
    linears = [
        packed
        for layer in layers
        for packed in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)
    ]
    norms = [
        norm
        for layer in layers
        for norm in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
        if norm is not None
    ]
    return all(packed.panels is not None for packed in linears) and all(
        tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in (*norms, *tensors)
    )


def _layer(layer: DecoderLayer) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(),
        _pointer(layer.q_norm),
        _pointer(layer.k_norm),
        layer.mlp_norm.data_ptr(),
        *(_linear(p) for p in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)),
    )


def _linear(packed: PackedLinear) -> _Linear:
    assert packed.panels is not None
    return _Linear(packed.panels.data_ptr(), _pointer(packed.bias))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
