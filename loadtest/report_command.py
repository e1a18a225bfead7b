"""`report`: make report.html anew from a stored result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import ConfigError


def report(
    result: Annotated[Path, typer.Argument(help="Directory of a result, or its result.json.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: beside the result.")
    ] = None,
) -> None:
    """Make report.html of a run, a search or a comparison, and say where it is."""
    from loadtest.outputs import REPORT_FILE
    from loadtest.report.page import report_page
    from loadtest.result import RunResult
    from loadtest.results import ResultUnreadable, check_raw_file, load_result, result_path

    try:
        found = load_result(result)
    except ResultUnreadable as error:
        raise ConfigError(str(error)) from None
    directory = result_path(result).parent
    if isinstance(found, RunResult) and (fault := check_raw_file(found, directory)) is not None:
        typer.echo(f"warning: {fault}", err=True)
    path = directory / REPORT_FILE if out is None else out
    try:
        _replace(path, report_page(found))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    typer.echo(str(path))


def _replace(path: Path, page: str) -> None:
    """A browser that reloads sees the old page or the new one."""
    building = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        building.write_text(page, encoding="utf-8")
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)
