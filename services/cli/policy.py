"""`isthmus policy`: check the autoscaler's policy file, say what it does, print an example."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits

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
