"""`interference`: what long prompts do to other requests, by runs with and without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loadtest import exits, options
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.scenario import Scenario


def interference(
    scenario: options.ScenarioName,
    target: options.Target,
    part: Annotated[
        str, typer.Option(help="Part of the mixed workload that one arm goes without.")
    ] = "long",
    blocks: Annotated[
        int, typer.Option(min=1, help="Parts of the load, sent without, with, with, without ...")
    ] = 12,
    quick: options.Quick = False,
    rate: options.Rate = None,
    seed: options.Seed = None,
    api: options.AskedBy = options.ApiName.chat,
    model: options.Model = "",
    vocab_size: options.VocabSize = None,
    ca_file: options.CaFile = None,
    api_key_file: options.ApiKeyFile = None,
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> int:
    """Send a mixed load with and without its long prompts, in turns, and compare the others."""
    from loadtest.compare import CompareRules
    from loadtest.comparing import BlockOrder, Side, compare_targets, with_interference
    from loadtest.launch import run_schedule, schedule_of
    from loadtest.origin import origin
    from loadtest.outputs import save_compare
    from loadtest.results import check_writable
    from loadtest.summary import summary

    found, base = options.read_scenario(scenario, quick=quick, rate=rate, seed=seed)
    found = _from_the_start(found, part)
    check_writable(out)
    spec = options.spec_of(target, api, model, vocab_size, ca_file, api_key_file)

    def side(name: str, left_out: str) -> Side:
        return Side(
            f"{found.name} {name} {part}",
            lambda load: run_schedule(schedule_of(load, base, left_out=left_out), spec),
        )

    result, records = compare_targets(
        side("without", part), side("with", ""), found, CompareRules(), origin(),
        order=BlockOrder(blocks, but=part), tell=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
    result = with_interference(result, records, but=part)
    typer.echo(result.model_dump_json(indent=1) if json else summary(result))
    directory = save_compare(out, result, records)
    typer.echo(f"written to {directory}", err=True)
    bad = ("FAILED", "CLIENT_BOUND")
    return exits.FAILED if {result.a.verdict, result.b.verdict} & set(bad) else exits.OK


def _from_the_start(scenario: Scenario, part: str) -> Scenario:
    """Let the part come in all of the time: blocks are shorter than a run."""
    from loadtest.arrivals import Concurrency, Users
    from loadtest.workloads import Mixed

    workload = scenario.workload
    names = [one.name for one in workload.parts] if isinstance(workload, Mixed) else []
    if not isinstance(workload, Mixed) or part not in names or len(names) < 2:
        raise ConfigError(
            f"{scenario.name} has no part {part} beside others: its workload must be mixed"
            + (f", of {', '.join(names)}" if names else "")
        )
    if isinstance(scenario.arrivals, Concurrency | Users):
        raise ConfigError(
            f"arrivals of kind {scenario.arrivals.kind} send more where answers come sooner: "
            "interference is told from arrivals at instants"
        )
    parts = tuple(one.model_copy(update={"from_s": 0.0}) for one in workload.parts)
    return scenario.model_copy(update={"workload": workload.model_copy(update={"parts": parts})})
