"""`isthmus sim`: a trace through a cluster that is not there, by the router's real decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, loads
from services.cli.progress import Progress
from services.cli.sim_view import report_json, report_lines, statistics_json, statistics_lines

if TYPE_CHECKING:
    from services.sim.cluster import ClusterSpec
    from services.sim.workload import Workload

_MAX_WORKERS = 4096
_MAX_ROUTERS = 64


def sim(
    trace: loads.Trace = None,
    workload: loads.Described = "",
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests of a --workload.")
    ] = 2_000,
    prefill: Annotated[int, typer.Option(min=0, max=_MAX_WORKERS, help="Prefill workers.")] = 0,
    decode: Annotated[int, typer.Option(min=0, max=_MAX_WORKERS, help="Decode workers.")] = 0,
    aggregated: Annotated[
        int, typer.Option(min=0, max=_MAX_WORKERS, help="Instead: workers that do both.")
    ] = 0,
    policy: Annotated[
        str, typer.Option(help="How prefill workers are chosen; `all` compares the policies.")
    ] = "ours",
    speedup: loads.Speedup = 1.0,
    seed: loads.DrawSeed = 0,
    routers: Annotated[int, typer.Option(min=1, max=_MAX_ROUTERS, help="Router replicas.")] = 1,
    model_file: loads.ModelFile = None,
    hint_lag_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="From a change of a cache to its hints.")
    ] = 10.0,
    hint_loss: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of publishes that never arrive.")
    ] = 0.0,
    slo_ttft: loads.SloTtft = 2.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0.0001, max=3_600, help="Limit of the mean gap after it, seconds.")
    ] = 0.05,
    stats: Annotated[
        bool, typer.Option("--stats", help="Only say what the load is like; simulate nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Simulate a cluster: hits, latencies, attainment and how busy its pools are."""
    from services.sim.simulate import simulate

    load = _load(trace, workload, requests, speedup, seed)
    if stats:
        return _show_statistics(load, as_json=as_json)
    policies = _policies(policy)
    spec = _spec(prefill, decode, aggregated, model_file, routers, hint_lag_ms, hint_loss)
    progress, reports = Progress(), {}
    for i, rule in enumerate(policies):
        progress(f"{load.name}: {rule}", i / len(policies))
        reports[rule] = simulate(load, spec, policy=rule, seed=seed)
    progress.done()
    if as_json:
        told = report_json(load, spec, reports, seed, slo_ttft, slo_tpot)
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(report_lines(load, spec, reports, slo_ttft, slo_tpot)))
    return exits.OK


def _load(trace: Path | None, workload: str, requests: int, speedup: float, seed: int) -> Workload:
    from services.sim.synthetic import plain_workload

    if (trace is None) == (not workload):
        raise typer.BadParameter("give --trace or --workload")
    if trace is not None:
        return loads.traced_load(trace, speedup)
    return plain_workload(loads.described_load(workload), requests, seed)


def _policies(name: str) -> tuple[str, ...]:
    from services.sim.placement import POLICIES

    if name == "all":
        return POLICIES
    if name not in POLICIES:
        raise typer.BadParameter(f"--policy {name!r}: all, or one of {', '.join(POLICIES)}")
    return (name,)


def _spec(
    prefill: int,
    decode: int,
    aggregated: int,
    model_file: Path | None,
    routers: int,
    hint_lag_ms: float,
    hint_loss: float,
) -> ClusterSpec:
    from services.sim.cluster import ClusterSpec
    from services.sim.performance import default_model, read_model

    is_two = bool(prefill or decode)
    if is_two == bool(aggregated) or (is_two and not (prefill and decode)):
        raise typer.BadParameter("give --prefill and --decode, or --aggregated")
    return ClusterSpec(
        num_prefill=prefill,
        num_decode=decode,
        num_aggregated=aggregated,
        model=default_model() if model_file is None else read_model(model_file),
        num_routers=routers,
        hint_lag_s=hint_lag_ms / 1000,
        hint_loss=hint_loss,
    )


def _show_statistics(load: Workload, *, as_json: bool) -> int:
    from services.sim.statistics import load_statistics

    found = load_statistics(load)
    if as_json:
        typer.echo(json.dumps(statistics_json(load.name, found), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(statistics_lines(load.name, found)))
    return exits.OK
