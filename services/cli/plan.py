"""`isthmus plan`: how many workers meet an SLO at the least cost, in two pools and in one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, loads
from services.cli.plan_view import sizing_json, sizing_lines
from services.cli.progress import Progress
from services.common.wording import counted

if TYPE_CHECKING:
    from services.models.config import ModelConfig
    from services.sim.memory import WorkerMemory, WorkerShape
    from services.sim.performance import PerformanceModel
    from services.sim.trials import Run
    from services.sim.windows import Runs

_GIB = 1 << 30


def plan(
    trace: loads.Trace = None,
    workload: loads.Described = "",
    slo_ttft: loads.SloTtft = 2.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0.0001, max=3_600, help="Limit of the mean gap after it, seconds.")
    ] = 0.05,
    attain: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Share of requests that keep both.")
    ] = 0.95,
    model_file: loads.ModelFile = None,
    prices: Annotated[
        Path | None, typer.Option(help="Prices; what is left out is as in loadtest/cost.yaml.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="A model's directory or config.json, for --memory-gib."),
    ] = None,
    memory_gib: Annotated[
        float, typer.Option(min=0, max=1 << 20, help="Memory of a worker; KV takes what is left.")
    ] = 0.0,
    weights: Annotated[
        str, typer.Option(help="Weights in that memory: float32, bfloat16, int8, int4.")
    ] = "bfloat16",
    speedup: loads.Speedup = 1.0,
    requests: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="Requests of one run.")
    ] = 1_500,
    runs: Annotated[
        int, typer.Option(min=1, max=20, help="Runs to choose by, and as many to check.")
    ] = 5,
    max_workers: Annotated[
        int, typer.Option(min=1, max=4_096, help="Workers of a pool, at most.")
    ] = 64,
    budget_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Time after which no more sizes are tried.")
    ] = 600.0,
    seed: loads.DrawSeed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Size a cluster for an SLO: two pools, the one-pool alternative, and what each costs."""
    from services.common.clock import SystemClock
    from services.sim.performance import default_model, read_model
    from services.sim.prices import Prices, read_prices
    from services.sim.sizing import Question, size_cluster
    from services.sim.trials import Slo

    if (trace is None) == (not workload):
        raise typer.BadParameter("give --trace or --workload")
    performance = default_model() if model_file is None else read_model(model_file)
    performance, memory = _with_memory(performance, model, memory_gib, weights)
    chosen_by, checked_by = (
        _drawn(workload, requests, runs, seed)
        if trace is None
        else _traced(trace, speedup, requests, runs, seed)
    )
    _check_enough(chosen_by, attain)
    question = Question(
        chosen_by, checked_by, Slo(slo_ttft, slo_tpot, attain), performance,
        Prices() if prices is None else read_prices(prices), max_workers,
    )  # fmt: skip
    progress = Progress()
    sizing = size_cluster(question, SystemClock(), budget_s=budget_s, tell=progress)
    progress.done()
    if as_json:
        told = sizing_json(question, sizing, memory)
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(sizing_lines(question, sizing, memory)))
    return exits.OK if sizing.two_pools or sizing.one_pool else exits.FAILED


def _check_enough(runs: Sequence[Run], attain: float) -> None:
    """Refuse a load of so few requests that no cluster whatever could be seen to keep the SLO."""
    from services.common.errors import ConfigError
    from services.common.shares import wilson_bounds
    from services.sim.trials import CONFIDENCE

    number = sum(len(run.workload.arrivals) for run in runs)
    if wilson_bounds(number, number, CONFIDENCE)[0] < attain:
        raise ConfigError(
            f"a load of {counted(number, 'request')} is too short: if all were good, that would "
            f"not show that {attain:.1%} are"
        )


def _with_memory(
    performance: PerformanceModel, model: Path | None, memory_gib: float, weights: str
) -> tuple[PerformanceModel, WorkerMemory | None]:
    """Give workers as much KV as fits their memory beside the model, where both are known."""
    if (model is None) != (not memory_gib):
        raise typer.BadParameter("--model and --memory-gib go together")
    from services.common.errors import ConfigError
    from services.sim.memory import WEIGHT_TYPES, worker_memory

    if weights not in WEIGHT_TYPES:
        raise typer.BadParameter(f"--weights {weights!r}: one of {', '.join(WEIGHT_TYPES)}")
    if model is None:
        return performance, None
    memory = worker_memory(_read_config(model), _shape(performance, weights))
    blocks = memory.blocks_in(int(memory_gib * _GIB))
    if not blocks:
        raise ConfigError(
            f"{memory_gib:g} GiB hold no KV: weights, activations and the process need "
            f"{memory.fixed_bytes / _GIB:.2f} GiB"
        )
    return performance.model_copy(update={"kv_blocks": blocks}), memory


def _shape(performance: PerformanceModel, weights: str) -> WorkerShape:
    from services.sim.memory import WorkerShape

    kv_dtype = "float32" if weights == "float32" else "bfloat16"
    tokens, answers = performance.chunk_tokens, performance.decode.max_batch
    return WorkerShape(weights, kv_dtype, tokens, answers, is_cpu=weights == "float32")


def _read_config(model: Path) -> ModelConfig:
    from services.models.config import ModelConfig
    from services.models.resolved import CONFIG_NAME, read_json

    return ModelConfig.from_hf(read_json(model / CONFIG_NAME if model.is_dir() else model))


def _traced(trace: Path, speedup: float, requests: int, runs: int, seed: int) -> Runs:
    from services.sim.windows import runs_of_trace

    return runs_of_trace(loads.traced_load(trace, speedup), requests, runs, seed)


def _drawn(text: str, requests: int, runs: int, seed: int) -> Runs:
    from services.sim.windows import drawn_runs

    return drawn_runs(loads.described_load(text), requests, runs, seed)
