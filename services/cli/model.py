"""`isthmus model`: fetch and list models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.cli import exits
from services.cli.progress import Progress

app = typer.Typer(help="Fetch, convert and list models.", no_args_is_help=True)

CacheDir = Annotated[
    Path | None, typer.Option(help="Cache; default: $ISTHMUS_CACHE or ~/.cache/isthmus.")
]


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name, model directory or .gguf file.")],
    cache_dir: CacheDir = None,
) -> int:
    """Make a model ready to serve: fetch, check, convert; at once when it is ready already."""
    from services.models.catalog import resolve

    typer.echo(str(resolve(name, cache_dir, progress=Progress())))
    return exits.OK


@app.command("list")
def list_models(
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> int:
    """List known names and what the cache holds."""
    from services.models.cache import default_cache_dir
    from services.models.catalog import NAMED_MODELS

    rows: list[dict[str, object]] = [
        {"name": name, "kind": "named", "package": file.package, "bytes": file.size_bytes}
        for name, file in NAMED_MODELS.items()
    ]
    rows += _cached(cache_dir or default_cache_dir())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return exits.OK
    for row in rows:
        details = "  ".join(f"{key}={value}" for key, value in row.items() if key != "name")
        typer.echo(f"{row['name']:<28} {details}")
    return exits.OK


def _cached(cache_dir: Path) -> list[dict[str, object]]:
    """Resolved directories, wherever in the cache they lie; a damaged one is named as such."""
    from services.common.errors import ModelFileError
    from services.common.model_manifest import MANIFEST_NAME, read_manifest

    found: list[dict[str, object]] = []
    for path in sorted(cache_dir.glob(f"**/{MANIFEST_NAME}")):
        try:
            manifest = read_manifest(path.parent)
        except ModelFileError as error:
            found.append({"name": path.parent.name, "kind": "damaged", "error": str(error)})
            continue
        size = sum(f.stat().st_size for f in path.parent.iterdir() if f.is_file())
        found.append(
            {
                "name": manifest.name,
                "kind": manifest.family,
                "context": manifest.context_length,
                "bytes": size,
                "path": str(path.parent),
            }
        )
    return found
