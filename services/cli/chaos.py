"""`isthmus chaos`: faults on purpose, and a judgement; one JSON object, exit 1 on any finding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import settings
from services.cli.measured_model import prepare_model
from services.cli.outcome import show_result
from services.cli.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.bench.result import BenchResult
    from services.chaos.transfers import Campaign

app = typer.Typer(help="Break a cluster on purpose and look for damage.", no_args_is_help=True)

MAX_FAULTS = 1_000_000
MAX_TRANSFERS = 100_000_000
MAX_JOBS = 1_024
MAX_SECONDS = 86_400.0
MAX_ROUNDS = 10_000
MAX_REQUESTS = 1_000_000

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
    faults: Annotated[int, typer.Option(min=1, max=MAX_FAULTS, help="Faults to inject.")] = 100,
    model: Annotated[
        str, typer.Option(help="Name, directory or .gguf file; default: scripted workers.")
    ] = "",
    planes: Annotated[
        str,
        typer.Option(
            help="Planes of every worker, with commas; default: transfer.planes where it is set,"
            " else a mix, so that every kind of pair occurs."
        ),
    ] = "",
    json: Json = False,
) -> int:
    """Kill, freeze and cut off the workers of a real cluster in the middle of handoffs."""
    allowed = _planes(planes)
    from services.chaos.handoff import MODEL_PROMPT, PROBE_TOKENS, run, usual_campaign

    directory = prepare_model(model, MODEL_PROMPT + PROBE_TOKENS) if model else ""
    return _judge(partial(run, usual_campaign(seed, faults, directory, allowed)), json)


@app.command("router")
def router(
    seed: Annotated[
        int,
        typer.Option(min=0, help="Same seed, same plan of faults; what they meet is up to timing."),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=MAX_SECONDS,
            help="How long to attack at least; every process has every fault once anyhow.",
        ),
    ] = 60.0,
    json: Json = False,
) -> int:
    """Kill, freeze and restart every process of a cluster in turn; no client may notice."""
    from services.chaos.router import RouterCampaign, run

    return _judge(partial(run, RouterCampaign(seed, seconds)), json)


@app.command("rolling")
def rolling(
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, max=MAX_ROUNDS, help="Restarts of every router.")
    ] = 5,
    json: Json = False,
) -> int:
    """Restart the routers of a cluster one after the other under load; nothing may be lost."""
    from services.chaos.rolling import RollingPlan, run

    return _judge(partial(run, RollingPlan(seed, rounds)), json)


@app.command("scale")
def scale(
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, max=MAX_ROUNDS, help="Times both pools grow and shrink.")
    ] = 20,
    json: Json = False,
) -> int:
    """Resize both pools 2-4-2 under load by the autoscaler; no client may notice."""
    from services.chaos.scale import ScalePlan, run

    return _judge(partial(run, ScalePlan(seed, rounds)), json)


@app.command("store")
def store(
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests and faults.")] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, max=MAX_ROUNDS, help="Times the store is hurt in each way.")
    ] = 3,
    json: Json = False,
) -> int:
    """Hurt the store of a cluster in every way under load; no request may fail for it."""
    from services.chaos.store import StorePlan, run

    return _judge(partial(run, StorePlan(seed, rounds)), json)


@app.command("hedging")
def hedging(
    seed: Seed = 0,
    requests: Annotated[
        int, typer.Option(min=1, max=MAX_REQUESTS, help="Without, and then with second prefills.")
    ] = 800,
    json: Json = False,
) -> int:
    """Let a prefill worker stall now and then, without and with a second prefill elsewhere."""
    from services.chaos.hedging import HedgingPlan, run

    return _judge(partial(run, HedgingPlan(seed, requests)), json)


@app.command("transfers")
def transfers(
    num: Annotated[int, typer.Option(min=1, max=MAX_TRANSFERS, help="Transfers to play.")] = 10_000,
    seed: Seed = 0,
    log: Annotated[
        bool,
        typer.Option(
            help="Play the first run alone (100 transfers at most) and write every event."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, max=MAX_JOBS, help="Processes; 0 = one a core.")] = 0,
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

    progress = Progress()

    def show(num_done: int) -> None:
        _show(progress, "playing transfers", num_done / num, json)

    campaign = run_campaign(num, seed, show, jobs=jobs or available_cores())
    progress.done()
    for failed in campaign.failures:
        _tell(f"seed {failed.seed}: {failed.violation}\n  {failed.replay}", json)
    return show_result(_transfers_result(seed, campaign), progress)


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


def _planes(given: str) -> tuple[str, ...]:
    """Planes of the flag, else of the configuration; empty where neither says any."""
    config = settings.load(None, {"transfer.planes": given.split(",") if given else None})
    is_set = "planes" in config.transfer.model_fields_set
    planes = tuple(config.transfer.planes) if is_set else ()
    if planes == ("cuda_ipc",):
        raise typer.BadParameter("the workers' pools are on the CPU, where cuda_ipc is no plane")
    return planes


def _judge(campaign: Callable[[Callable[[str, float], None]], BenchResult], is_quiet: bool) -> int:
    """Run a campaign, tell how far it is, and print what it found."""
    progress = Progress()
    result = campaign(lambda step, share: _show(progress, step, share, is_quiet))
    return show_result(result, progress)


def _show(progress: Progress, step: str, share: float, is_quiet: bool) -> None:
    if not is_quiet:
        progress(step, share)


def _tell(line: str, is_quiet: bool) -> None:
    if not is_quiet:
        typer.echo(line, err=True)
