"""Loads that commands are given: traces by their form, or a few words that describe one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.sim.synthetic import PlainLoad
    from services.sim.workload import Workload

SHAPES = "fixed:IN,OUT,RATE or lognormal:IN,OUT,RATE,SIGMA"
Trace = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Requests: Mooncake .jsonl or Azure .csv."),
]
Described = Annotated[
    str, typer.Option(help=f"Instead of a trace, tokens and requests a second: {SHAPES}.")
]
Speedup = Annotated[
    float, typer.Option(min=0.001, max=10_000, help="How much faster than traced they arrive.")
]
SloTtft = Annotated[
    float, typer.Option(min=0.001, max=86_400, help="Limit of the first token, seconds.")
]
ModelFile = Annotated[
    Path | None,
    typer.Option(help="How fast a worker is, by `isthmus profile`; a prototype if left out."),
]
DrawSeed = Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")]
_MAX_TOKENS = 1 << 20  # of a prompt or an answer
_MAX_RATE_RPS = 1e6
_MAX_SPREAD = 3.0
_NUM_PARTS = {"fixed": 3, "lognormal": 4}


def traced_load(trace: Path, speedup: float) -> Workload:
    """Read a trace of any form there is.

    Raises:
        ConfigError: it cannot be read as one.
    """
    from services.common.errors import ConfigError
    from services.sim.recorded import read_recorded
    from services.sim.trace_file import BadTrace

    try:
        return read_recorded(trace, speedup)
    except OSError as error:
        raise ConfigError(f"{trace}: {error.strerror}") from None
    except BadTrace as error:
        raise ConfigError(f"--trace: {error}") from None


def described_load(text: str) -> PlainLoad:
    """Read tokens and requests a second, in the form of SHAPES."""
    from services.sim.synthetic import PlainLoad

    kind, _, rest = text.partition(":")
    parts = rest.split(",")
    if len(parts) != _NUM_PARTS.get(kind):
        raise typer.BadParameter(f"--workload {text!r}: {SHAPES}")
    try:
        tokens = int(parts[0]), int(parts[1])
        rate, spread = float(parts[2]), float(parts[3]) if len(parts) > 3 else 0.0
    except ValueError:
        raise typer.BadParameter(f"--workload {text!r}: {SHAPES}") from None
    if not (min(tokens) >= 1 and max(tokens) <= _MAX_TOKENS and 0 < rate <= _MAX_RATE_RPS):
        raise typer.BadParameter(
            f"--workload {text!r}: tokens are 1 to {_MAX_TOKENS}, "
            f"the rate is above 0 and at most {_MAX_RATE_RPS:g}"
        )
    if not 0 <= spread <= _MAX_SPREAD:
        raise typer.BadParameter(f"--workload {text!r}: SIGMA is 0 to {_MAX_SPREAD:g}")
    return PlainLoad(*tokens, rate, spread)
