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
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PoisonConfig:
    """How long work counts as new at a worker, and what is remembered of the quarantined."""

    new_for_s: float = 1.0  # without a sign of progress
    keep_apart_s: float = 2.0  # a suspect waits no longer than this for a worker to itself
    ttl_s: float = 600.0
    max_entries: int = 1024


@dataclass(frozen=True, slots=True)
class OpenWork:
    """One request's work at a worker that died."""

    number: int  # of the request
    is_new: bool  # sent a moment ago, no progress seen
    is_suspect: bool  # was new at an earlier death


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to be suspected from now on, who is to be quarantined, and why."""

    suspects: tuple[int, ...]
    quarantined: int | None
    reason: str


def blame(works: Sequence[OpenWork]) -> Verdict:
    """Judge the death of a worker by what this router had open there."""
    new = [work for work in works if work.is_new]
    suspects = [work.number for work in new if work.is_suspect]
    if len(suspects) == 1:
        return Verdict((), suspects[0], "only_suspect")
    if suspects:
        return Verdict((), None, "several_suspects")
    return Verdict(tuple(work.number for work in new), None, "first_death" if new else "none_new")


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
