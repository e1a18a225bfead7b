"""`isthmus bench`: measurements with bars; one JSON object each, exit 1 when a bar is missed."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from services.cli.outcome import show_result

MAX_BLOCKS = 4096  # 1.4 GiB a pool, and there are five of them

app = typer.Typer(help="Measure a cluster on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Name, directory or .gguf file.")]
Blocks = Annotated[str, typer.Option(help="Numbers of blocks, with commas.")]
Cases = Annotated[int, typer.Option(min=1, help="Times each case is measured.")]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads; 0 = one per core.")]
PromptSeed = Annotated[int, typer.Option(min=0, help="Seed of the prompts.")]
BlockSeed = Annotated[int, typer.Option(min=0, help="Seed of content and block numbers.")]


@app.callback()
def group() -> None:
    """Measure a cluster on this machine."""


@app.command("smoke")
def smoke(
    model: Model = "",
    pairs: Annotated[int, typer.Option(min=1, help="Requests per arm.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    seed: PromptSeed = 0,
) -> int:
    """Two pools beside one worker: TTFT, ITL, tokens a second, handoff."""
    from services.bench.smoke import run

    return show_result(run(model, pairs=pairs, prompt_tokens=prompt_tokens, seed=seed))


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
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.engine import run

    return show_result(
        run(model, rounds=rounds, threads=threads, seed=seed, with_transformers=transformers)
    )


@app.command("handoff")
def handoff(
    blocks: Blocks = "1,16,64,1024",
    rounds: Cases = 40,
    seed: BlockSeed = 0,
    json_: Annotated[
        bool, typer.Option("--json/--table", help="One JSON object, or the bars to read.")
    ] = True,
) -> int:
    """KV from process to process on every plane, beside memcpy of the same blocks."""
    numbers = _numbers(blocks, MAX_BLOCKS)
    from services.bench.handoff import run

    result = run(numbers, rounds=rounds, seed=seed)
    if json_:
        typer.echo(result.to_json())
    else:
        for bar in result.bars:
            verdict = "pass" if bar.is_met else "FAIL"
            typer.echo(f"{verdict}  {bar.name}: {bar.value:g} {bar.sense} {bar.bar:g}")
    return result.exit_code


@app.command("attach")
def attach(
    blocks: Blocks = "1,16,64,1024",
    rounds: Cases = 40,
    seed: BlockSeed = 0,
) -> int:
    """Handoffs read in place beside handoffs copied over memfd, and what moving later costs."""
    numbers = _numbers(blocks, MAX_BLOCKS)
    from services.bench.attach import run

    return show_result(run(numbers, rounds=rounds, seed=seed))


@app.command("second-token")
def second_token(
    model: Model = "",
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts, with commas.")
    ] = "512,1024,2048",
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each length.")] = 8,
    dtype: Annotated[str, typer.Option(help="Weights and KV: float32 or bfloat16.")] = "bfloat16",
    seed: PromptSeed = 0,
) -> int:
    """What a handoff adds to the second token: pairs of two pools and one worker, and stages."""
    _check_dtype(dtype)
    lengths = _numbers(prompt_tokens)
    from services.bench.second_token import run

    return show_result(run(model, lengths, rounds=rounds, dtype=dtype, seed=seed))


@app.command("wire")
def wire(
    model: Model = "",
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts, side by side.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Length of each prompt.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="Stored KV: float32 or bfloat16.")] = "float32",
    threads: Threads = 0,
    seed: PromptSeed = 0,
) -> int:
    """Error of each wire dtype on a real model: KL of the logits, agreement of greedy tokens."""
    _check_dtype(dtype)
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.wire import Setup, run

    setup = Setup(prompts, prompt_tokens, answer_tokens, seed)
    return show_result(run(model, setup, dtype=dtype, threads=threads))


@app.command("cancel")
def cancel(
    model: Model = "",
    cancels: Annotated[int, typer.Option(min=2, help="Requests cancelled one by one.")] = 40,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of each prompt.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and moments.")] = 0,
) -> int:
    """From a cancel to free blocks on both sides, read over the wire; also with messages lost."""
    from services.bench.cancel import run

    return show_result(run(model, cancels=cancels, prompt_tokens=prompt_tokens, seed=seed))


def _numbers(text: str, most: int | None = None) -> list[int]:
    """Read numbers from 1 to `most`, with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdigit()]
    is_bounded = all(number > 0 and (most is None or number <= most) for number in numbers)
    if len(numbers) != len(parts) or not is_bounded:
        bound = "" if most is None else f" to {most}"
        raise typer.BadParameter(f"numbers from 1{bound}, with commas")
    return numbers


def _check_dtype(dtype: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("dtype is float32 or bfloat16")
