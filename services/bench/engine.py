"""`isthmus bench engine`: the engine of one worker in one process beside what the machine can do.

Every round measures each case of ours and each reference once, close together; figures are
medians over rounds and bars are medians of ratios within rounds, so that a slow moment of the
machine hits both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kernels import dispatch
from services.bench.driven_engine import DrivenEngine, Spent
from services.bench.hardware import FLOAT_BYTES, Hardware, flop_per_token, weight_bytes
from services.bench.result import Bar, BenchResult
from services.bench.transformers_model import TransformersModel, is_installed
from services.common.progress import Progress, silent
from services.models.catalog import DEFAULT_MODEL, resolve
from services.models.config import ModelConfig
from services.models.load import load_model
from services.runtime.threads import available_cores

BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
CONTEXT = 512
LONGEST = max(PROMPTS) + 1
STEPS = 16  # a block of every sequence is sealed once in so many
ONE_STEP_S = 1e6  # a time target that no chunk reaches: chunks are as large as a step allows
MAX_OUTSIDE_SHARE = 0.06
MIN_ROOFLINE_SHARE = 0.3
MIN_MATMUL_SHARE = 0.3
MIN_SPEEDUP = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """What the engine took for one case, and what the machine could do just before and after."""

    num_tokens: int
    spent: Spent
    read_gb_s: float
    matmul_gflop_s: float
    transformers_tok_s: float | None = None

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.spent.turn_s


@dataclass(frozen=True, slots=True)
class Round:
    """Every case once."""

    decode: dict[int, Case]  # by batch
    prefill: dict[int, Case]  # by length of the prompt
    one_step: Case  # PROMPTS[0] tokens in as few steps as the step's bound allows


def run(
    model: str,
    *,
    rounds: int,
    threads: int,
    seed: int,
    with_transformers: bool,
    progress: Progress = silent,
) -> BenchResult:
    """Measure; the model is loaded once per library that runs it."""
    threads = threads or available_cores()
    torch.set_num_threads(threads)
    dispatch.set_num_threads(threads)
    model_dir = resolve(model or DEFAULT_MODEL)
    progress("loading the model", 0.0)
    ours = _Ours(model_dir, seed)
    theirs = None
    if with_transformers and is_installed():
        theirs = TransformersModel(model_dir, seed=seed)
    try:
        ours.warm_up()
        done = []
        for number in range(rounds):
            progress("measuring rounds", number / rounds)
            done.append(_round(ours, theirs))
    finally:
        ours.close()
    return result_of(done, ours.config, threads, kernels=dispatch.describe("cpu"))


class _Ours:
    """Two engines over one model: as a worker has it, and with chunks as large as can be."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        model = load_model(model_dir)
        self.config = model.config
        self.hardware = Hardware(model.config)
        per_seq = CONTEXT + STEPS + 32
        room = max(BATCHES) * per_seq + max(PROMPTS) + per_seq
        self.engine = DrivenEngine(model, model_dir, num_tokens=room, seed=seed)
        self.one_step = DrivenEngine(
            model, model_dir, num_tokens=4 * CONTEXT, seed=seed, chunk_target_s=ONE_STEP_S
        )

    def warm_up(self) -> None:
        """Touch all memory and let the engines learn their rates."""
        self.engine.prefill(PROMPTS[0])
        self.engine.decode(max(BATCHES), CONTEXT, 2)
        for _ in range(2):
            self.one_step.prefill(PROMPTS[0])

    def close(self) -> None:
        """Give the pools back."""
        self.engine.close()
        self.one_step.close()


def _round(ours: _Ours, theirs: TransformersModel | None) -> Round:
    engine, hardware = ours.engine, ours.hardware
    decode: dict[int, Case] = {}
    prefill: dict[int, Case] = {}
    for batch in BATCHES:
        work = partial(engine.decode, batch, CONTEXT, STEPS)
        decode[batch] = _case(hardware, batch * STEPS, work)
        if theirs is not None:
            rate = theirs.decode_tok_s(batch, CONTEXT, STEPS)
            decode[batch] = replace(decode[batch], transformers_tok_s=rate)
    for prompt in PROMPTS:
        prefill[prompt] = _case(hardware, prompt, partial(engine.prefill, prompt))
    if theirs is not None:  # the long prompt would take them longer than all else here together
        rate = theirs.prefill_tok_s(PROMPTS[0])
        prefill[PROMPTS[0]] = replace(prefill[PROMPTS[0]], transformers_tok_s=rate)
    return Round(
        decode,
        prefill,
        _case(hardware, PROMPTS[0], partial(ours.one_step.prefill, PROMPTS[0])),
    )


def _case(hardware: Hardware, num_tokens: int, work: Callable[[], Spent]) -> Case:
    reads, rates = [hardware.read_gb_s()], [hardware.matmul_gflop_s()]
    spent = work()
    reads.append(hardware.read_gb_s())
    rates.append(hardware.matmul_gflop_s())
    return Case(num_tokens, spent, statistics.mean(reads), statistics.mean(rates))


# -- from rounds to a result ----------------------------------------------------------------------


def decode_limit_tok_s(
    config: ModelConfig, batch: int, *, read_gb_s: float, matmul_gflop_s: float
) -> float:
    """The lower of two limits: weights and KV read once a step, and their multiplications."""
    kv_bytes = 2 * config.num_layers * config.kv_size * CONTEXT * FLOAT_BYTES
    read_s = (weight_bytes(config) + batch * kv_bytes) / (read_gb_s * 1e9)
    multiply_s = batch * flop_per_token(config, with_head=True) / (matmul_gflop_s * 1e9)
    return batch / max(read_s, multiply_s)


def prefill_limit_tok_s(config: ModelConfig, *, matmul_gflop_s: float) -> float:
    """Prompt tokens a second if the projections ran at the rate and all else took no time."""
    return matmul_gflop_s * 1e9 / flop_per_token(config, with_head=False)


def result_of(
    rounds: Sequence[Round], config: ModelConfig, threads: int, *, kernels: str
) -> BenchResult:
    """Medians, their references, and bars on ratios within rounds."""
    result = BenchResult("engine")
    every = [c for r in rounds for c in (*r.decode.values(), *r.prefill.values())]
    result.figures = {"threads": threads, "rounds": len(rounds), "kernels": kernels}
    result.reference = {
        "read_gb_s": _median([case.read_gb_s for case in every]),
        "torch_matmul_gflop_s": _median([case.matmul_gflop_s for case in every]),
    }
    for batch in BATCHES:
        cases = [r.decode[batch] for r in rounds]
        limits = [
            decode_limit_tok_s(
                config, batch, read_gb_s=c.read_gb_s, matmul_gflop_s=c.matmul_gflop_s
            )
            for c in cases
        ]
        _add(result, f"decode_b{batch}", cases, limits, MIN_ROOFLINE_SHARE)
    for prompt in PROMPTS:
        cases = [r.prefill[prompt] for r in rounds]
        limits = [prefill_limit_tok_s(config, matmul_gflop_s=c.matmul_gflop_s) for c in cases]
        _add(result, f"prefill_{prompt}", cases, limits, MIN_MATMUL_SHARE)
        steps = [float(case.spent.num_turns) for case in cases]
        result.figures[f"prefill_{prompt}_steps"] = _median(steps)
    rate = _median([r.one_step.tok_s for r in rounds])
    result.figures[f"prefill_{PROMPTS[0]}_one_step_tok_s"] = rate
    return result


def _add(
    result: BenchResult,
    name: str,
    cases: Sequence[Case],
    limits: Sequence[float],
    min_share: float,
) -> None:
    """Add a case: its rate, its limit, and the bars."""
    outside = _median([case.spent.outside_share for case in cases])
    share = _median([case.tok_s / limit for case, limit in zip(cases, limits, strict=True)])
    result.figures[f"{name}_tok_s"] = _median([case.tok_s for case in cases])
    result.figures[f"{name}_outside_model_share"] = outside
    result.reference[f"{name}_limit_tok_s"] = _median(limits)
    result.bars += [
        Bar(f"{name}: share of the machine's limit", share, min_share, ">="),
        Bar(f"{name}: share of time outside the model", outside, MAX_OUTSIDE_SHARE, "<="),
    ]
    theirs = [case.transformers_tok_s for case in cases if case.transformers_tok_s is not None]
    if not theirs:
        return
    result.reference[f"{name}_transformers_tok_s"] = _median(theirs)
    ratio = _median([c.tok_s / c.transformers_tok_s for c in cases if c.transformers_tok_s])
    result.figures[f"{name}_to_transformers"] = ratio
    if name.startswith("decode"):  # a worker prefills in chunks that end soon, they do not
        result.bars.append(Bar(f"{name}: ours / transformers", ratio, MIN_SPEEDUP, ">="))


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)
