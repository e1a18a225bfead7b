"""`isthmus profile`: measure a worker on this machine for the simulator and for sizing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from services.cli import exits
from services.cli.measured_model import check_memory, prepare_model
from services.cli.progress import Progress

_MAX_THREADS = 1024
_GIB = 1 << 30


def profile(
    model: Annotated[str, typer.Option(help="Name, directory or .gguf file.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--out", "--output", help="Where the JSON goes; printed if left out."),
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Time after which no more rounds begin.")
    ] = 110.0,
    threads: Annotated[
        int, typer.Option(min=0, max=_MAX_THREADS, help="Compute threads; 0 = one per core.")
    ] = 0,
    kv_memory_gib: Annotated[
        float, typer.Option(min=0, max=1 << 20, help="KV of a worker; 0 = what it would take here.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
) -> int:
    """Measure prompts and steps of one worker; fit the performance model of `isthmus sim`."""
    if output is not None and not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out: {output.absolute().parent} is no directory")
    directory, progress = prepare_model(model), Progress()
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, threads)  # before the next line loads torch
    from services.bench.profile import LONGEST, kv_bytes, run, table
    from services.cli.measured_model import check_length

    check_length(directory, LONGEST)
    check_memory(kv_bytes(Path(directory)), "close other programs")
    found = run(
        directory,
        budget_s=budget_s,
        threads=threads,
        seed=seed,
        kv_memory_bytes=int(kv_memory_gib * _GIB),
        progress=progress,
    )
    progress.done()
    written = found.model_dump_json(indent=2, exclude_none=True)
    typer.echo("\n".join(table(found)), err=output is None)
    if output is None:
        typer.echo(written)
    else:
        output.write_text(written + "\n", encoding="utf-8")
        typer.echo(f"written to {output}; use it with --model-file")
    return exits.OK
