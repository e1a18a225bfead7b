"""Reads recorded lengths of conversations: CSV of token counts, turn by turn."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from services.sim.trace_file import BadTrace, trace_lines

COLUMNS = ["conv", "turn", "user_tokens", "assistant_tokens"]
MAX_TURNS = 1_000_000
MAX_TOKENS = 1 << 20  # of one turn

Conversation: TypeAlias = tuple[tuple[int, int], ...]  # per turn: tokens said, tokens answered


def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """Read lengths, plain or gzipped; the turns of a conversation stand together and in order.

    Raises:
        BadTrace: a line that cannot be a turn, or a damaged file.
        OSError: the file cannot be read.
    """
    with trace_lines(path) as lines:
        reader = csv.reader(lines)
        if next(reader, None) != COLUMNS:
            raise BadTrace(f"{path.name} does not begin with {','.join(COLUMNS)}")
        grouped = groupby(_turns(path.name, reader), key=lambda turn: turn[0])
        found = tuple(tuple((u, a) for _, u, a in turns) for _, turns in grouped)
    if not found:
        raise BadTrace(f"{path.name} holds no conversations")
    return found


def _turns(name: str, rows: Iterator[list[str]]) -> Iterator[tuple[str, int, int]]:
    for number, row in enumerate(rows, 2):
        if number > MAX_TURNS:
            raise BadTrace(f"{name} has more than {MAX_TURNS} turns")
        try:
            conversation, _, user, answer = row
            yield conversation, _tokens(user), _tokens(answer)
        except ValueError as error:
            raise BadTrace(f"line {number} of {name} is no turn: {error}") from error


def _tokens(text: str) -> int:
    """Read a number of tokens; nothing said or answered counts as one."""
    number = int(text)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{number} is no number of tokens")
    return max(1, number)
