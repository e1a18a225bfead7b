"""All layers of a dense pre-norm decoder as one op: the single ops in a row, in one C call.

One call saves the Python between ops, which at batch 1 is a tenth of a step, and keeps the GIL
free for the whole step. The bits are those of the single ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from kernels.cpu.decoder import CpuDecoder, fits
from kernels.ops.activation import silu_mul
from kernels.ops.attention import check_more_pools, paged_attention, write_kv
from kernels.ops.decoder_parts import DecoderGeometry, DecoderLayer, StepInputs
from kernels.ops.linear import linear
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rope import rope


@dataclass(frozen=True, slots=True, eq=False)
class PackedDecoder:
    """A decoder made ready by `pack_decoder`; opaque to callers."""

    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    rope_table: Tensor
    geometry: DecoderGeometry
    native: CpuDecoder | None


def pack_decoder(
    layers: Sequence[DecoderLayer],
    final_norm: Tensor,
    rope_table: Tensor,
    geometry: DecoderGeometry,
) -> PackedDecoder:
    """Make a decoder ready for `decoder_step`; it shares the weights' memory.

    Args:
        layers: at least one, all of the same shapes.
        final_norm: `[hidden]`.
        rope_table: `[max_pos, rotary_dim]` from `build_rope_table`.
        geometry: see its fields.
    """
    if not layers:
        raise ValueError("a decoder needs at least one layer")
    for index, layer in enumerate(layers):
        _check_layer(index, layer, final_norm.shape[0], geometry)
        if layer.down.in_features != layers[0].down.in_features:
            raise ValueError(f"layer {index}: its intermediate size is not that of layer 0")
    native = None
    cpu = dispatch.cpu_kernels(final_norm)
    if cpu is not None and fits(layers, (final_norm, rope_table)):
        native = CpuDecoder(cpu, layers, final_norm, rope_table, geometry)
    return PackedDecoder(tuple(layers), final_norm, rope_table, geometry, native)


def decoder_step(
    hidden: Tensor, decoder: PackedDecoder, kv_pool: Tensor, inputs: StepInputs
) -> Tensor:
    """Run every layer over the step's tokens, writing their keys and values to the pool.

    Args:
        hidden: `[num_tokens, hidden]` embeddings, contiguous; **overwritten**.
        decoder: made by `pack_decoder`.
        kv_pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        inputs: the step's index tensors.

    Returns:
        `[num_logits, hidden]`: the rows `logit_rows` after the final norm.
    """
    _check_step(hidden, decoder, kv_pool, inputs)
    check_more_pools(kv_pool, inputs.more_pools)
    native = decoder.native
    if native is not None and native.can_run(hidden, kv_pool):
        return native.step(hidden, kv_pool, inputs)
    return step_by_ops(hidden, decoder, kv_pool, inputs)


def step_by_ops(
    hidden: Tensor, decoder: PackedDecoder, kv_pool: Tensor, inputs: StepInputs
) -> Tensor:
    """Run the step op by op: what `decoder_step` equals, and what it does on other devices."""
    layers, geometry = decoder.layers, decoder.geometry
    residual, rows = hidden, inputs.logit_rows
    normed = rms_norm(residual, layers[0].input_norm, geometry.eps)
    for index, layer in enumerate(layers):
        q, k, v = _project(normed, layer, decoder, inputs.positions)
        write_kv(k, v, kv_pool, index, inputs.slot_mapping)
        is_last = index + 1 == len(layers)
        if is_last and rows.shape[0] == 0:
            break
        attended = paged_attention(
            q,
            kv_pool,
            index,
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            geometry.scale,
            inputs.more_pools,
        ).flatten(1)
        if is_last:  # beyond its keys and values only rows whose logits are wanted matter
            attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
        projected = linear(attended, layer.attn_out)
        normed, residual = add_rms_norm(projected, residual, layer.mlp_norm, geometry.eps)
        projected = linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
        next_norm = decoder.final_norm if is_last else layers[index + 1].input_norm
        normed, residual = add_rms_norm(projected, residual, next_norm, geometry.eps)
    else:
        return normed
    return hidden.new_empty((0, hidden.shape[1]))


def _project(
    normed: Tensor, layer: DecoderLayer, decoder: PackedDecoder, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q and k, and v, each `[num_tokens, heads, head_dim]`."""
    geometry = decoder.geometry
    heads = linear(normed, layer.qkv).view(normed.shape[0], -1, geometry.head_dim)
    first_v = geometry.num_heads + geometry.num_kv_heads
    q, k = heads[:, : geometry.num_heads], heads[:, geometry.num_heads : first_v]
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, geometry.eps)
        k = rms_norm(k, layer.k_norm, geometry.eps)
    q, k = rope(q, k, positions, decoder.rope_table)
    return q, k, heads[:, first_v:]


def _check_layer(index: int, layer: DecoderLayer, hidden: int, geometry: DecoderGeometry) -> None:
    q_size = geometry.num_heads * geometry.head_dim
    qkv_size = q_size + 2 * geometry.num_kv_heads * geometry.head_dim
    inter = layer.down.in_features
    for name, packed, shape in (
        ("qkv", layer.qkv, (hidden, qkv_size)),
        ("attn_out", layer.attn_out, (q_size, hidden)),
        ("gate_up", layer.gate_up, (hidden, 2 * inter)),
        ("down", layer.down, (inter, hidden)),
    ):
        if (packed.in_features, packed.out_features) != shape:
            raise ValueError(
                f"layer {index}: {name} maps {packed.in_features} to {packed.out_features}, "
                f"not {shape[0]} to {shape[1]}"
            )
    for name, norm, size in (
        ("input_norm", layer.input_norm, hidden),
        ("mlp_norm", layer.mlp_norm, hidden),
        ("q_norm", layer.q_norm, geometry.head_dim),
        ("k_norm", layer.k_norm, geometry.head_dim),
    ):
        if norm is not None and norm.shape != (size,):
            raise ValueError(f"layer {index}: {name} {tuple(norm.shape)} must be [{size}]")
    if (layer.q_norm is None) != (layer.k_norm is None):
        raise ValueError(f"layer {index}: q_norm and k_norm come together")


def _check_step(
    hidden: Tensor, decoder: PackedDecoder, kv_pool: Tensor, inputs: StepInputs
) -> None:
    size, geometry, num_tokens = decoder.final_norm.shape[0], decoder.geometry, hidden.shape[0]
    if hidden.dim() != 2 or hidden.shape[1] != size or not hidden.is_contiguous():
        raise ValueError(f"hidden {tuple(hidden.shape)} must be contiguous [num_tokens, {size}]")
    expected = (len(decoder.layers), 2, geometry.num_kv_heads, geometry.head_dim)
    if kv_pool.dim() != 6 or (*kv_pool.shape[1:4], kv_pool.shape[5]) != expected:
        raise ValueError(f"kv_pool {tuple(kv_pool.shape)} is not a pool of this decoder")
    num_seqs = inputs.context_lens.shape[0]
    for name, tensor, dtype, shape in (
        ("positions", inputs.positions, torch.int64, (num_tokens,)),
        ("slot_mapping", inputs.slot_mapping, torch.int64, (num_tokens,)),
        ("logit_rows", inputs.logit_rows, torch.int64, (inputs.logit_rows.numel(),)),
        ("query_starts", inputs.query_starts, torch.int32, (num_seqs + 1,)),
        ("context_lens", inputs.context_lens, torch.int32, (num_seqs,)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} must be {shape} {dtype}")
    if inputs.logit_rows.shape[0] > num_tokens:
        raise ValueError(f"logit_rows asks for more rows than the step's {num_tokens}")
    tables = inputs.block_tables
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.shape[0] != num_seqs:
        raise ValueError(f"block_tables {tuple(tables.shape)} must be [{num_seqs}, max_blocks]")
