"""The traffic rules in force: from a file that is read again when it changes, or an operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.common.bounded_file import read_bounded
from services.common.clock import Clock
from services.common.errors import ConfigError
from services.gateway.spec import GenerateSpec, TextInput, TokenInput
from services.gateway.validate import Arrival
from services.router.traffic import MAX_TEXT_BYTES, TrafficTable, parse_table
from services.runtime.watched_file import WatchedFile

_SETTING = "router.traffic_file"
_KEY_CHARS = 1024
_KEY_TOKENS = 64
_NONE = TrafficTable()

FROM_FILE, FROM_OPERATOR, NO_RULES = "file", "operator", "none"


class TrafficControl:
    """An operator's rules hold until the file changes, or for the life of the process."""

    def __init__(self, file: Path | None, clock: Clock, poll_s: float = 1.0) -> None:
        """Read the file for the first time; raises ConfigError."""
        self._file: WatchedFile[TrafficTable] | None = None
        if file is not None:
            self._file = WatchedFile(_SETTING, (file,), lambda: _read(file), clock, poll_s)
        self._own: TrafficTable | None = None
        self._file_version = 0

    def table(self) -> TrafficTable:
        """Return the rules in force."""
        table = self._file.get() if self._file is not None else _NONE
        if self._own is None:
            return table
        if self._file is not None and self._file.version != self._file_version:
            self._own = None
            return table
        return self._own

    @property
    def source(self) -> str:
        """Where the rules in force come from."""
        self.table()
        if self._own is not None:
            return FROM_OPERATOR
        return FROM_FILE if self._file is not None else NO_RULES

    def set(self, table: TrafficTable | None) -> None:
        """Put an operator's rules in force; None = those of the file again."""
        self.table()
        self._own = table
        self._file_version = self._file.version if self._file is not None else 0


def _read(file: Path) -> TrafficTable:
    data = read_bounded(_SETTING, file, MAX_TEXT_BYTES)
    try:
        return parse_table(data.decode("utf-8"), _SETTING)
    except UnicodeDecodeError:
        raise ConfigError(f"{_SETTING}: not UTF-8 text") from None


def traffic_key(spec: GenerateSpec, arrival: Arrival) -> bytes:
    """Return what draws a request's share of the traffic: its session, else how its prompt begins.

    The later turns of a conversation begin as its first one did.
    """
    prompt = spec.prompt
    if arrival.session:
        head = arrival.session.encode()
    elif isinstance(prompt, TokenInput):
        head = prompt.token_ids[:_KEY_TOKENS].astype(np.int64).tobytes()
    elif isinstance(prompt, TextInput):
        head = prompt.text[:_KEY_CHARS].encode("utf-8", "surrogatepass")
    else:
        first_user = next((i for i, t in enumerate(prompt.turns) if t.role == "user"), 0)
        turns = prompt.turns[: first_user + 1]
        text = "\0".join(turn.content[:_KEY_CHARS] for turn in turns)
        head = text.encode("utf-8", "surrogatepass")
    return arrival.namespace.encode() + b"\0" + head
