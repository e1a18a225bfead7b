"""Who of many workers has least to do, kept as loads change: a decision looks at few of them. Pure.

Above MAX_ROWS candidates only the first SHORTLIST of each role by hit and by load are priced in
full. This finds a superset of those, so that the cost model chooses as it would among all.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import NamedTuple, Protocol

from services.registry.base import LoadReport
from services.registry.cost import (
    DECODE,
    MAX_ROWS,
    MIN_RATE_TOK_S,
    SHORTLIST,
    WAITING_SHARE,
    Ask,
    Booked,
    Candidate,
    Census,
    Peers,
)
from services.registry.owners import Known, Owner

# What rounding may do to the order of two sums of the same terms: a part of their size, and a part
# of the time that the tokens of the request itself would add to both.
_RELATIVE, _TOKENS = 1e-9, 1e-6

Signature = tuple[float, ...]  # equal ones stand for equal loads


class Loads(Protocol):
    """What a store knows of its workers."""

    def load_of(self, candidate: Candidate, now_ms: int) -> LoadReport | None:
        """Return the load of a candidate that may be chosen; None of another."""
        ...

    def booked(self, owner: Owner) -> Booked:
        """Return the work it has coming."""
        ...

    def lease_until(self, slot: int) -> float:
        """Return the moment from which it may not be chosen."""
        ...


@dataclass(slots=True)
class _Order:
    """Slots by load, in groups of equal loads."""

    slack: float  # keys this close may change places
    groups: dict[Signature, list[int]] = field(default_factory=dict)  # slots in order
    heap: list[tuple[float, Signature]] = field(default_factory=list)  # groups; some are void

    def add(self, slot: int, key: float, signature: Signature) -> None:
        group = self.groups.get(signature)
        if group is None:
            self.groups[signature] = [slot]
            heapq.heappush(self.heap, (key, signature))
        else:
            insort(group, slot)

    def remove(self, slot: int, signature: Signature) -> None:
        group = self.groups[signature]
        del group[bisect_left(group, slot)]
        if not group:
            del self.groups[signature]
            if len(self.heap) > 2 * len(self.groups) + MAX_ROWS:
                self.heap = [entry for entry in self.heap if entry[1] in self.groups]
                heapq.heapify(self.heap)

    def least(self, excluded: Collection[int]) -> list[int]:
        """Return the SHORTLIST slots with the least load, and those that nearly tie with them."""
        found: list[int] = []
        seen: list[tuple[float, Signature]] = []
        limit: float | None = None
        while self.heap and (limit is None or self.heap[0][0] <= limit):
            entry = heapq.heappop(self.heap)
            group = self.groups.get(entry[1])
            if group is None or (seen and seen[-1] == entry):
                continue  # its workers have moved on, or it was emptied and filled again
            seen.append(entry)
            found += islice((s for s in group if s not in excluded), SHORTLIST)
            if limit is None and len(found) >= SHORTLIST:
                limit = entry[0] * (1 + _RELATIVE) + self.slack
        for entry in seen:
            heapq.heappush(self.heap, entry)
        return found


class _Place(NamedTuple):
    """Where a worker stands now."""

    order: float | None  # of its own `_Order`; None: it is always priced
    key: float
    signature: Signature
    queued: int


@dataclass(slots=True)
class _Pool:
    """The usable workers of one role."""

    places: dict[int, _Place] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)  # in order
    orders: dict[float, _Order] = field(default_factory=dict)  # decode: by time of a token of KV
    always: set[int] = field(default_factory=set)  # priced by what only a decision knows
    queued: int = 0

    def put(self, slot: int, place: _Place | None) -> None:
        """Move one worker; None = out."""
        old = self.places.get(slot)
        if old == place:
            return
        if old is not None:
            self._take_out(slot, old)
        if place is None:
            if old is not None:
                del self.places[slot]
                del self.slots[bisect_left(self.slots, slot)]
            return
        if old is None:
            insort(self.slots, slot)
        self.places[slot] = place
        self.queued += place.queued
        if place.order is None:
            self.always.add(slot)
            return
        order = self.orders.get(place.order)
        if order is None:
            order = self.orders[place.order] = _Order(place.order * _TOKENS)
        order.add(slot, place.key, place.signature)

    def promising(self, by_hit: Iterable[int], excluded: Collection[int]) -> set[int]:
        """Return slots among which are the first by hit and the first by load."""
        mine = (s for s in by_hit if s in self.places and s not in excluded)
        found = set(islice(mine, SHORTLIST))
        if len(found) < SHORTLIST:
            rest = (s for s in self.slots if s not in found and s not in excluded)
            found.update(list(islice(rest, SHORTLIST - len(found))))
        found.update(slot for slot in self.always if slot not in excluded)
        for order in self.orders.values():
            found.update(order.least(excluded))
        return found

    def peers(self, excluded: Collection[int]) -> Peers:
        """Return how many there are without the excluded, and what they have queued."""
        out = [place for slot in excluded if (place := self.places.get(slot)) is not None]
        return Peers(len(self.places) - len(out), self.queued - sum(p.queued for p in out))

    def _take_out(self, slot: int, place: _Place) -> None:
        self.queued -= place.queued
        if place.order is None:
            self.always.discard(slot)
            return
        order = self.orders[place.order]
        order.remove(slot, place.signature)
        if not order.groups:
            del self.orders[place.order]


class CandidateIndex:
    """The candidates of a router, by role, hit and load."""

    def __init__(self, loads: Loads, touched: set[int], candidates: Sequence[Candidate]) -> None:
        """Args:
        touched: slots of which something has changed, filled by the store, emptied here.
        """
        self._loads = loads
        self._touched = touched
        self._candidates: dict[int, Candidate] = {}
        self._pools = {True: _Pool(), False: _Pool()}  # is prefill
        self._leases: list[tuple[float, int]] = []  # a heap, one entry a slot
        self._leased: set[int] = set()
        self._owners: set[Owner] = set()  # that may be chosen
        self.known = Known(self._owners)
        self.replace(candidates)

    def replace(self, candidates: Sequence[Candidate]) -> None:
        """Choose among these from now on."""
        now = {candidate.slot: candidate for candidate in candidates}
        for slot, old in self._candidates.items():
            if now.get(slot) != old:
                self._put(old, None)
        self._touched.update(s for s, c in now.items() if self._candidates.get(s) != c)
        self._candidates = now

    def refresh(self, now_ms: int) -> None:
        """Look at all that has changed."""
        while self._leases and self._leases[0][0] <= now_ms:
            _, slot = heapq.heappop(self._leases)
            self._leased.discard(slot)
            self._touched.add(slot)
        for slot in self._touched:
            candidate = self._candidates.get(slot)
            if candidate is not None:
                load = self._loads.load_of(candidate, now_ms)
                self._put(candidate, load)
                if load is not None and slot not in self._leased:
                    self._leased.add(slot)
                    heapq.heappush(self._leases, (self._loads.lease_until(slot), slot))
        self._touched.clear()

    def promising(self, by_hit: Iterable[int], ask: Ask) -> tuple[Iterable[int], Census]:
        """Return slots that hold all who can be chosen, and how many there are altogether.

        Args:
            by_hit: slots of all who hold something of the prompt, those that hold most first;
                gone through no further than needed.
        """
        prefill, decode, excluded = self._pools[True], self._pools[False], ask.excluded
        census = Census(prefill.peers(excluded), decode.peers(excluded))
        if census.num_rows <= MAX_ROWS:
            return (s for s in (*prefill.slots, *decode.slots) if s not in excluded), census
        first, second = tee(by_hit)  # whom one role has looked at the other need not rank again
        slots = decode.promising(first, excluded)
        if ask.force != DECODE:
            slots |= prefill.promising(second, excluded)
        return sorted(slots), census

    def candidate(self, slot: int) -> Candidate:
        """Return who is in a slot."""
        return self._candidates[slot]

    def _put(self, candidate: Candidate, load: LoadReport | None) -> None:
        owner = (candidate.slot, candidate.gen)
        pool = self._pools[candidate.is_prefill]
        if (load is not None) != (owner in self._owners):
            self._owners ^= {owner}
            self.known.forget()
        if load is None:
            pool.put(candidate.slot, None)
            return
        pool.put(candidate.slot, _place(candidate, load, self._loads.booked(owner)))


def _place(candidate: Candidate, load: LoadReport, booked: Booked) -> _Place:
    queued = load.queued_uncached_tokens + booked.prefill_tokens
    if candidate.is_prefill:
        if candidate.newness > 0 or load.rate_tok_s < MIN_RATE_TOK_S:
            return _Place(None, 0.0, (), queued)
        return _Place(0.0, queued / load.rate_tok_s, (queued, load.rate_tok_s), queued)
    if load.tbt_a_us <= 0:
        return _Place(None, 0.0, (), queued)
    waiting = load.waiting + booked.in_flight
    resident = load.resident_tokens + booked.resident_tokens
    key = load.tbt_a_us * (1 + WAITING_SHARE * waiting) + load.tbt_b_us * resident
    return _Place(load.tbt_b_us, key, (load.tbt_a_us, waiting, resident), queued)
