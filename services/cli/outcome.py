"""How commands that measure or judge end: one JSON object, exit 1 when a bar is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from services.bench.result import BenchResult
    from services.cli.progress import Progress


def show_result(result: BenchResult, progress: Progress) -> int:
    """Print the JSON object; return the exit code."""
    progress.done()
    typer.echo(result.to_json())
    return result.exit_code
