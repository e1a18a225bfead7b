"""`isthmus bench`: measurements with bars; one JSON object each, exit 1 when a bar is missed.

What can be known to be impossible is refused before anything starts: a model that is not there,
requests that do not fit it, memory this machine does not have.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.measured_model import check_length, check_memory, prepare_model
from services.cli.outcome import show_result
from services.cli.progress import Progress

if TYPE_CHECKING:
    from services.bench.result import BenchResult

MAX_BLOCKS = 4096  # 1.4 GiB a pool
MAX_TIMES = 10_000  # that anything is measured; more would take days
MAX_PROMPT_TOKENS = 1 << 20
MAX_ROUTERS = 64
MAX_THREADS = 1024  # as of a worker
_NUMBER_DIGITS = 9
_SIM_TOKENS = 2048 + 96  # of the longest request

app = typer.Typer(help="Measure a cluster on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Name, directory or .gguf file.")]
Blocks = Annotated[str, typer.Option(help="Numbers of blocks, with commas.")]
Cases = Annotated[int, typer.Option(min=1, max=MAX_TIMES, help="Times each case is measured.")]
Threads = Annotated[
    int, typer.Option(min=0, max=MAX_THREADS, help="Compute threads; 0 = one per core.")
]
PromptSeed = Annotated[int, typer.Option(min=0, help="Seed of the prompts.")]
BlockSeed = Annotated[int, typer.Option(min=0, help="Seed of content and block numbers.")]
Json = Annotated[bool, typer.Option("--json/--table", help="One JSON object, or the bars to read.")]


@app.callback()
def group() -> None:
    """Measure a cluster on this machine."""


@app.command("smoke")
def smoke(
    model: Model = "",
    pairs: Annotated[int, typer.Option(min=1, max=MAX_TIMES, help="Requests per arm.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_PROMPT_TOKENS, help="Length of each prompt.")
    ] = 512,
    seed: PromptSeed = 0,
) -> int:
    """Two pools beside one worker: TTFT, ITL, tokens a second, handoff."""
    from services.bench.smoke import LOAD_TOKENS, MAX_TOKENS, run

    directory = prepare_model(model, max(prompt_tokens, LOAD_TOKENS) + MAX_TOKENS)
    progress = Progress()
    return show_result(
        run(directory, pairs=pairs, prompt_tokens=prompt_tokens, seed=seed, progress=progress),
        progress,
    )


@app.command("engine")
def engine(
    model: Model = "",
    rounds: Cases = 3,
    threads: Threads = 0,
    seed: PromptSeed = 0,
    transformers: Annotated[
        bool, typer.Option(help="Measure Hugging Face transformers too, if installed.")
    ] = True,
) -> int:
    """One worker's engine in one process: decode and prefill beside what the machine can do."""
    directory, progress = prepare_model(model), Progress()
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.engine import LONGEST, run

    check_length(directory, LONGEST)
    result = run(
        directory,
        rounds=rounds,
        threads=threads,
        seed=seed,
        with_transformers=transformers,
        progress=progress,
    )
    return show_result(result, progress)


@app.command("handoff")
def handoff(
    blocks: Blocks = "1,16,64,1024",
    rounds: Cases = 40,
    seed: BlockSeed = 0,
    json_: Json = True,
) -> int:
    """KV from process to process on every plane, beside memcpy of the same blocks."""
    numbers = _numbers(blocks, MAX_BLOCKS)
    from services.bench.handoff import memory_bytes, run

    check_memory(memory_bytes(max(numbers)), "give fewer --blocks")
    progress = Progress()
    result = run(numbers, rounds=rounds, seed=seed, progress=progress)
    return _show(result, progress, as_json=json_)


@app.command("registry")
def registry(
    hints: Annotated[int, typer.Option(min=1000, help="Hints published.")] = 200_000,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Decisions of each kind.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hashes.")] = 0,
    server: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Another store's program: redis-server."),
    ] = None,
) -> int:
    """Memory of a hint, publishing, and a decision in the store beside PING."""
    from services.bench.registry import run

    progress = Progress()
    return show_result(run(hints, rounds, seed, server), progress)


@app.command("policy")
def policy(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="A request trace as Mooncake published them, .jsonl or .gz."),
    ] = None,
    synthetic_groups: Annotated[
        bool, typer.Option("--synthetic-groups", help="Users in groups, at several rates.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="All policies, on groups and on every --trace given.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --whole: print a table after the figures.")
    ] = False,
    policy_: Annotated[
        str, typer.Option("--policy", help="One of them; all and their bars if left out.")
    ] = "",
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 8,
    model_file: Annotated[
        Path | None,
        typer.Option(help="Performance model, JSON; the one that comes with isthmus if left out."),
    ] = None,
    cache_blocks: Annotated[
        int,
        typer.Option(min=0, max=1_000_000, help="Blocks of 512 tokens of a worker; 0 = its own."),
    ] = 0,
    routers: Annotated[
        str, typer.Option(help="Router replicas; numbers with commas but for a single --trace.")
    ] = "1",
    speedup: Annotated[
        float, typer.Option(min=0.01, max=1000, help="How much faster than traced prompts arrive.")
    ] = 1.0,
    hint_lag_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="From a change of a cache to its hints.")
    ] = 10.0,
    hint_loss: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of publishes that never arrive.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
    json_: Json = True,
) -> int:
    """Policies of placement on the same simulated workers: hits, balance, first tokens in time."""
    from services.bench.policy import as_markdown, chosen_policies, run_groups, run_table, run_trace
    from services.kv.layout import BLOCK_TOKENS
    from services.sim.cluster import ClusterSpec
    from services.sim.performance import default_model, read_model
    from services.sim.placement import POLICIES

    traces = trace or []
    if not whole and (len(traces), synthetic_groups) not in ((1, False), (0, True)):
        raise typer.BadParameter("give one --trace, or --synthetic-groups, or --whole")
    if policy_ and policy_ not in POLICIES:
        raise typer.BadParameter(f"{policy_!r}: one of {', '.join(POLICIES)}")
    if whole and (policy_ or synthetic_groups):
        raise typer.BadParameter("--whole runs all policies, and the groups too")
    if markdown and not whole:
        raise typer.BadParameter("--markdown needs --whole")
    counts, progress = _numbers(routers, MAX_ROUTERS), Progress()
    model = read_model(model_file) if model_file else default_model()
    if cache_blocks:
        model = model.model_copy(update={"kv_blocks": cache_blocks * 512 // BLOCK_TOKENS})
    spec = ClusterSpec(
        num_prefill=prefill,
        num_routers=counts[0],
        model=model,
        hint_lag_s=hint_lag_ms / 1000,
        hint_loss=hint_loss,
    )
    if whole:
        result = run_table(traces, spec, counts, speedup=speedup, seed=seed, tell=progress)
        code = _show(result, progress, as_json=json_)
        if markdown:
            typer.echo(as_markdown(result))
        return code
    if not traces:
        result = run_groups(spec, counts, chosen_policies(policy_), seed, progress)
        return _show(result, progress, as_json=json_)
    if len(counts) != 1:
        raise typer.BadParameter("a single trace is replayed by one number of --routers")
    policies = chosen_policies(policy_)
    result = run_trace(traces[0], spec, policies, speedup=speedup, seed=seed, tell=progress)
    return _show(result, progress, as_json=json_)


@app.command("attach")
def attach(
    blocks: Blocks = "1,16,64,1024",
    rounds: Cases = 40,
    seed: BlockSeed = 0,
) -> int:
    """Handoffs read in place beside handoffs copied over memfd, and what moving later costs."""
    numbers = _numbers(blocks, MAX_BLOCKS)
    from services.bench.attach import memory_bytes, run

    check_memory(memory_bytes(max(numbers)), "give fewer --blocks")
    progress = Progress()
    return show_result(run(numbers, rounds=rounds, seed=seed, progress=progress), progress)


@app.command("second-token")
def second_token(
    model: Model = "",
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts, with commas.")
    ] = "512,1024,2048",
    rounds: Annotated[int, typer.Option(min=1, max=MAX_TIMES, help="Pairs of each length.")] = 8,
    dtype: Annotated[str, typer.Option(help="Weights and KV: float32 or bfloat16.")] = "bfloat16",
    seed: PromptSeed = 0,
) -> int:
    """What a handoff adds to the second token: pairs of two pools and one worker, and stages."""
    _check_dtype(dtype)
    lengths = _numbers(prompt_tokens, MAX_PROMPT_TOKENS)
    from services.bench.second_token import MAX_TOKENS, run

    directory, progress = prepare_model(model, max(lengths) + MAX_TOKENS), Progress()
    result = run(directory, lengths, rounds=rounds, dtype=dtype, seed=seed, progress=progress)
    return show_result(result, progress)


@app.command("wire")
def wire(
    model: Model = "",
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts, side by side.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(min=16, max=MAX_PROMPT_TOKENS, help="Length of each prompt.")
    ] = 256,
    answer_tokens: Annotated[
        int, typer.Option(min=2, max=MAX_PROMPT_TOKENS, help="Length of each answer.")
    ] = 64,
    dtype: Annotated[str, typer.Option(help="Stored KV: float32 or bfloat16.")] = "float32",
    threads: Threads = 0,
    seed: PromptSeed = 0,
) -> int:
    """Error of each wire dtype on a real model: KL of the logits, agreement of greedy tokens."""
    _check_dtype(dtype)
    directory, progress = prepare_model(model, prompt_tokens + answer_tokens), Progress()
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.wire import Setup, memory_bytes, run

    setup = Setup(prompts, prompt_tokens, answer_tokens, seed)
    check_memory(memory_bytes(directory, setup, dtype), "ask for fewer or shorter prompts")
    result = run(directory, setup, dtype=dtype, threads=threads, progress=progress)
    return show_result(result, progress)


@app.command("cancel")
def cancel(
    model: Model = "",
    cancels: Annotated[
        int, typer.Option(min=2, max=MAX_TIMES, help="Requests cancelled one by one.")
    ] = 40,
    prompt_tokens: Annotated[
        int, typer.Option(min=64, max=MAX_PROMPT_TOKENS, help="Length of each prompt.")
    ] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and moments.")] = 0,
) -> int:
    """From a cancel to free blocks on both sides, read over the wire; also with messages lost."""
    from services.bench.cancel import ANSWER_TOKENS, run

    directory, progress = prepare_model(model, prompt_tokens + ANSWER_TOKENS), Progress()
    result = run(
        directory, cancels=cancels, prompt_tokens=prompt_tokens, seed=seed, progress=progress
    )
    return show_result(result, progress)


@app.command("router")
def router(
    cases: Annotated[
        str, typer.Option(help="Of idle, requests, text, long, grpc, sse and rss, with commas.")
    ] = "idle,requests,text,long,grpc,sse",
    requests: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="Requests of one token each.")
    ] = 2_000,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Clients at once.")] = 64,
    stream_tokens: Annotated[
        int, typer.Option(min=2, max=MAX_TIMES, help="Length of each streamed answer.")
    ] = 1_024,
    rss_requests: Annotated[
        int, typer.Option(min=1000, max=10_000_000, help="Requests of the case rss.")
    ] = 60_000,
    seed: PromptSeed = 0,
    json_: Json = True,
) -> int:
    """A router on one core before simulated workers: added latency, requests and tokens a core."""
    from services.bench.router import CASES, RSS, Setup, run
    from services.chaos.scripted_model import SLIM, make_scripted_model

    wanted = tuple(case.strip() for case in cases.split(","))
    unknown = [case for case in wanted if case not in (*CASES, RSS)]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join((*CASES, RSS))}")
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-model-") as made:
        model_dir = make_scripted_model(Path(made) / "model", SLIM)
        setup = Setup(wanted, requests, rss_requests, clients, stream_tokens, seed)
        result = run(model_dir, setup, progress)
    return _show(result, progress, as_json=json_)


@app.command("overload")
def overload(
    seconds: Annotated[
        float,
        typer.Option(min=2, max=3600, help="Time of each load; the first fifth fills queues."),
    ] = 15,
    factor: Annotated[
        float, typer.Option(min=1.5, max=100, help="Times the capacity that is asked for.")
    ] = 3,
    slo_ttft_ms: Annotated[
        int, typer.Option(min=100, max=60_000, help="SLO the requests name.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and moments.")] = 0,
    json_: Json = True,
) -> int:
    """Goodput, refusals and TTFT at three times the capacity: scripted workers, one router core."""
    from services.chaos.overload import Setup, run

    progress = Progress()
    result = run(Setup(seconds, factor, slo_ttft_ms, seed), progress)
    return _show(result, progress, as_json=json_)


def _show(result: BenchResult, progress: Progress, *, as_json: bool) -> int:
    if as_json:
        return show_result(result, progress)
    progress.done()
    for bar in result.bars:
        verdict = "pass" if bar.is_met else "FAIL"
        typer.echo(f"{verdict}  {bar.name}: {bar.value:g} {bar.sense} {bar.bar:g}")
    return result.exit_code


@app.command("tenants")
def tenants(
    rounds: Annotated[int, typer.Option(min=50, max=MAX_TIMES, help="Prompts a kind.")] = 1000,
    prompt_tokens: Annotated[
        int, typer.Option(min=64, max=2048, help="Length of each prompt.")
    ] = 256,
    seed: PromptSeed = 0,
) -> int:
    """Whether a tenant can tell by the clock what another one has asked; scripted workers."""
    from services.bench.tenants import run
    from services.chaos.scripted_model import make_scripted_model

    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="isthmus-model-") as directory:
        model = make_scripted_model(Path(directory) / "model")
        result = run(
            model, rounds=rounds, prompt_tokens=prompt_tokens, seed=seed, progress=progress
        )
    return show_result(result, progress)


@app.command("sim")
def sim(
    seconds: Annotated[float, typer.Option(min=30, max=3600, help="Measured time.")] = 60,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Requests a second.")] = 8,
    model: Annotated[
        str, typer.Option(help="A real model instead of a scripted engine; needs --model-file.")
    ] = "",
    model_file: Annotated[
        Path | None,
        typer.Option(help="How fast that model is, by `isthmus profile`.", exists=True),
    ] = None,
    seed: PromptSeed = 0,
) -> int:
    """The simulator beside reality: one load on four worker processes and in virtual time."""
    from services.bench.sim_reality import Setup, run
    from services.chaos.scripted_model import make_scripted_model

    if model and model_file is None:
        raise typer.BadParameter("--model needs --model-file, which `isthmus profile` writes")
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="isthmus-model-") as directory:
        chosen = (
            prepare_model(model, _SIM_TOKENS)
            if model_file is not None
            else make_scripted_model(Path(directory) / "model")
        )
        setup = Setup(chosen, model_file, seconds, rate, seed)
        result = run(setup, progress)
    return show_result(result, progress)


@app.command("autoscaler")
def autoscaler(
    trace: Annotated[
        Path | None,
        typer.Option(help="A request trace as Azure published them, .csv or .gz, for more loads."),
    ] = None,
    loads: Annotated[
        str,
        typer.Option(
            help="Of sine, step, trace-fast and trace-dense; as many as can be, if empty."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
    json_: Json = True,
) -> int:
    """Sizes of pools by our decisions, a perfect forecast, HPA, KPA and a planner, simulated."""
    from services.bench.autoscaler import LOADS, as_table, run_loads
    from services.bench.autoscaler_cases import DRAWN, TRACED

    wanted = tuple(part.strip() for part in loads.split(",")) if loads else ()
    wanted = wanted or (DRAWN if trace is None else LOADS)
    unknown = [load for load in wanted if load not in LOADS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(LOADS)}")
    if trace is None and set(wanted) & set(TRACED):
        raise typer.BadParameter(f"{' and '.join(TRACED)} need a --trace")
    progress = Progress()
    result = run_loads(wanted, trace, seed, progress)
    code = _show(result, progress, as_json=json_)
    if not json_:
        typer.echo(as_table(result))
    return code


def _numbers(text: str, most: int) -> list[int]:
    """Read numbers from 1 to `most`, with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdecimal() and len(part) <= _NUMBER_DIGITS for part in parts):
        numbers = [int(part) for part in parts]
        if all(0 < number <= most for number in numbers):
            return numbers
    raise typer.BadParameter(f"{text!r}: numbers from 1 to {most}, with commas")


def _check_dtype(dtype: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("dtype is float32 or bfloat16")
