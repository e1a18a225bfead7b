"""The model a bench or chaos command runs on, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import typer

from services.cli import settings


def prepare_model(name: str, num_tokens: int = 1) -> str:
    """Return the directory of the model; a usage fault when a request would not fit it.

    Args:
        name: as the flag gave it; empty = the configured model, or the default one.
        num_tokens: the longest request that is to be sent, prompt and answer together.
    """
    config = settings.load_serving(None, {"model.name": name or None})
    directory = settings.resolve_model(config)
    check_length(directory, num_tokens, config.model.max_model_len)
    return str(directory)


def check_length(directory: Path | str, num_tokens: int, max_model_len: int = 0) -> None:
    """Refuse requests that the model, or the configured length, has no room for."""
    from services.common.model_manifest import read_manifest

    manifest = read_manifest(Path(directory))
    limit = min(manifest.context_length, max_model_len or manifest.context_length)
    if num_tokens > limit:
        raise typer.BadParameter(
            f"requests of {num_tokens} tokens, prompt and answer together, do not fit the"
            f" {limit} tokens that {manifest.name} takes"
        )


def check_memory(num_bytes: int, advice: str) -> None:
    """Refuse work that would not fit this machine's free memory; a usage fault."""
    free = free_bytes()
    if num_bytes > free:
        raise typer.BadParameter(
            f"this needs {num_bytes / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are"
            f" available; {advice}"
        )


def free_bytes() -> int:
    """Memory that could be had now."""
    import psutil

    return int(psutil.virtual_memory().available)
