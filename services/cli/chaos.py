"""`isthmus chaos`: faults on purpose, and a judgement; one JSON object, exit 1 on any finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.outcome import show_result

if TYPE_CHECKING:
    from services.bench.result import BenchResult
    from services.chaos.transfers import Campaign

app = typer.Typer(help="Break a cluster on purpose and look for damage.", no_args_is_help=True)

Seed = Annotated[int, typer.Option(min=0, help="Same seed, same run.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON object and nothing else.")]


@app.callback()
def group() -> None:
    """Break a cluster on purpose and look for damage."""


@app.command("handoff")
def handoff(
    seed: Annotated[
        int,
        typer.Option(min=0, help="Same seed, same plan of faults; what they meet is up to timing."),
    ] = 0,
    faults: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 100,
    model: Annotated[
        str, typer.Option(help="Name, directory or .gguf file; default: scripted workers.")
    ] = "",
    json: Json = False,
) -> int:
    """Kill, freeze and cut off the workers of a real cluster in the middle of handoffs."""
    from services.chaos.handoff import run, usual_campaign

    result = run(usual_campaign(seed, faults, model), lambda line: _tell(line, json))
    return show_result(result)


@app.command("transfers")
def transfers(
    num: Annotated[int, typer.Option(min=1, help="Transfers to play.")] = 10_000,
    seed: Seed = 0,
    log: Annotated[
        bool,
        typer.Option(
            help="Play the first run alone (100 transfers at most) and write every event."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 = one a core.")] = 0,
    json: Json = False,
) -> int:
    """Play transfers in a simulated network and look for broken promises."""
    from services.chaos.transfers import run_campaign

    if log:
        from services.chaos.transfer_sim import TRANSFERS_A_RUN, run_seed

        report = run_seed(seed, min(num, TRANSFERS_A_RUN), record=True)
        typer.echo("\n".join((*report.log, f"violation: {report.violation}")))
        return 0 if report.violation is None else 1
    from services.runtime.threads import available_cores

    campaign = run_campaign(num, seed, jobs=jobs or available_cores())
    for failed in campaign.failures:
        _tell(f"seed {failed.seed}: {failed.violation}\n  {failed.replay}", json)
    return show_result(_transfers_result(seed, campaign))


def _transfers_result(seed: int, campaign: Campaign) -> BenchResult:
    from services.bench.result import Bar, BenchResult

    result = BenchResult("chaos transfers")
    result.figures = {
        "seed": seed,
        "transfers": campaign.num_transfers,
        "runs": campaign.num_runs,
        "events": campaign.num_events,
        "transfers_per_cpu_s": round(campaign.transfers_per_cpu_s, 1),
        **dict(sorted(campaign.stats.items())),
        **{f"failed_{i}": failed.replay for i, failed in enumerate(campaign.failures)},
    }
    result.bars = [Bar("failed_runs", len(campaign.failures), 0, "==")]
    return result


def _tell(line: str, is_quiet: bool) -> None:
    if not is_quiet:
        typer.echo(line, err=True)
