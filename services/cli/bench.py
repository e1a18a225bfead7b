"""`isthmus bench`: measurements with bars; one JSON object each, exit 1 when a bar is missed."""

from __future__ import annotations

from typing import Annotated

import typer

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
