"""A row's bits do not depend on the rest of the batch, on chunking or on threads.

This is what makes two pools answer exactly as one, so every comparison here is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.ops.activation import silu_mul
from kernels.ops.attention import paged_attention, write_kv
from kernels.ops.linear import linear, pack_linear
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rope import build_rope_table, rope
from tests.support.paged_batch import make_queries

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 64, 16


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    kernels = library.kernels()
    if kernels is None:
        pytest.skip(f"only the C library promises this: {library.available()[1]}")
    before = kernels.get_num_threads()
    library.set_num_threads(request.param)
    yield request.param
    library.set_num_threads(before)


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size_in", "size_out"), [(576, 960), (1536, 576), (1100, 45), (2000, 33)])
def test_linear_rows_are_independent(size_in: int, size_out: int) -> None:
    x = randn(300, size_in)
    packed = pack_linear(randn(size_out, size_in, seed=4), randn(size_out))
    alone = torch.cat([linear(x[i : i + 1], packed) for i in range(300)])

    for first, count in [(0, 300), (0, 2), (3, 7), (11, 12), (5, 13), (40, 25), (17, 97), (9, 255)]:
        rows = slice(first, first + count)
        assert torch.equal(linear(x[rows], packed), alone[rows]), f"rows {first}+{count}"


def test_linear_threads_do_not_change_a_bit() -> None:
    x, packed = randn(70, 576), pack_linear(randn(1537, 576, seed=4))
    out = linear(x, packed)
    library.set_num_threads(1)
    assert torch.equal(linear(x, packed), out)


def test_rowwise_ops_are_independent_of_other_rows() -> None:
    x, residual, weight = randn(150, 577), randn(150, 577, seed=5), randn(577, seed=6)
    gate_up = randn(150, 2 * 519)
    table = build_rope_table(64, 200, 10000.0 ** (-torch.arange(0, 64, 2) / 64))
    q, k = randn(150, 6, 64), randn(150, 2, 64)
    positions = torch.arange(150)

    def one(i: int) -> list[Tensor]:
        row = slice(i, i + 1)
        return [
            rms_norm(x[row], weight, 1e-5),
            *add_rms_norm(x[row], residual[row], weight, 1e-5),
            silu_mul(gate_up[row]),
            *rope(q[row].clone(), k[row].clone(), positions[row], table),
        ]

    alone = [torch.cat(rows) for rows in zip(*map(one, range(150)), strict=True)]
    together = [
        rms_norm(x, weight, 1e-5),
        *add_rms_norm(x, residual, weight, 1e-5),
        silu_mul(gate_up),
        *rope(q.clone(), k.clone(), positions, table),
    ]
    for expected, actual in zip(alone, together, strict=True):
        assert torch.equal(expected, actual)


class Sequences:
    """Sequences with fixed q, k, v per position, stepped through a shared pool in any chunks."""

    def __init__(self, lengths: list[int], kv_dtype: torch.dtype) -> None:
        self.lengths = lengths
        self.q = [make_queries(n, HEADS, HEAD_DIM) + i for i, n in enumerate(lengths)]
        self.k = [randn(n, KV_HEADS, HEAD_DIM, seed=20 + i) for i, n in enumerate(lengths)]
        self.v = [randn(n, KV_HEADS, HEAD_DIM, seed=40 + i) for i, n in enumerate(lengths)]
        self.kv_dtype = kv_dtype

    def run(self, rng: random.Random, max_chunk: int, together: bool) -> list[Tensor]:
        """Step all sequences to their ends and return the attention output of every position."""
        needed = [-(-n // BLOCK) for n in self.lengths]
        block_ids = list(range(sum(needed) + 5))
        rng.shuffle(block_ids)
        tables = [[block_ids.pop() for _ in range(count)] for count in needed]
        pool = torch.full((sum(needed) + 5, 1, 2, KV_HEADS, BLOCK, HEAD_DIM), float("nan"))
        pool = pool.to(self.kv_dtype)
        done = [0] * len(self.lengths)
        outputs: list[list[Tensor]] = [[] for _ in self.lengths]
        while any(d < n for d, n in zip(done, self.lengths, strict=True)):
            ready = [i for i, n in enumerate(self.lengths) if done[i] < n]
            chosen = rng.sample(ready, rng.randint(1, len(ready)) if together else 1)
            chunks = [
                (i, done[i], min(self.lengths[i], done[i] + rng.randint(1, max_chunk)))
                for i in chosen
            ]
            out = self._step(pool, tables, chunks)
            row = 0
            for i, first, last in chunks:
                outputs[i].append(out[row : row + last - first])
                row, done[i] = row + last - first, last
        return [torch.cat(rows) for rows in outputs]

    def _step(
        self, pool: Tensor, tables: list[list[int]], chunks: list[tuple[int, int, int]]
    ) -> Tensor:
        slots = [
            tables[i][position // BLOCK] * BLOCK + position % BLOCK
            for i, first, last in chunks
            for position in range(first, last)
        ]

        def rows(source: list[Tensor]) -> Tensor:
            return torch.cat([source[i][first:last] for i, first, last in chunks])

        write_kv(rows(self.k), rows(self.v), pool, 0, torch.tensor(slots))
        width = max(len(tables[i]) for i, _, _ in chunks)
        padded = [tables[i] + [-1] * (width - len(tables[i])) for i, _, _ in chunks]
        starts = torch.tensor([0, *(last - first for _, first, last in chunks)]).cumsum(0)
        return paged_attention(
            rows(self.q),
            pool,
            0,
            torch.tensor(padded, dtype=torch.int32),
            starts.to(torch.int32),
            torch.tensor([last for _, _, last in chunks], dtype=torch.int32),
            HEAD_DIM**-0.5,
        )


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_depend_on_chunks_batch_or_blocks(kv_dtype: torch.dtype) -> None:
    """The pool starts full of NaN, so memory that was never written would show (RB-086)."""
    sequences = Sequences([1, 15, 16, 17, 130, 75], kv_dtype)
    token_by_token = sequences.run(random.Random(0), max_chunk=1, together=False)

    for seed, max_chunk in [(1, 1), (2, 7), (3, 16), (4, 33), (5, 200)]:
        outputs = sequences.run(random.Random(seed), max_chunk, together=True)
        for expected, actual in zip(token_by_token, outputs, strict=True):
            assert torch.equal(expected, actual), f"chunks up to {max_chunk}"


@pytest.mark.parametrize("max_chunk", [64, 256, 1024])
def test_long_prompt_is_the_same_in_any_chunks_over_poisoned_memory(max_chunk: int) -> None:
    """Chunked prefill of a long prompt once read uninitialised memory elsewhere (RB-086)."""
    prompt = Sequences([2500], torch.float32)
    (at_once,) = prompt.run(FixedChunks(2500), 2500, together=False)

    (chunked,) = prompt.run(FixedChunks(max_chunk), max_chunk, together=False)

    assert chunked.isfinite().all()
    assert torch.equal(chunked, at_once)


class FixedChunks(random.Random):
    """A source of chance that always draws the largest chunk."""

    def __init__(self, chunk: int) -> None:
        super().__init__(3)
        self._chunk = chunk

    def randint(self, a: int, b: int) -> int:
        return min(b, self._chunk)
