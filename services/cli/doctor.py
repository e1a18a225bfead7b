"""`isthmus doctor`: what this machine has, what is missing, and what that means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits

if TYPE_CHECKING:
    from services.cli.doctor_checks import Finding

_MARKS = {"ok": "ok      ", "note": "note    ", "missing": "MISSING "}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> int:
    """Look at this machine; exit 1 only if something that is needed is missing."""
    from services.cli.doctor_checks import all_findings

    findings = all_findings()
    if as_json:
        typer.echo(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(render(finding))
    return exits.FAILED if any(finding.level == "missing" for finding in findings) else exits.OK


def render(finding: Finding) -> str:
    """One line, and what to do about it on a second."""
    line = f"{_MARKS[finding.level]} {finding.name}: {finding.found}"
    return f"{line}\n          {finding.advice}" if finding.advice else line
