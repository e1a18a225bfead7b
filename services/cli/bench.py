"""`isthmus bench`: measurements with bars; one JSON object each, exit 1 when a bar is missed."""

from __future__ import annotations

import os
from typing import Annotated

import typer

MAX_BLOCKS = 4096  # 1.4 GiB a pool, and there are five of them

app = typer.Typer(help="Measure a cluster on this machine.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure a cluster on this machine."""


@app.command("smoke")
def smoke(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Requests per arm.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
) -> int:
    """Two pools beside one worker: TTFT, ITL, tokens a second, handoff."""
    from services.bench.smoke import run

    result = run(model, pairs=pairs, prompt_tokens=prompt_tokens, seed=seed)
    typer.echo(result.to_json())
    return result.exit_code


@app.command("engine")
def engine(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Times each case is measured.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = one per core.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    transformers: Annotated[
        bool, typer.Option(help="Measure Hugging Face transformers too, if installed.")
    ] = True,
) -> int:
    """One worker's engine in one process: decode and prefill beside what the machine can do."""
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.engine import run

    result = run(model, rounds=rounds, threads=threads, seed=seed, with_transformers=transformers)
    typer.echo(result.to_json())
    return result.exit_code


@app.command("handoff")
def handoff(
    blocks: Annotated[str, typer.Option(help="Numbers of blocks, with commas.")] = "1,16,64,1024",
    rounds: Annotated[int, typer.Option(min=1, help="Times each case is measured.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of content and block numbers.")] = 0,
    json_: Annotated[
        bool, typer.Option("--json/--table", help="One JSON object, or the bars to read.")
    ] = True,
) -> int:
    """KV from process to process on every plane, beside memcpy of the same blocks."""
    numbers = [part.strip() for part in blocks.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= MAX_BLOCKS for part in numbers):
        raise typer.BadParameter(f"numbers from 1 to {MAX_BLOCKS}, with commas")
    from services.bench.handoff import run

    result = run([int(part) for part in numbers], rounds=rounds, seed=seed)
    if json_:
        typer.echo(result.to_json())
    else:
        for bar in result.bars:
            verdict = "pass" if bar.is_met else "FAIL"
            typer.echo(f"{verdict}  {bar.name}: {bar.value:g} {bar.sense} {bar.bar:g}")
    return result.exit_code


@app.command("attach")
def attach(
    blocks: Annotated[str, typer.Option(help="Numbers of blocks, with commas.")] = "1,16,64,1024",
    rounds: Annotated[int, typer.Option(min=1, help="Times each case is measured.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of content and block numbers.")] = 0,
) -> int:
    """Handoffs read in place beside handoffs copied over memfd, and what moving later costs."""
    numbers = [part.strip() for part in blocks.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= MAX_BLOCKS for part in numbers):
        raise typer.BadParameter(f"numbers from 1 to {MAX_BLOCKS}, with commas")
    from services.bench.attach import run

    result = run([int(part) for part in numbers], rounds=rounds, seed=seed)
    typer.echo(result.to_json())
    return result.exit_code


@app.command("second-token")
def second_token(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts, with commas.")
    ] = "512,1024,2048",
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each length.")] = 8,
    dtype: Annotated[str, typer.Option(help="Weights and KV: float32 or bfloat16.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
) -> int:
    """What a handoff adds to the second token: pairs of two pools and one worker, and stages."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("dtype is float32 or bfloat16")
    lengths = [part.strip() for part in prompt_tokens.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in lengths):
        raise typer.BadParameter("numbers from 1, with commas")
    from services.bench.second_token import run

    result = run(model, [int(part) for part in lengths], rounds=rounds, dtype=dtype, seed=seed)
    typer.echo(result.to_json())
    return result.exit_code


@app.command("wire")
def wire(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts, side by side.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Length of each prompt.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="Stored KV: float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = one per core.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
) -> int:
    """Error of each wire dtype on a real model: KL of the logits, agreement of greedy tokens."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("dtype is float32 or bfloat16")
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.wire import Setup, run

    setup = Setup(prompts, prompt_tokens, answer_tokens, seed)
    result = run(model, setup, dtype=dtype, threads=threads)
    typer.echo(result.to_json())
    return result.exit_code


@app.command("cancel")
def cancel(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    cancels: Annotated[int, typer.Option(min=2, help="Requests cancelled one by one.")] = 40,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of each prompt.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and moments.")] = 0,
) -> int:
    """From a cancel to free blocks on both sides, read over the wire; also with messages lost."""
    from services.bench.cancel import run

    result = run(model, cancels=cancels, prompt_tokens=prompt_tokens, seed=seed)
    typer.echo(result.to_json())
    return result.exit_code
