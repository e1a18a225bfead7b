"""`run` and `replay`: one load, one result. `scenarios`: what can be run by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtest import exits, options
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.fault_bringer import FaultBringer
    from loadtest.launch import TargetSpec, Watch
    from loadtest.result import RunResult
    from loadtest.run_cost import Pricing
    from loadtest.run_log import RunLog
    from loadtest.runner import Runner
    from loadtest.scenario import Scenario
    from services.sim.recorded import Form

_BAD_VERDICTS = ("FAILED", "CLIENT_BOUND")

Attain = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="End with 1 when fewer requests kept the SLO than this share."),
]


def run(
    scenario: options.ScenarioName,
    target: options.Target,
    quick: options.Quick = False,
    rate: options.Rate = None,
    seed: options.Seed = None,
    api: options.AskedBy = options.ApiName.chat,
    model: options.Model = "",
    vocab_size: options.VocabSize = None,
    ca_file: options.CaFile = None,
    api_key_file: options.ApiKeyFile = None,
    attain: Attain = None,
    prices: options.PriceFile = None,
    workers: options.WorkersText = "",
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="File that `isthmus up --json-status` keeps: whose processes get the faults."
        ),
    ] = None,
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> int:
    """Run a scenario; Ctrl-C ends it with what there is."""
    found, base = options.read_scenario(scenario, quick=quick, rate=rate, seed=seed)
    spec = options.spec_of(target, api, model, vocab_size, ca_file, api_key_file)
    pricing = options.pricing_of(prices, workers)
    bringer = None
    if found.faults and cluster is not None:
        from loadtest.fault_bringer import FaultBringer

        bringer = FaultBringer(cluster, found.faults, target)
    return _run(found, base, spec, attain, pricing, out, bringer, json=json)


def replay(
    trace: Annotated[
        Path,
        typer.Argument(help="Requests in the form of Mooncake (.jsonl) or Azure (.csv), or .gz."),
    ],
    target: options.Target,
    speedup: Annotated[float, typer.Option(min=1e-6, help="So many times as fast.")] = 1.0,
    from_s: Annotated[float, typer.Option(min=0, help="Begin at this time of the trace.")] = 0.0,
    to_s: Annotated[
        float | None, typer.Option(min=0, help="End at this time; default: the trace's end.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=1e-6, max=1, help="Lengths times this, for a small model.")
    ] = 1.0,
    max_isl: Annotated[int, typer.Option(min=1, help="Leave out longer prompts.")] = 1 << 20,
    max_osl: Annotated[int, typer.Option(min=1, help="Cut answers to this length.")] = 1 << 20,
    ttft_s: Annotated[float | None, typer.Option(min=0, help="SLO of the first token.")] = None,
    tpot_s: Annotated[float | None, typer.Option(min=0, help="SLO of each token after.")] = None,
    seed: options.Seed = 0,
    api: options.AskedBy = options.ApiName.chat,
    model: options.Model = "",
    vocab_size: options.VocabSize = None,
    ca_file: options.CaFile = None,
    api_key_file: options.ApiKeyFile = None,
    attain: Attain = None,
    prices: options.PriceFile = None,
    workers: options.WorkersText = "",
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> int:
    """Replay a recorded trace: its instants, its lengths, and what its prompts share."""
    from loadtest.scenario import parse_scenario

    values: dict[str, Any] = {
        "name": "replay",
        "description": trace.name,
        "arrivals": {"kind": "trace", "speedup": speedup, "from_s": from_s, "to_s": to_s},
        "workload": {
            "kind": _form_of(trace),
            "file": trace.name,
            "scale": scale,
            "max_isl": max_isl,
            "max_osl": max_osl,
        },
        "slo": {"ttft_s": ttft_s, "tpot_s": tpot_s},
        "seed": seed,
        "budget_s": 7 * 86_400.0,
    }
    spec = options.spec_of(target, api, model, vocab_size, ca_file, api_key_file)
    pricing = options.pricing_of(prices, workers)
    found = parse_scenario(values, "replay")
    return _run(found, trace.parent, spec, attain, pricing, out, None, json=json)


def scenarios() -> None:
    """List the scenarios that can be run by name."""
    from loadtest.scenario import load_scenario

    for name in options.shipped_names():
        typer.echo(f"{name:<10} {load_scenario(options.find_scenario(name)).description}")


def _form_of(trace: Path) -> Form:
    from services.sim.recorded import form_of
    from services.sim.trace_file import BadTrace

    try:
        return form_of(trace)
    except BadTrace as error:
        raise ConfigError(str(error)) from None


def _run(
    scenario: Scenario,
    base: Path,
    spec: TargetSpec,
    attain: float | None,
    pricing: Pricing | None,
    out: Path,
    bringer: FaultBringer | None,
    *,
    json: bool,
) -> int:
    from loadtest.analysis import analyse
    from loadtest.launch import run_schedule, schedule_of
    from loadtest.origin import origin
    from loadtest.outputs import save_run
    from loadtest.records import Phase
    from loadtest.results import check_writable
    from loadtest.schedule import ideal_hit_ratio
    from loadtest.summary import summary

    check_writable(out)
    schedule = schedule_of(scenario, base)
    log = run_schedule(schedule, spec, _watch(scenario), bringer)
    measured = {record.number for record in log.records if record.phase is Phase.MEASURE}
    ideal = ideal_hit_ratio(schedule, measured)
    result = analyse(log, scenario, origin(), ideal_hit_ratio=ideal)
    if pricing is not None:
        result = priced(result, log, scenario, pricing)
    # Told first: a disk that filled up meanwhile must not cost the figures.
    typer.echo(result.model_dump_json(indent=1) if json else summary(result))
    directory = save_run(out, result, log.records, log.samples)
    typer.echo(f"written to {directory}", err=True)
    if log.is_interrupted:
        return exits.INTERRUPTED
    is_met = attain is None or (result.attainment and result.attainment.value >= attain)
    return exits.OK if is_met and result.verdict not in _BAD_VERDICTS else exits.FAILED


def priced(result: RunResult, log: RunLog, scenario: Scenario, pricing: Pricing) -> RunResult:
    """Add the cost; where it cannot be told the run is kept, and says why."""
    from loadtest.run_cost import run_cost

    try:
        return result.model_copy(update={"cost": run_cost(log, scenario.slo, pricing)})
    except ConfigError as error:
        note = f"there is no cost: {error}"
        typer.echo(f"warning: {note}", err=True)
        return result.model_copy(update={"notes": (*result.notes, note)})


def _watch(scenario: Scenario) -> Watch:
    from loadtest.panel import LiveState, Meter, watch

    phases = scenario.phases
    meter = Meter(scenario.name, scenario.slo if scenario.slo.has_limits else None, phases.end_s)

    async def show(runner: Runner) -> None:
        def look() -> LiveState:
            now_s = runner.clock()
            samples = runner.log.samples
            replicas = samples[-1].replicas if samples else None
            return meter.look(now_s, phases.at(now_s), runner.log.records, replicas=replicas)

        await watch(look)

    return show
