"""Reads request traces in the form Azure published: CSV of instants and lengths, no contents."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from services.sim.mooncake import MAX_REQUESTS, MAX_TOKENS, UNIT_TOKENS
from services.sim.trace_file import BadTrace, trace_lines
from services.sim.workload import Arrival, Workload, faster

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_azure(path: Path, speedup: float = 1.0) -> Workload:
    """Read a trace, plain or gzipped, to arrive `speedup` times as fast; no prompts share a thing.

    Raises:
        BadTrace: a line that cannot be a request, or a damaged file.
        OSError: the file cannot be read.
    """
    with trace_lines(path) as lines:
        rows = _rows(path.name, lines)
    if not rows:
        raise BadTrace(f"{path.name} holds no requests")
    first, arrivals, unit = rows[0][0], [], 0
    for at_s, num_tokens, output_tokens in rows:
        num_units = -(-num_tokens // UNIT_TOKENS)
        units = tuple(range(unit, unit + num_units))
        arrivals.append(Arrival(at_s - first, num_tokens, output_tokens, units))
        unit += num_units
    return Workload(path.name.split(".")[0], UNIT_TOKENS, faster(arrivals, speedup))


def _rows(name: str, lines: Iterable[str]) -> list[tuple[float, int, int]]:
    """Return seconds and lengths, by time; requests of one instant in the order of the file."""
    reader = csv.reader(lines)
    if next(reader, None) != COLUMNS:
        raise BadTrace(f"{name} does not begin with {','.join(COLUMNS)}")
    rows: list[tuple[float, int, int]] = []
    for number, row in enumerate(reader, 2):
        if len(rows) == MAX_REQUESTS:
            raise BadTrace(f"{name} has more than {MAX_REQUESTS} requests")
        try:
            if len(row) != len(COLUMNS):
                raise ValueError(f"it has {len(row)} columns, and {len(COLUMNS)} are needed")
            at, num_tokens, output_tokens = row
            rows.append((_seconds(at), _tokens(num_tokens), max(1, _tokens(output_tokens))))
        except ValueError as error:
            raise BadTrace(f"line {number} of {name} is no request: {error}") from error
    return sorted(rows, key=lambda row: row[0])


def _seconds(text: str) -> float:
    # Seven digits of a fraction; the library reads six.
    whole, _, fraction = text.partition(".")
    if fraction and not (fraction.isascii() and fraction.isdigit()):
        raise ValueError("TIMESTAMP is no time")
    try:
        at = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError("TIMESTAMP is no time") from None
    return at + float(f"0.{fraction or 0}")


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_TOKENS):
        raise ValueError(f"{text[:20]} is no number of tokens")
    return int(text)
