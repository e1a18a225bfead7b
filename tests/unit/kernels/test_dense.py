"""Linear, norm, rotary embedding and activation against the torch reference."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.activation import silu_mul
from kernels.ops.linear import linear, pack_linear, pack_stacked
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rope import build_rope_table, rope
from kernels.reference import dense as reference

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [0, 1, 2, 7, 12, 13, 15, 16, 17, 100, 241]


def randn(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("size_in", "size_out"), [(1, 1), (7, 31), (64, 32), (576, 100), (1100, 65)]
)
def test_linear_matches_float64(num_rows: int, size_in: int, size_out: int) -> None:
    x, weight, bias = randn(num_rows, size_in), randn(size_out, size_in, seed=4), randn(size_out)

    out = linear(x, pack_linear(weight, bias))

    expected = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_linear_takes_strided_rows_and_weights() -> None:
    x, weight = randn(9, 200), randn(40, 150).T  # weight is [150, 40] seen from [40, 150]
    wide = randn(9, 40)

    assert torch.equal(
        linear(x[:, 50:90], pack_linear(weight)),
        linear(x[:, 50:90].contiguous(), pack_linear(weight.contiguous())),
    )
    assert torch.equal(
        linear(wide.T.contiguous().T, pack_linear(weight)), linear(wide, pack_linear(weight))
    )


def test_linear_in_bf16_is_torchs() -> None:
    x, weight = randn(5, 64, dtype=torch.bfloat16), randn(32, 64, dtype=torch.bfloat16)
    assert torch.equal(linear(x, pack_linear(weight)), torch.nn.functional.linear(x, weight))


def test_packed_weight_does_not_depend_on_its_source() -> None:
    weight, x = randn(40, 30), randn(2, 30)
    packed = pack_linear(weight)
    before = linear(x, packed)
    if packed.panels is not None:
        weight.zero_()
    assert torch.equal(linear(x, packed), before)


def test_linear_refuses_wrong_shapes_and_dtypes() -> None:
    packed = pack_linear(randn(4, 6))
    with pytest.raises(ValueError, match="num_tokens, 6"):
        linear(randn(2, 5), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(randn(2, 6, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="out_features, in_features"):
        pack_linear(randn(4))
    with pytest.raises(ValueError, match="bias"):
        pack_linear(randn(4, 6), randn(5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 100, 576])
def test_norms_match_reference(size: int, dtype: torch.dtype) -> None:
    x, residual = randn(13, size, dtype=dtype), randn(13, size, seed=5, dtype=dtype)
    weight = randn(size, seed=6, dtype=dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3

    normed, total = add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(total, x + residual)
    expected = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5),
        reference.rms_norm(x, weight, 1e-5),
        rtol=tolerance,
        atol=tolerance,
    )


def test_rms_norm_takes_heads_inside_a_fused_projection() -> None:
    qkv = randn(5, 4 * 16)
    heads, weight = qkv[:, 16:48].view(5, 2, 16), randn(16)
    expected = reference.rms_norm(heads, weight, 1e-6)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6), expected, rtol=2e-6, atol=2e-6)


def test_norms_refuse_wrong_weights() -> None:
    with pytest.raises(ValueError, match=r"must be \[8\]"):
        rms_norm(randn(2, 8), randn(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(randn(2, 8), randn(3, 8), randn(8), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (16, 16), (10, 6)])
def test_rope_matches_reference(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    inv_freq = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    table = build_rope_table(rotary_dim, 50, inv_freq)
    qkv = randn(9, 5 * head_dim, dtype=dtype)
    q, k = qkv.clone()[:, : 3 * head_dim].view(9, 3, head_dim), qkv[:, 3 * head_dim :].clone()
    k = k.view(9, 2, head_dim)
    expected_q, expected_k = q.clone(), k.clone()
    positions = torch.tensor([0, 1, 2, 49, 7, 7, 30, 31, 5])

    rotated_q, rotated_k = rope(q, k, positions, table)
    reference.rope(expected_q, expected_k, positions, table)

    assert rotated_q is q
    assert rotated_k is k
    torch.testing.assert_close(q, expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k, expected_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(q[0], qkv[0, : 3 * head_dim].view(3, head_dim))  # position 0 turns by 0


def test_rope_table_is_cosines_then_sines_times_the_scale() -> None:
    table = build_rope_table(4, 3, torch.tensor([1.0, 0.5]), scale=2.0)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.5], [2.0, 1.0]])
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), 1) * 2.0)


def test_rope_refuses_positions_beyond_the_table() -> None:
    table = build_rope_table(8, 4, torch.ones(4))
    q = torch.zeros(1, 1, 8)
    with pytest.raises((ValueError, IndexError)):
        rope(q, q.clone(), torch.tensor([4]), table)
    with pytest.raises(ValueError, match="int64"):
        rope(q, q.clone(), torch.tensor([0], dtype=torch.int32), table)
    with pytest.raises(ValueError, match="inv_freq"):
        build_rope_table(8, 4, torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 1536])
def test_silu_mul_matches_reference(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(6, 2 * size, dtype=dtype) * 10
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        silu_mul(gate_up), reference.silu_mul(gate_up), rtol=tolerance, atol=tolerance
    )


def test_silu_mul_is_right_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-1e30, -104.0, -88.0, -87.0, 0.0, 87.0, 88.7, 1e30, torch.inf])
    gate_up = torch.cat((gate, torch.ones(9)))[None]
    expected = reference.silu_mul(gate_up.double()).float()
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("sizes", [(64, 32, 32), (32, 7), (40, 24, 9), (1, 1), (5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_weights_are_one_weight(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Parts that fill whole panels are packed in place, others are joined first."""
    parts = [randn(size, 50).to(dtype) for size in sizes]
    bias = randn(sum(sizes)).to(dtype)
    packed, joined = pack_stacked(parts, bias), pack_linear(torch.cat(parts), bias)
    assert (packed.in_features, packed.out_features) == (50, sum(sizes))
    x = randn(9, 50).to(dtype)
    assert torch.equal(linear(x, packed), linear(x, joined))
    if packed.panels is not None and joined.panels is not None:
        assert torch.equal(packed.panels, joined.panels)


def test_weights_that_do_not_stack_are_refused() -> None:
    with pytest.raises(ValueError, match="no weight"):
        pack_stacked([])
    with pytest.raises(ValueError, match="does not stack"):
        pack_stacked([randn(4, 6), randn(4, 5)])
    with pytest.raises(ValueError, match="does not stack"):
        pack_stacked([randn(4, 6), randn(4, 6).double()])
    with pytest.raises(ValueError, match="bias"):
        pack_stacked([randn(4, 6), randn(4, 6)], randn(4))
