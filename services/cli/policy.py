"""`isthmus policy`: check the autoscaler's policy file, say what it does, print an example."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, loads

if TYPE_CHECKING:
    from services.autoscaler.policy import PoolAutoscalingPolicy

app = typer.Typer(help="Check and explain how pools are sized.", no_args_is_help=True)

PolicyFile = Annotated[Path, typer.Argument(help="Policy file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("lint")
def lint(file: PolicyFile, as_json: AsJson = False) -> int:
    """Tell everything that is wrong in a policy, exit 2 then, and what to look at again."""
    from services.autoscaler.policy_file import PolicyFaults, load_policy
    from services.autoscaler.policy_notes import policy_notes

    try:
        policy = load_policy(file)
    except PolicyFaults as wrong:
        if not as_json:
            raise
        faults = [{"path": fault.path, "message": fault.message} for fault in wrong.faults]
        typer.echo(json.dumps({"ok": False, "faults": faults, "notes": []}, indent=2))
        return exits.USAGE
    notes = list(policy_notes(policy.spec, _unix_s("")))
    if as_json:
        told = [{"path": note.path, "message": note.message} for note in notes]
        typer.echo(json.dumps({"ok": True, "faults": [], "notes": told}, indent=2))
        return exits.OK
    for note in notes:
        typer.echo(f"{file}: {note.path}: note: {note.message}")
    typer.echo(f"ok: {file}")
    return exits.OK


@app.command("explain")
def explain(
    file: PolicyFile,
    at: Annotated[
        str, typer.Option(help="As of then: 2026-12-01T09:00+01:00. Left out: now.")
    ] = "",
    as_json: AsJson = False,
) -> int:
    """Say in words and numbers what a policy does: limits, metrics, rates, budget, ratio."""
    from services.cli.policy_view import policy_json, policy_lines

    unix_s = _unix_s(at)
    policy = _load(file)
    if as_json:
        typer.echo(json.dumps(policy_json(policy, unix_s), indent=2))
    else:
        typer.echo("\n".join(policy_lines(policy, unix_s)))
    return exits.OK


@app.command("example")
def example() -> int:
    """Print a policy with comments, to begin with."""
    from services.autoscaler.policy_file import EXAMPLE

    typer.echo(EXAMPLE.read_text(encoding="utf-8"), nl=False)
    return exits.OK


@app.command("simulate")
def simulate(
    file: PolicyFile,
    trace: loads.Trace = None,
    workload: loads.Described = "",
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests of a --workload.")
    ] = 2_000,
    speedup: loads.Speedup = 1.0,
    seed: loads.DrawSeed = 0,
    model_file: loads.ModelFile = None,
    at: Annotated[
        str, typer.Option(help="Limits are those of this moment: 2026-12-01T09:00+01:00.")
    ] = "",
    as_json: AsJson = False,
) -> int:
    """Size simulated pools by a policy's decisions: latencies, sizes, and why they changed.

    Starts take as long as the policy expects. Modes DryRun and Paused act here too.
    """
    from services.cli.policy_sim import simulated, simulation_json, simulation_lines
    from services.cli.progress import Progress
    from services.sim.performance import default_model, read_model
    from services.sim.synthetic import plain_workload

    if (trace is None) == (not workload):
        raise typer.BadParameter("give --trace or --workload")
    unix_s, policy = _unix_s(at), _load(file)
    model = default_model() if model_file is None else read_model(model_file)
    if trace is not None:
        load = loads.traced_load(trace, speedup)
    else:
        load = plain_workload(loads.described_load(workload), requests, seed)
    progress = Progress()
    progress(f"{load.name}: {len(load.arrivals)} requests", 0.0)
    found = simulated(policy, unix_s, load, model, seed)
    progress.done()
    if as_json:
        typer.echo(json.dumps(simulation_json(found), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(simulation_lines(found)))
    return exits.OK


def _load(file: Path) -> PoolAutoscalingPolicy:
    from services.autoscaler.policy_file import load_policy

    return load_policy(file)


def _unix_s(text: str) -> float:
    from services.common.clock import SystemClock

    if not text:
        return SystemClock().unix_ms() / 1000
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"--at {text!r}: a date and time as 2026-12-01T09:00Z") from None
    if when.tzinfo is None:
        raise typer.BadParameter(f"--at {text!r}: say which time, as in +01:00 or Z")
    return when.timestamp()
