"""The fused decoder step has the bits of the single ops, whatever is in the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.ops.decoder import PackedDecoder, decoder_step, pack_decoder, step_by_ops
from kernels.ops.decoder_parts import DecoderGeometry, DecoderLayer
from kernels.ops.linear import pack_linear
from kernels.ops.rope import build_rope_table
from tests.support.paged_batch import make_batch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, LAYERS = 6, 2, 16, 48, 40, 3


@dataclass(frozen=True)
class Step:
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    more_pools: tuple[Tensor | None, ...] = ()


def make_decoder(*, qk_norm: bool = False, bias: bool = False) -> PackedDecoder:
    generator = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    qkv_size = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layers = [
        DecoderLayer(
            input_norm=randn(HIDDEN) + 1,
            qkv=pack_linear(randn(qkv_size, HIDDEN), randn(qkv_size) if bias else None),
            attn_out=pack_linear(randn(HIDDEN, HEADS * HEAD_DIM)),
            mlp_norm=randn(HIDDEN) + 1,
            gate_up=pack_linear(randn(2 * INTER, HIDDEN)),
            down=pack_linear(randn(HIDDEN, INTER)),
            q_norm=randn(HEAD_DIM) + 1 if qk_norm else None,
            k_norm=randn(HEAD_DIM) + 1 if qk_norm else None,
        )
        for _ in range(LAYERS)
    ]
    table = build_rope_table(HEAD_DIM, 200, 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    geometry = DecoderGeometry(HEADS, KV_HEADS, HEAD_DIM, 1e-5, HEAD_DIM**-0.5)
    return pack_decoder(layers, randn(HIDDEN) + 1, table, geometry)


def make_step(seqs: list[tuple[int, int]], logit_rows: list[int]) -> tuple[Step, Tensor, Tensor]:
    """Return a step, its pool and its embeddings."""
    batch = make_batch(seqs, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_layers=LAYERS)
    positions = [p for count, context in seqs for p in range(context - count, context)]
    slots = [
        int(batch.block_tables[seq, p // 16]) * 16 + p % 16
        for seq, (count, context) in enumerate(seqs)
        for p in range(context - count, context)
    ]
    step = Step(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        torch.tensor(logit_rows, dtype=torch.int64),
    )
    hidden = torch.randn(len(slots), HIDDEN, generator=torch.Generator().manual_seed(5))
    return step, batch.kv_pool, hidden


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("seqs", "logit_rows"),
    [
        ([(1, 1)], [0]),
        ([(1, 17), (1, 100), (1, 33)], [0, 1, 2]),
        ([(40, 40), (1, 20), (9, 30)], [39, 40, 49]),
        ([(7, 23)], []),
        ([(5, 5)], [4, 0, 0, 2]),
    ],
)
def test_equals_the_single_ops_bit_for_bit(
    seqs: list[tuple[int, int]],
    logit_rows: list[int],
    kv_dtype: torch.dtype,
    bias: bool,
    qk_norm: bool,
) -> None:
    decoder = make_decoder(qk_norm=qk_norm, bias=bias)
    step, pool, hidden = make_step(seqs, logit_rows)
    pool, expected_pool = pool.to(kv_dtype), pool.to(kv_dtype)

    out = decoder_step(hidden.clone(), decoder, pool, step)
    expected = step_by_ops(hidden.clone(), decoder, expected_pool, step)

    assert torch.equal(out, expected)
    assert torch.equal(pool.nan_to_num(7.0), expected_pool.nan_to_num(7.0))
    assert out.isfinite().all()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_other_pools_give_the_same_bits(kv_dtype: torch.dtype) -> None:
    decoder = make_decoder()
    step, pool, hidden = make_step([(1, 100), (3, 40), (1, 5)], [0, 3, 4])
    pool = pool.to(kv_dtype)
    expected = decoder_step(hidden.clone(), decoder, pool.clone(), step)
    theirs, tables = torch.full_like(pool[:7], torch.nan), step.block_tables.clone()
    for to, (seq, index) in enumerate([(0, 0), (0, 2), (0, 5), (1, 1)]):
        block = int(tables[seq, index])
        theirs[6 - to], pool[block] = pool[block].clone(), torch.nan
        tables[seq, index] = 2 << 24 | 6 - to
    before = theirs.clone()

    step = replace(step, block_tables=tables, more_pools=(None, theirs))
    out = decoder_step(hidden.clone(), decoder, pool, step)

    assert torch.equal(out, expected)
    assert torch.equal(theirs.nan_to_num(7.0), before.nan_to_num(7.0)), "it is only read"


def test_runs_natively_where_the_library_does() -> None:
    assert (make_decoder().native is not None) == library.available()[0]


def test_step_without_tokens_gives_no_rows() -> None:
    step, pool, hidden = make_step([], [])
    assert decoder_step(hidden, make_decoder(), pool, step).shape == (0, HIDDEN)


def test_bad_indices_are_refused_before_the_pool_is_written() -> None:
    if not library.available()[0]:
        pytest.skip(library.available()[1])
    decoder = make_decoder()
    step, pool, hidden = make_step([(2, 20)], [1])
    before = pool.clone()
    for change, message in (
        ({"positions": torch.tensor([18, 200])}, "positions"),
        ({"slot_mapping": torch.tensor([0, 10**6])}, "slot_mapping"),
        ({"logit_rows": torch.tensor([2])}, "logit_rows"),
        ({"logit_rows": torch.tensor([0, 1, 1])}, "logit_rows"),
        ({"block_tables": step.block_tables - 100}, "block_tables"),
        ({"query_starts": step.query_starts + 1}, "query_starts"),
    ):
        bad = replace(step, **change)  # type: ignore[arg-type]  # tensors, by name
        with pytest.raises(ValueError, match=message):
            decoder_step(hidden.clone(), decoder, pool, bad)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))


def test_wrong_shapes_are_refused_by_name() -> None:
    decoder = make_decoder()
    step, pool, hidden = make_step([(2, 20)], [1])
    with pytest.raises(ValueError, match="hidden"):
        decoder_step(hidden[:, :-1], decoder, pool, step)
    with pytest.raises(ValueError, match="kv_pool"):
        decoder_step(hidden, decoder, pool[:, 1:], step)
    with pytest.raises(ValueError, match="positions"):
        decoder_step(hidden, decoder, pool, replace(step, positions=step.positions[1:]))
    with pytest.raises(ValueError, match="block_tables"):
        decoder_step(hidden, decoder, pool, replace(step, block_tables=step.block_tables.long()))
    layer = decoder.layers[0]
    geometry = decoder.geometry
    for change, message in (
        ({"qkv": layer.attn_out}, "layer 0: qkv"),
        ({"mlp_norm": torch.ones(3)}, "layer 0: mlp_norm"),
        ({"q_norm": torch.ones(HEAD_DIM)}, "come together"),
    ):
        wrong = replace(layer, **change)
        with pytest.raises(ValueError, match=message):
            pack_decoder([wrong], decoder.final_norm, decoder.rope_table, geometry)
    narrow = replace(layer, gate_up=layer.down, down=pack_linear(torch.ones(HIDDEN, HIDDEN // 2)))
    with pytest.raises(ValueError, match="layer 1: "):
        pack_decoder([layer, narrow], decoder.final_norm, decoder.rope_table, geometry)
    with pytest.raises(ValueError, match="at least one layer"):
        pack_decoder([], decoder.final_norm, decoder.rope_table, geometry)
