"""`isthmus bench wire`: what a wire dtype does to the answers of a real model.

The model writes prompts of its own, so that they are text as it knows it. Their KV is computed
once; then the answer is decoded from the KV as it is and from the KV as each wire dtype leaves
it, which is exactly what a decode worker receives over such a link. Step by step the exact
answer is forced on both, so that every step compares two distributions of the same context;
then each goes on freely, until its first other token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels import dispatch
from services.bench.greedy import Logits, Sequences, Tokens
from services.bench.result import Bar, BenchResult, Figure
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.kv.convert import convert_part, whole
from services.kv.layout import KvLayout
from services.models.catalog import DEFAULT_MODEL, resolve
from services.models.load import load_model
from services.runtime.threads import available_cores

WIRES = ("bfloat16", "int8")
# By dtype: mean KL in nats at most, and the share of steps with the same greedy token at least.
MAX_KL = {"bfloat16": 0.0001, "int8": 0.002}
MIN_AGREEMENT = {"bfloat16": 0.98, "int8": 0.97}
TEMPERATURE = 0.8  # of the prompts the model writes
_TIMED_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured."""

    prompts: int
    prompt_tokens: int
    answer_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How answers from rounded KV differ from the exact ones, over all prompts and steps."""

    kl: np.ndarray[tuple[int], np.dtype[np.float64]]  # [steps * prompts], nats
    same_token: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [steps * prompts]
    free_tokens: np.ndarray[tuple[int], np.dtype[np.int64]]  # [prompts] before the first other one


def run(
    model: str, setup: Setup, *, dtype: str, threads: int, progress: Progress = silent
) -> BenchResult:
    """Measure every wire dtype that is smaller than what the model stores."""
    threads = threads or available_cores()
    torch.set_num_threads(threads)
    dispatch.set_num_threads(threads)
    model_dir = resolve(model or DEFAULT_MODEL)
    progress("loading the model", 0.0)
    loaded = load_model(model_dir, dtype=dtype)
    room = setup.prompt_tokens + setup.answer_tokens
    sequences = Sequences(loaded, setup.prompts, room)
    rng = np.random.default_rng(setup.seed)
    progress("writing prompts", 0.0)
    prompts = write_prompts(sequences, setup.prompt_tokens, rng)
    progress("answering without rounding", 0.0)
    exact = _Exact.of(sequences, prompts, setup.answer_tokens)
    layout = sequences.layout
    wires = [wire for wire in WIRES if replace(layout, kv_dtype=wire).itemsize < layout.itemsize]
    found = {}
    for wire in wires:
        progress(f"answering from {wire}", 0.0)
        found[wire] = compare(sequences, exact, (wire,))
    # The same measurement without rounding must find nothing, or it measures something else.
    control = compare(sequences, exact, ())
    result = result_of(found, control, setup)
    result.figures |= _cost(layout, wires, exact.prompt_kv)
    result.reference |= {"stored_dtype": dtype, "model": read_manifest(model_dir).name}
    return result


def memory_bytes(model_dir: str, setup: Setup, dtype: str) -> int:
    """What the KV takes: the pool, and the copy it goes back to."""
    manifest = read_manifest(Path(model_dir))
    layout = KvLayout(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, dtype)
    room = layout.blocks_for(setup.prompt_tokens + setup.answer_tokens)
    return 2 * setup.prompts * room * layout.block_bytes


def write_prompts(sequences: Sequences, num_tokens: int, rng: np.random.Generator) -> Tokens:
    """Let the model write, each sequence from a random first token on; the KV is thrown away."""
    vocab = len(sequences.feed(np.zeros((sequences.num_seqs, 1), np.int64))[0])
    sequences.length = 0
    tokens = rng.integers(0, vocab, (sequences.num_seqs, 1))
    while tokens.shape[1] < num_tokens:
        logits = sequences.feed(tokens[:, -1:])
        # The largest of logits with Gumbel noise is a sample of the softmax.
        noise = rng.gumbel(size=logits.shape)
        drawn = (logits / TEMPERATURE + noise).argmax(axis=1)
        tokens = np.concatenate([tokens, drawn[:, None]], axis=1)
    sequences.length = 0
    return tokens


@dataclass(frozen=True, slots=True)
class _Exact:
    """The answers a worker gives alone, and the KV of their prompts."""

    prompt_kv: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    prompt_tokens: int
    tokens: Tokens  # [num_seqs, steps + 1]; the first is of the prefill
    logits: list[Logits]  # after each but the last of them

    @classmethod
    def of(cls, sequences: Sequences, prompts: Tokens, num_tokens: int) -> _Exact:
        """Compute prompts and answers."""
        first = sequences.feed(prompts).argmax(axis=1)[:, None]
        length, state = sequences.length, sequences.state()
        tokens, logits = first, []
        for _ in range(num_tokens - 1):
            logits.append(sequences.feed(tokens[:, -1:]))
            tokens = np.concatenate([tokens, logits[-1].argmax(axis=1)[:, None]], axis=1)
        return cls(state, length, tokens, logits)


def compare(sequences: Sequences, exact: _Exact, dtypes: tuple[str, ...]) -> Difference:
    """Decode again from KV that went through these dtypes."""
    kl, same = [], []
    _rewind(sequences, exact, dtypes)
    for step, expected in enumerate(exact.logits):
        found = sequences.feed(exact.tokens[:, step : step + 1])
        kl.append(divergence(expected, found))
        same.append(expected.argmax(axis=1) == found.argmax(axis=1))
    free = free_run(sequences, exact, dtypes)
    is_other = np.concatenate([free != exact.tokens, np.ones((len(free), 1), bool)], axis=1)
    return Difference(np.concatenate(kl), np.concatenate(same), is_other.argmax(axis=1))


def free_run(sequences: Sequences, exact: _Exact, dtypes: tuple[str, ...]) -> Tokens:
    """Return the greedy answers from KV that went through these dtypes."""
    _rewind(sequences, exact, dtypes)
    tokens = exact.tokens[:, :1]
    for _ in exact.logits:
        drawn = sequences.feed(tokens[:, -1:]).argmax(axis=1)
        tokens = np.concatenate([tokens, drawn[:, None]], axis=1)
    return tokens


def divergence(exact: Logits, found: Logits) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return KL(exact || found) of each row, in nats."""
    left, right = _log_softmax(exact), _log_softmax(found)
    kl: np.ndarray[tuple[int], np.dtype[np.float64]]
    kl = np.maximum((np.exp(left) * (left - right)).sum(axis=1), 0.0)
    return kl


def result_of(found: dict[str, Difference], control: Difference, setup: Setup) -> BenchResult:
    """Make figures and bars of what was found."""
    result = BenchResult("wire")
    result.figures |= {
        "prompts": setup.prompts,
        "prompt_tokens": setup.prompt_tokens,
        "steps": len(control.kl),
    }
    for wire, difference in found.items():
        figures = _figures(difference)
        result.figures |= {f"{wire}_{name}": value for name, value in figures.items()}
        kl, agreement = float(difference.kl.mean()), float(difference.same_token.mean())
        result.bars.append(Bar(f"{wire}_kl_mean_nats", kl, MAX_KL[wire], "<="))
        bar = Bar(f"{wire}_greedy_agreement", agreement, MIN_AGREEMENT[wire], ">=")
        result.bars.append(bar)
    result.reference |= {f"unrounded_{k}": v for k, v in _figures(control).items()}
    result.bars.append(Bar("unrounded_kl_max_nats", float(control.kl.max()), 0.0, "=="))
    return result


def _figures(difference: Difference) -> dict[str, Figure]:
    return {
        "kl_mean_nats": float(difference.kl.mean()),
        "kl_p99_nats": float(np.quantile(difference.kl, 0.99)),
        "kl_max_nats": float(difference.kl.max()),
        "greedy_agreement": float(difference.same_token.mean()),
        "free_tokens_median": float(np.median(difference.free_tokens)),
        "free_tokens_min": int(difference.free_tokens.min()),
    }


def _cost(
    layout: KvLayout, wires: list[str], blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> dict[str, Figure]:
    """Say how much smaller frames are, and what conversion costs on either side."""
    figures: dict[str, Figure] = {}
    timed = blocks[:_TIMED_BLOCKS]
    for name in wires:
        wire = replace(layout, kv_dtype=name)
        frame = np.zeros(wire.block_bytes, np.uint8)
        back = np.zeros(layout.block_bytes, np.uint8)
        send_s = receive_s = 0.0
        for block in timed:
            started = time.perf_counter()
            convert_part(layout, block, whole(layout), wire, frame, whole(wire))
            middle = time.perf_counter()
            convert_part(wire, frame, whole(wire), layout, back, whole(layout))
            send_s += middle - started
            receive_s += time.perf_counter() - middle
        size = len(timed) * layout.block_bytes
        figures[f"{name}_bytes_share"] = wire.block_bytes / layout.block_bytes
        figures[f"{name}_send_gb_s"] = size / send_s / 1e9
        figures[f"{name}_receive_gb_s"] = size / receive_s / 1e9
    return figures


def _rewind(sequences: Sequences, exact: _Exact, dtypes: tuple[str, ...]) -> None:
    sequences.restore(exact.prompt_kv, exact.prompt_tokens)
    if dtypes:
        sequences.round(dtypes)


def _log_softmax(logits: Logits) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalised: np.ndarray[tuple[int, int], np.dtype[np.float64]] = shifted - np.log(
        np.exp(shifted).sum(axis=1, keepdims=True)
    )
    return normalised
