"""Decisions as lines of JSON: what was seen and decided, so that it can be played again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.autoscaler.decide import decide
from services.autoscaler.decision import Decision
from services.autoscaler.observation import Observation
from services.autoscaler.policy import PolicySpec
from services.autoscaler.state import State
from services.common.errors import ConfigError

MAX_FILE_BYTES = 16 << 20  # one older file of this size is kept besides


@dataclass(frozen=True, slots=True)
class Tick:
    """One decision and all it followed from. `state` is there where the file does not tell it."""

    at: float
    seen: Observation
    decision: Decision
    state: State | None = None


_TICK = TypeAdapter(Tick)


class DecisionLog:
    """A file and the one before it; the oldest are gone. Faults of the disk are the caller's."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._last: State | None = None  # that the last line ended with
        self._num_bytes = 0

    def write(self, seen: Observation, before: State, decision: Decision, after: State) -> None:
        """Append one tick. Raises OSError."""
        is_new = self._last is None or self._num_bytes >= self._max_bytes
        if is_new:
            self._begin()
        # Where the line before ends with another state, somebody else decided meanwhile.
        state = before if is_new or before != self._last else None
        line = _TICK.dump_json(Tick(decision.at, seen, decision, state)) + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
            file.write(line)
        self._num_bytes += len(line)
        self._last = after

    def _begin(self) -> None:
        self._num_bytes = 0
        if self._path.exists():
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))


@dataclass(frozen=True, slots=True)
class Difference:
    """A line that is decided otherwise now."""

    line: int  # from 1
    recorded: Decision
    decided: Decision


def replay(policy: PolicySpec, lines: Iterable[bytes]) -> Iterator[Difference]:
    """Decide again what was recorded, and return what comes out otherwise. Raises ConfigError."""
    state: State | None = None
    for number, line in enumerate(lines, 1):
        try:
            tick = _TICK.validate_json(line)
        except ValidationError:
            raise ConfigError(f"line {number} is no recorded decision") from None
        state = tick.state if tick.state is not None else state
        if state is None:
            raise ConfigError(f"line {number}: the state before it is not recorded")
        decision, state = decide(policy, tick.seen, state, tick.at)
        if decision != tick.decision:
            yield Difference(number, tick.decision, decision)
