"""`isthmus chaos`: faults on purpose, and a judgement; one JSON object, exit 1 on any finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.bench.result import BenchResult

app = typer.Typer(help="Break a cluster on purpose and look for damage.", no_args_is_help=True)

Seed = Annotated[int, typer.Option(min=0, help="Same seed, same run.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON object and nothing else.")]


@app.callback()
def group() -> None:
    """Break a cluster on purpose and look for damage."""


@app.command("handoff")
def handoff(
    seed: Seed = 0,
    faults: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 100,
    model: Annotated[
        str, typer.Option(help="Name, directory or .gguf file; default: scripted workers.")
    ] = "",
    json: Json = False,
) -> int:
    """Kill, freeze and cut off the workers of a real cluster in the middle of handoffs."""
    from services.chaos.handoff import run, usual_campaign

    result = run(usual_campaign(seed, faults, model), lambda line: _tell(line, json))
    return _show(result)


def _tell(line: str, is_quiet: bool) -> None:
    if not is_quiet:
        typer.echo(line, err=True)


def _show(result: BenchResult) -> int:
    typer.echo(result.to_json())
    return result.exit_code
