"""Which request to blame for a worker's death, and which never to run again. Pure.

A request that brings down whoever runs it must not be carried through the whole fleet. From
outside nobody sees which request it was, so the rule looks at who was new there: work that has
shown a sign of progress at the dead worker is not to blame for its death.

1. A first death makes every new request there a suspect, and no more: workers die for all kinds
   of reasons.
2. At a later death only suspects among the new ones count: a request seen at one death is far
   likelier the cause of the next than one that never was.
3. If there is exactly one such suspect, it is quarantined. Several cannot be told apart, so none
   is: suspects are kept apart when they are sent again, and the next death will tell.
4. Where workers die without it at least as often, it is not the cause: power, memory and people
   kill workers too, and who is retried in such a storm meets one death after the other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAX_DEATHS = 256


@dataclass(frozen=True, slots=True)
class PoisonConfig:
    """How long work counts as new at a worker, and what is remembered of the quarantined."""

    new_for_s: float = 1.0  # without a sign of progress
    keep_apart_s: float = 2.0  # a suspect waits no longer than this for a worker to itself
    storm_s: float = 60.0  # deaths of so long ago say what is usual now
    ttl_s: float = 600.0
    max_entries: int = 1024


@dataclass(frozen=True, slots=True)
class OpenWork:
    """One request's work at a worker that died."""

    number: int  # of the request
    is_new: bool  # sent a moment ago, no progress seen
    num_deaths: int = 0  # earlier ones at which it was new as well


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who was at one more death, who is to be quarantined instead, and why."""

    suspects: tuple[int, ...]
    quarantined: int | None
    reason: str


def blame(works: Sequence[OpenWork], num_recent: int) -> Verdict:
    """Judge the death of a worker by what this router had open there.

    Args:
        num_recent: deaths of workers a short while before this one.
    """
    new = [work for work in works if work.is_new]
    suspects = [work for work in new if work.num_deaths]
    if not suspects:
        numbers = tuple(work.number for work in new)
        return Verdict(numbers, None, "first_death" if new else "none_new")
    numbers = tuple(work.number for work in suspects)
    if len(suspects) > 1:
        return Verdict(numbers, None, "several_suspects")
    num_with, num_without = suspects[0].num_deaths + 1, num_recent - suspects[0].num_deaths
    if num_without >= num_with:
        return Verdict(numbers, None, "workers_die_anyway")
    return Verdict((), suspects[0].number, "only_suspect")


class RecentDeaths:
    """How many workers died a short while ago."""

    def __init__(self, config: PoisonConfig) -> None:
        self._within_s = config.storm_s
        self._times: deque[float] = deque(maxlen=_MAX_DEATHS)

    def count(self, now: float) -> int:
        """Return the number up to now."""
        while self._times and now - self._times[0] > self._within_s:
            self._times.popleft()
        return len(self._times)

    def note(self, now: float) -> None:
        """One more."""
        self._times.append(now)


def prompt_digest(token_ids: npt.NDArray[np.uint32]) -> bytes:
    """Name a prompt without keeping it."""
    return hashlib.sha256(token_ids.astype("<u4", copy=False).tobytes()).digest()


class Quarantine:
    """Prompts that are refused for a while, per tenant; the oldest make room for new ones."""

    def __init__(self, config: PoisonConfig) -> None:
        self._config = config
        self._until: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        """Return the number of prompts remembered, those run out and not yet swept included."""
        return len(self._until)

    def add(self, tenant: str, digest: bytes, now: float) -> None:
        """Refuse this prompt from now on."""
        self._until.pop((tenant, digest), None)
        self._until[(tenant, digest)] = now + self._config.ttl_s
        while len(self._until) > self._config.max_entries:
            self._until.popitem(last=False)

    def holds(self, tenant: str, digest: bytes, now: float) -> bool:
        """Say whether this prompt is refused."""
        while self._until:
            name, until = next(iter(self._until.items()))
            if until > now:
                break
            del self._until[name]
        return (tenant, digest) in self._until
