"""`calibrate`: what the client itself adds to every figure, on this machine."""

from __future__ import annotations

import json as json_form
import math
from typing import Annotated

import typer

from loadtest import exits, options


def calibrate(
    streams: Annotated[int, typer.Option(min=1, help="Answers that are read at once.")] = 200,
    service_ms: Annotated[
        float, typer.Option(min=0.1, help="What the server takes until the first token.")
    ] = 50.0,
    itl_ms: Annotated[float, typer.Option(min=0.1, help="And for every other one.")] = 50.0,
    seconds: Annotated[float, typer.Option(min=1, help="Measured time of each door.")] = 10.0,
    json: options.Json = False,
) -> int:
    """Measure a server whose timing is known; ends with 1 if this client misses a bar."""
    from loadtest.calibration import Order, calibrate
    from loadtest.origin import origin

    figures, bars = calibrate(Order(streams, service_ms, itl_ms, seconds))
    here = origin()
    if json:
        told = {
            "name": "calibrate",
            "machine": dict(here.machine),
            "commit": here.commit,
            "figures": figures,
            "bars": [
                {
                    "name": bar.name,
                    "value": bar.value if math.isfinite(bar.value) else None,
                    "bar": bar.bar,
                    "sense": bar.sense,
                    "pass": bar.is_met,
                }
                for bar in bars
            ],
        }
        typer.echo(json_form.dumps(told, indent=1, allow_nan=False))
    else:
        for part, found in figures.items():
            for name, value in found.items():
                shown = f"{value:12.3f}" if isinstance(value, float) else f"{value!s:>12}"
                typer.echo(f"{part:<8} {name:<22} {shown}")
        for bar in bars:
            state = "met" if bar.is_met else "MISSED"
            shown = f"{bar.value:.3f} {bar.sense} {bar.bar:g}"
            if not math.isfinite(bar.value):
                shown = "too few answers to tell: more --streams, or more --seconds"
            typer.echo(f"{state:<8} {bar.name:<32} {shown}")
    return exits.OK if all(bar.is_met for bar in bars) else exits.FAILED
