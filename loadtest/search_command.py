"""`search`: the highest rate that keeps a scenario's SLO."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from loadtest import exits, options
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.probing import Pools
    from loadtest.result import SearchResult


def search(
    scenario: options.ScenarioName,
    target: options.Target,
    attain: Annotated[float, typer.Option(help="Share of requests that must keep the SLO.")] = 0.95,
    start: Annotated[float, typer.Option(help="Rate of the first probe, sessions a second.")] = 1.0,
    lowest: Annotated[float, typer.Option(help="Try no lower rate.")] = 0.05,
    highest: Annotated[float, typer.Option(help="Try no higher rate.")] = 10_000.0,
    split: Annotated[
        int | None,
        typer.Option(min=2, help="Of a sim: target: so many workers, and the best two pools."),
    ] = None,
    precision: Annotated[
        float, typer.Option(help="Stop where the next rate that misses is so much higher.")
    ] = 0.05,
    verify: Annotated[int, typer.Option(help="Runs of the rate that is found.")] = 3,
    probe_s: Annotated[
        float | None, typer.Option(min=1, help="Measured time of a probe; default: the scenario's.")
    ] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="Longest time of all probes.")] = 3_600.0,
    ttft_s: Annotated[float | None, typer.Option(min=1e-6, help="SLO of the first token.")] = None,
    tpot_s: Annotated[float | None, typer.Option(min=1e-6, help="SLO of each token after.")] = None,
    quick: options.Quick = False,
    seed: options.Seed = None,
    api: options.AskedBy = options.ApiName.chat,
    model: options.Model = "",
    vocab_size: options.VocabSize = None,
    ca_file: options.CaFile = None,
    api_key_file: options.ApiKeyFile = None,
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> int:
    """Search in open loop: probe rates, halve the bracket, and run the best one again."""
    from loadtest import probing
    from loadtest.launch import run_schedule, schedule_of
    from loadtest.origin import origin
    from loadtest.outputs import save_search
    from loadtest.results import check_writable
    from loadtest.search import SearchOrder
    from loadtest.slo import Slo
    from loadtest.summary import summary

    found, base = options.read_scenario(scenario, quick=quick, rate=None, seed=seed)
    limits = {"ttft_s": ttft_s, "tpot_s": tpot_s}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    slo = found.slo.model_dump() | given
    changes: dict[str, object] = {"slo": Slo(**slo)}
    if probe_s is not None:
        changes["phases"] = found.phases.model_copy(update={"measure_s": probe_s})
    found = found.model_copy(update=changes)
    if not found.slo.has_limits:
        raise ConfigError(f"{found.name} has no slo to search for; give --ttft-s or --tpot-s")
    try:
        order = SearchOrder(attain, start, lowest, highest, precision=precision, num_verify=verify)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    check_writable(out)

    ends_s = time.monotonic() + budget_s

    def left_s() -> float:
        return ends_s - time.monotonic()

    def search_at(url: str) -> SearchResult:
        spec = options.spec_of(url, api, model, vocab_size, ca_file, api_key_file)
        return probing.search(
            found,
            order,
            origin(),
            lambda at_rate, watch: run_schedule(schedule_of(at_rate, base), spec, watch),
            budget_s=left_s(),
            now=time.monotonic,
            tell=lambda line: typer.echo(line, err=True),
        )

    if split is None:
        result = search_at(target)
    else:
        result = probing.search_splits(
            split,
            lambda pools: search_at(_with_pools(target, pools)),
            lambda: left_s() > probing.probe_s(found, start),
        )
    typer.echo(result.model_dump_json(indent=1) if json else summary(result))
    directory = save_search(out, result)
    typer.echo(f"written to {directory}", err=True)
    return exits.OK if result.verdict == "FOUND" else exits.FAILED


def _with_pools(target: str, pools: Pools) -> str:
    """Return a simulation's address with these pools."""
    if not target.startswith("sim:"):
        raise ConfigError("--split needs a sim: target: a cluster cannot be split anew by a client")
    told = target.removeprefix("sim:").split(",")
    kept = [part for part in told if part and part.partition("=")[0] not in ("prefill", "decode")]
    return f"sim:{','.join([f'prefill={pools.prefill}', f'decode={pools.decode}', *kept])}"
