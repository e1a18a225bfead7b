"""Makes the sessions of a workload: by number, so that no order of asking changes any. Pure."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from loadtest.records import Piece, Prompt
from loadtest.workloads import (
    Agent,
    Azure,
    Fixed,
    Length,
    Lognormal,
    Mixed,
    Mooncake,
    MultiTurn,
    PrefixGroups,
    ShareGptLengths,
    Spread,
    Workload,
)

if TYPE_CHECKING:
    from loadtest.conversations import Conversation
    from services.sim.workload import Arrival
    from services.sim.workload import Workload as Recording

_KEY_BYTES = 6


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, and what it waits for."""

    pieces: tuple[Piece, ...]
    max_tokens: int
    after: int | None = None  # turn of the same session whose end it follows
    wait_s: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names pieces of prompts: equal names within a seed and a salt are equal tokens."""

    seed: int
    salt: str = ""  # keeps a run from meeting what an earlier one left in caches

    def key(self, *name: object) -> int:
        """Return a piece's key."""
        text = "/".join(map(str, (self.seed, self.salt, *name)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest())


class Source(Protocol):
    """Sessions of one workload."""

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        """Make the session of a number; `rng` is its own, `at_s` when it begins."""
        ...

    def prefixes(self) -> Sequence[Prompt]:
        """Return what sessions share, for a warm cache; of recordings nothing is known ahead."""
        ...


def make_source(workload: Workload, base: Path, keys: Keys) -> Source:
    """Make a source; files are beside the scenario, in `base`.

    Raises:
        BadTrace: a file does not hold what it should.
        OSError: a file cannot be read.
    """
    match workload:
        case Fixed() | Lognormal():
            return _Plain(workload, keys)
        case PrefixGroups():
            return _Groups(workload, keys)
        case Agent():
            return _Agents(workload, keys)
        case MultiTurn():
            return _Chats(workload, keys)
        case ShareGptLengths():
            from loadtest.conversations import read_conversations

            return _RecordedChats(workload, keys, read_conversations(base / workload.file))
        case Mooncake() | Azure():
            return RecordedSource(workload, keys, _read(workload, base / workload.file))
        case Mixed():
            sources = []
            for part in workload.parts:
                own = replace(keys, salt=f"{keys.salt}/{part.name}")
                sources.append(make_source(part.workload, base, own))
            return _MixedSource(workload, sources)


def _read(workload: Mooncake | Azure, path: Path) -> Recording:
    from services.sim.azure import read_azure
    from services.sim.mooncake import read_trace

    return read_trace(path) if isinstance(workload, Mooncake) else read_azure(path)


def draw(length: Length, rng: random.Random) -> int:
    """Draw a number of tokens."""
    if not isinstance(length, Spread):
        return length
    drawn = round(length.median * rng.lognormvariate(0, length.sigma))
    return max(length.min, min(length.max, drawn))


class Zipf:
    """Draws one of n, the first most often."""

    def __init__(self, n: int, exponent: float) -> None:
        self._sums = list(accumulate((k + 1) ** -exponent for k in range(n)))

    def draw(self, rng: random.Random) -> int:
        """Return a number below n."""
        return min(bisect_right(self._sums, rng.random() * self._sums[-1]), len(self._sums) - 1)


@dataclass(frozen=True, slots=True)
class _Plain:
    workload: Fixed | Lognormal
    keys: Keys

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        isl, osl = draw(self.workload.isl, rng), draw(self.workload.osl, rng)
        return (Turn((Piece(self.keys.key("own", index), isl),), osl),)

    def prefixes(self) -> Sequence[Prompt]:
        return ()


class _Groups:
    def __init__(self, workload: PrefixGroups, keys: Keys) -> None:
        self._workload, self._keys = workload, keys
        self._zipf = Zipf(workload.groups, workload.zipf)

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        w = self._workload
        shared = self._prefix(self._zipf.draw(rng))
        own = Piece(self._keys.key("own", index), draw(w.suffix, rng))
        return (Turn((shared, own), draw(w.osl, rng)),)

    def prefixes(self) -> Sequence[Prompt]:
        return [Prompt((self._prefix(group),)) for group in range(self._workload.groups)]

    def _prefix(self, group: int) -> Piece:
        return Piece(self._keys.key("group", group), self._workload.prefix)


@dataclass(frozen=True, slots=True)
class _Chat:
    """Turns of one conversation, each with all that was said before.

    What was answered is planned, too: requests stay the same whatever the server says.
    """

    keys: Keys
    index: int
    system: int
    think_s: float

    def turns(self, lengths: Sequence[tuple[int, int]], rng: random.Random) -> tuple[Turn, ...]:
        said = list(system_pieces(self.keys, self.system))
        turns: list[Turn] = []
        for number, (user, osl) in enumerate(lengths):
            said.append(Piece(self.keys.key("said", self.index, number), user))
            after = number - 1 if number else None
            wait_s = rng.expovariate(1 / self.think_s) if number and self.think_s else 0.0
            turns.append(Turn(tuple(said), osl, after, wait_s))
            said.append(Piece(self.keys.key("answer", self.index, number), osl, "assistant"))
        return tuple(turns)


def system_pieces(keys: Keys, num_tokens: int) -> tuple[Piece, ...]:
    """Return what all conversations begin with."""
    return (Piece(keys.key("system"), num_tokens, "system"),) if num_tokens else ()


@dataclass(frozen=True, slots=True)
class _Chats:
    workload: MultiTurn
    keys: Keys

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        w = self.workload
        lengths = [(draw(w.user, rng), draw(w.osl, rng)) for _ in range(w.turns)]
        return _Chat(self.keys, index, w.system, w.think_s).turns(lengths, rng)

    def prefixes(self) -> Sequence[Prompt]:
        pieces = system_pieces(self.keys, self.workload.system)
        return [Prompt(pieces)] if pieces else []


@dataclass(frozen=True, slots=True)
class _RecordedChats:
    workload: ShareGptLengths
    keys: Keys
    conversations: Sequence[Conversation]

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        w = self.workload
        lengths: list[tuple[int, int]] = []
        history = w.system
        for user, answer in rng.choice(self.conversations)[: w.turns]:
            osl = min(answer, w.max_osl)
            # A first turn is cut rather than left out: no session is empty.
            user = user if lengths else min(user, max(1, w.max_isl - history))
            if history + user > w.max_isl:
                break
            lengths.append((user, osl))
            history += user + osl
        return _Chat(self.keys, index, w.system, w.think_s).turns(lengths, rng)

    def prefixes(self) -> Sequence[Prompt]:
        pieces = system_pieces(self.keys, self.workload.system)
        return [Prompt(pieces)] if pieces else []


class _Agents:
    def __init__(self, workload: Agent, keys: Keys) -> None:
        self._workload, self._keys = workload, keys
        self._zipf = Zipf(workload.roles, workload.zipf)

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        w = self._workload
        role = self._system(self._zipf.draw(rng))
        task = Piece(self._keys.key("task", index), draw(w.task, rng))
        turns = [Turn((role, task), draw(w.osl, rng))]
        level = [0]
        for fanout in w.tree:
            parents, level = level, []
            for parent in parents:
                for _ in range(fanout):
                    level.append(len(turns))
                    turns.append(self._call(index, len(turns), turns[parent], parent, rng))
        return tuple(turns)

    def prefixes(self) -> Sequence[Prompt]:
        return [Prompt((self._system(role),)) for role in range(self._workload.roles)]

    def _system(self, role: int) -> Piece:
        return Piece(self._keys.key("role", role), self._workload.system, "system")

    def _call(self, index: int, number: int, before: Turn, parent: int, rng: random.Random) -> Turn:
        w, key = self._workload, self._keys.key
        answer = Piece(key("answer", index, parent), before.max_tokens, "assistant")
        tool = Piece(key("tool", index, number), draw(w.tool, rng))
        wait_s = rng.expovariate(1 / w.tool_wait_s) if w.tool_wait_s else 0.0
        return Turn((*before.pieces, answer, tool), draw(w.osl, rng), parent, wait_s)


class RecordedSource:
    """Rows of a trace, in its order, and again from the start when they are used up."""

    def __init__(self, workload: Mooncake | Azure, keys: Keys, recording: Recording) -> None:
        self._workload, self._keys = workload, keys
        self._unit_tokens = recording.unit_tokens
        self.rows: Sequence[Arrival] = [
            row for row in recording.arrivals if row.num_tokens * workload.scale <= workload.max_isl
        ]
        if not self.rows:
            raise ValueError(f"{workload.file}: no prompt is as short as max_isl")

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        lap, number = divmod(index, len(self.rows))
        row, scale = self.rows[number], self._workload.scale
        osl = min(max(1, round(row.output_tokens * scale)), self._workload.max_osl)
        pieces, left = [], row.num_tokens
        for unit in row.units:
            size = min(left, self._unit_tokens)
            left -= size
            # Of one unit all pieces have one length but the last of a prompt, so prefixes stay.
            pieces.append(Piece(self._keys.key("unit", lap, unit), max(1, round(size * scale))))
        return (Turn(tuple(pieces), osl),)

    def prefixes(self) -> Sequence[Prompt]:
        return ()


class _MixedSource:
    def __init__(self, workload: Mixed, sources: Sequence[Source]) -> None:
        self._parts = list(zip(workload.parts, sources, strict=True))

    def session(self, index: int, at_s: float, rng: random.Random) -> tuple[Turn, ...]:
        parts = [(part, source) for part, source in self._parts if part.from_s <= at_s]
        weights = [part.weight for part, _ in parts]
        ((part, source),) = rng.choices(parts, weights)
        turns = source.session(index, at_s, rng)
        return tuple(replace(t, kind=f"{part.name}{'/' if t.kind else ''}{t.kind}") for t in turns)

    def prefixes(self) -> Sequence[Prompt]:
        return [prompt for _, source in self._parts for prompt in source.prefixes()]
