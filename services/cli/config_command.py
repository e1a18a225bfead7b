"""`isthmus config`: check a configuration, show it, describe every setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, settings
from services.cli.store_address import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.common.config_source import FieldDoc

app = typer.Typer(help="Check and describe the configuration.", no_args_is_help=True)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]


@app.command("check")
def check(config: ConfigFile = None) -> int:
    """Read file, environment and keys file; say what is wrong, exit 2 then."""
    import os

    settings.check_files(settings.load(config, {}))
    path = settings.find_config(config, os.environ)
    typer.echo(f"ok: {path if path is not None else 'no file, defaults'} and the environment")
    return exits.OK


@app.command("show")
def show(
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> int:
    """Print the settings in force; what may be secret is redacted."""
    from services.common.config_source import public_values

    loaded = settings.load(config, {})
    values = public_values(loaded)
    values["store.url"] = shown_url(loaded.store.url.get_secret_value())
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        for key, value in values.items():
            typer.echo(f"{key} = {json.dumps(value)}")
    return exits.OK


@app.command("docs")
def docs() -> int:
    """Print every setting with type, unit, default and meaning, as Markdown."""
    from services.common.config import IsthmusConfig
    from services.common.config_source import iter_fields

    typer.echo(config_markdown(iter_fields(IsthmusConfig)), nl=False)
    return exits.OK


def config_markdown(fields: Iterable[FieldDoc]) -> str:
    """One table a section."""
    lines: list[str] = []
    section = ""
    for field in fields:
        head, _, name = field.key.partition(".")
        if head != section:
            section = head
            lines += [
                "",
                f"## {section}",
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        unit = f", {field.unit}" if field.unit else ""
        kind = field.type_name.replace("|", "\\|")
        lines.append(f"| `{name}` | {kind}{unit} | `{field.default}` | {field.description} |")
    return "\n".join(lines).lstrip("\n") + "\n"
