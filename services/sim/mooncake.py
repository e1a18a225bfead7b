"""Reads request traces in the form Mooncake published: JSON lines, blocks of 512 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from services.sim.trace_file import BadTrace, trace_lines
from services.sim.workload import Arrival, Workload, faster

UNIT_TOKENS = 512
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24  # of one prompt
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: Path, speedup: float = 1.0) -> Workload:
    """Read a trace, plain or gzipped, to arrive `speedup` times as fast.

    Raises:
        BadTrace: a line that cannot be a request, or a damaged file.
        OSError: the file cannot be read.
    """
    with trace_lines(path) as lines:
        arrivals = _arrivals(path.name, lines)
    if not arrivals:
        raise BadTrace(f"{path.name} holds no requests")
    return Workload(path.name.split(".")[0], UNIT_TOKENS, faster(arrivals, speedup))


def _arrivals(name: str, lines: Iterable[str]) -> tuple[Arrival, ...]:
    found: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(found) == MAX_REQUESTS:
            raise BadTrace(f"{name} has more than {MAX_REQUESTS} requests")
        try:
            found.append(_arrival(json.loads(line)))
        except ValueError as error:
            raise BadTrace(f"line {number} of {name} is no request: {error}") from error
    # Sorting is stable, so requests of one instant stay in the order of the file.
    return tuple(sorted(found, key=lambda a: a.at_s))


def _arrival(row: object) -> Arrival:
    if not isinstance(row, dict) or (missing := [key for key in _KEYS if key not in row]):
        lacks = f"lacks {', '.join(missing)}" if isinstance(row, dict) else "is no JSON object"
        raise ValueError(f"it {lacks}")
    at_ms, num_tokens, output_tokens, units = (row[key] for key in _KEYS)
    if not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e12:
        raise ValueError("timestamp is no time in ms")
    if not isinstance(num_tokens, int) or not 0 < num_tokens <= MAX_TOKENS:
        raise ValueError("input_length is no number of tokens")
    if not isinstance(output_tokens, int) or not 0 <= output_tokens <= MAX_TOKENS:
        raise ValueError("output_length is no number of tokens")
    if not isinstance(units, list) or not all(type(u) is int and 0 <= u < 2**63 for u in units):
        raise ValueError("hash_ids is no list of ids")
    if len(units) != -(-num_tokens // UNIT_TOKENS):
        raise ValueError(f"{num_tokens} tokens are not {len(units)} blocks of {UNIT_TOKENS}")
    return Arrival(at_ms / 1000, num_tokens, max(1, output_tokens), tuple(units))
