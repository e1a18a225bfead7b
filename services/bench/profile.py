"""`isthmus profile`: how fast a worker is on this machine, as the simulator's performance model.

The engine of one worker is driven without a cluster: prompts of several lengths after several
cached prefixes, and steps of several batches at several contexts, round after round until the
time is used up. Medians of each case are fitted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from kernels import dispatch
from services.bench.driven_engine import DrivenEngine
from services.common.config import WorkerSettings
from services.common.machine import machine
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.kv.layout import KvLayout
from services.models.catalog import DEFAULT_MODEL, resolve
from services.models.load import load_model
from services.router.policy import PolicyConfig
from services.runtime.threads import available_cores
from services.sim.fit import PromptSample, StepSample, fit_decode, fit_prefill, quality
from services.sim.performance import Network, PerformanceModel
from services.worker.memory_plan import plan_memory

PROMPTS = (64, 128, 256, 512, 1024)  # tokens to compute
CONTEXTS = (0, 512, 1024)  # tokens cached before them
BATCHES = (1, 4, 16, 32)
DECODE_CONTEXTS = (32, 256, 1024)
MAX_RESIDENT = 9000  # tokens: a batch of long contexts has no room in a small machine's memory
STEPS = 8
LONGEST = max(PROMPTS) + max(CONTEXTS) + 1
_ROOM = MAX_RESIDENT + 2 * LONGEST + max(BATCHES) * (STEPS + 32)  # tokens of KV
_COPY_BYTES = 64 << 20
_COPIES = 5


@dataclass(slots=True)
class Measured:
    """Seconds of each case, by round."""

    prompts: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    steps: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # batch, context
    chunks: list[float] = field(default_factory=list)  # tokens of a long prompt in one step

    def prompt_samples(self) -> list[PromptSample]:
        """Take the median of each prompt."""
        return [
            PromptSample(num_tokens, context, statistics.median(seconds))
            for (num_tokens, context), seconds in self.prompts.items()
        ]

    def step_samples(self) -> list[StepSample]:
        """Take the median of each batch; its contexts grow while it is measured."""
        return [
            StepSample(batch, batch * (context + STEPS / 2), statistics.median(seconds))
            for (batch, context), seconds in self.steps.items()
        ]


@dataclass(frozen=True, slots=True)
class ProfiledWorker:
    """What a model says beside the times of prompts and steps."""

    name: str
    source: str
    kv_blocks: int
    startup_s: float  # of its weights
    network: Network


def run(
    model: str,
    *,
    budget_s: float,
    threads: int,
    seed: int,
    kv_memory_bytes: int = 0,
    progress: Progress = silent,
) -> PerformanceModel:
    """Measure at least one round, and as many as begin within the time.

    Args:
        kv_memory_bytes: of a worker; 0 = what one would take by itself here.
    """
    threads = threads or available_cores()
    torch.set_num_threads(threads)
    dispatch.set_num_threads(threads)
    model_dir = Path(resolve(model or DEFAULT_MODEL))
    progress("loading the model", 0.0)
    began = time.monotonic()
    loaded = load_model(model_dir)
    startup_s = time.monotonic() - began
    engine = DrivenEngine(loaded, model_dir, num_tokens=_ROOM, seed=seed)
    try:
        measured = Measured()
        _warm_up(engine)
        rounds = 0
        while not rounds or time.monotonic() - began < budget_s:
            progress("measuring rounds", min(1.0, (time.monotonic() - began) / budget_s))
            _round(engine, measured)
            rounds += 1
        worker = ProfiledWorker(
            name=model_dir.name,
            source=f"isthmus profile, {rounds} rounds, {threads} threads, {_machine()}",
            kv_blocks=_kv_blocks(engine, model_dir, kv_memory_bytes),
            startup_s=startup_s,
            network=Network(
                token_bytes=engine.layout.block_bytes // engine.layout.block_size,
                bytes_s=_copy_bytes_s(),
                latency_s=PolicyConfig().handoff_s,
            ),
        )
        return model_of(measured, worker)
    finally:
        engine.close()


def kv_bytes(model_dir: Path) -> int:
    """Return the memory that the KV of the measured work takes."""
    manifest = read_manifest(model_dir)
    layout = KvLayout(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
    return layout.blocks_for(_ROOM) * layout.block_bytes


def model_of(measured: Measured, worker: ProfiledWorker) -> PerformanceModel:
    """Fit a model to what was measured, and say how well it fits."""
    prompts, steps = measured.prompt_samples(), measured.step_samples()
    found = PerformanceModel(
        format=1,
        name=worker.name,
        source=worker.source,
        prefill=fit_prefill(prompts),
        decode=fit_decode(steps, WorkerSettings().max_num_seqs),
        chunk_tokens=max(1, round(statistics.median(measured.chunks))),
        kv_blocks=worker.kv_blocks,
        startup_s=worker.startup_s,
        network=worker.network,
    )
    prompt_errors = [
        abs(found.prefill_s(s.uncached_tokens, s.cached_tokens) / s.seconds - 1) for s in prompts
    ]
    step_errors = [
        abs(found.decode_s(s.num_answers, s.resident_tokens) / s.seconds - 1) for s in steps
    ]
    return found.model_copy(update={"fit": quality(prompt_errors, step_errors)})


def _warm_up(engine: DrivenEngine) -> None:
    """Touch all memory that is measured, and let the engine learn how large its chunks may be."""
    for _ in range(2):
        engine.prefill(PROMPTS[-1] // 2)
    engine.decode(BATCHES[-1], DECODE_CONTEXTS[0], STEPS)


def _round(engine: DrivenEngine, measured: Measured) -> None:
    for context in CONTEXTS:
        for num_tokens in PROMPTS:
            spent = engine.prefill(num_tokens, after=context)
            measured.prompts.setdefault((num_tokens, context), []).append(spent.turn_s)
            if num_tokens == max(PROMPTS):
                measured.chunks.append(num_tokens / spent.num_turns)
    for batch in BATCHES:
        for context in DECODE_CONTEXTS:
            if batch * (context + STEPS) <= MAX_RESIDENT:
                spent = engine.decode(batch, context, STEPS)
                measured.steps.setdefault((batch, context), []).append(spent.turn_s / STEPS)


def _kv_blocks(engine: DrivenEngine, model_dir: Path, kv_memory_bytes: int) -> int:
    plan = plan_memory(
        engine.layout,
        num_blocks=0,
        kv_memory_bytes=kv_memory_bytes,
        available_bytes=psutil.virtual_memory().available,
        max_model_len=0,
        context_length=read_manifest(model_dir).context_length,
    )
    return plan.num_blocks


def _copy_bytes_s() -> float:
    """Measure copying memory: between workers of one host KV crosses like that."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    sink = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        sink.copy_(source)
        times.append(time.perf_counter() - began)
    return _COPY_BYTES / statistics.median(times)


def _machine() -> str:
    here = machine()
    return f"{here.cpu}, {here.cores} cores, {here.memory_gib} GiB, Python {here.python}"


def table(found: PerformanceModel) -> Sequence[str]:
    """Write the formulas and how well they fit."""
    prefill, decode, fit = found.prefill, found.decode, found.fit
    assert fit is not None, "a measured model says how well it fits"
    return (
        f"{found.name}: {found.source}",
        f"a prompt: {prefill.fixed_s * 1e3:.2f} ms + {prefill.token_s * 1e3:.4f} ms a token + "
        f"{prefill.context_s * 1e9:.3f} ns a token and token before it",
        f"  off by {fit.prefill_p50:.1%} (median), {fit.prefill_max:.1%} (worst)",
        f"a step: {decode.fixed_s * 1e3:.2f} ms + {decode.request_s * 1e3:.3f} ms an answer + "
        f"{decode.token_s * 1e6:.4f} us a token of KV",
        f"  off by {fit.decode_p50:.1%} (median), {fit.decode_max:.1%} (worst)",
        f"chunks of {found.chunk_tokens} tokens, {found.decode.max_batch} answers at once, "
        f"{found.kv_blocks} KV blocks, starts in {found.startup_s:.1f} s",
    )
