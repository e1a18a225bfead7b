"""A queue shared by tenants: deficit round robin among them, priority within each. Pure.

Turns are weighed by cost, so a tenant of long prompts gets no more than one of short ones. Within
a tenant a level of priority is worth `ageing_s` of waiting: what waits longer is overtaken less and
less, and in the end not at all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

QUANTUM = 256  # cost a tenant of weight 1 may spend in one round


@dataclass(slots=True, eq=False)
class Waiting:
    """One thing in the queue; whoever adds it keeps it to remove it."""

    tenant: str
    priority: int  # higher goes first
    cost: int  # in whatever unit turns are weighed by; at least 1
    size_bytes: int
    queued_at: float
    rank: float = 0.0  # set by the queue; lower goes first


@dataclass(slots=True, eq=False)
class _Flow:
    """What one tenant has in the queue, first to go first."""

    tenant: str
    weight: float
    deficit: float = 0.0  # cost it may still spend in this round
    cost: int = 0
    waiting: list[Waiting] = field(default_factory=list)


class FairQueue:
    """Who goes next. Bounds are the caller's: `len` and `size_bytes` say what is here."""

    def __init__(self, weights: Mapping[str, float], ageing_s: float) -> None:
        """Start empty.

        Args:
            weights: shares of tenants; one that is not named has 1.
            ageing_s: waiting that makes up for one level of priority.
        """
        if ageing_s <= 0 or any(weight <= 0 for weight in weights.values()):
            raise ValueError("ageing and weights must be positive")
        self._weights = weights
        self._ageing_s = ageing_s
        self._flows: dict[str, _Flow] = {}
        self._ring: deque[_Flow] = deque()  # the tenants with something waiting; [0] has the turn
        self._has_quantum = False  # the tenant whose turn it is has had this round's
        self._num = 0
        self.cost = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Waiting]:
        for flow in self._ring:
            yield from flow.waiting

    def add(self, waiting: Waiting) -> None:
        """Put something behind what goes before it."""
        waiting.rank = self._rank(waiting.priority, waiting.queued_at)
        flow = self._flows.get(waiting.tenant)
        if flow is None:
            flow = _Flow(waiting.tenant, self._weights.get(waiting.tenant, 1.0))
            self._flows[waiting.tenant] = flow
            self._ring.append(flow)
        insort(flow.waiting, waiting, key=_rank_of)
        flow.cost += waiting.cost
        self._count(waiting, 1)

    def remove(self, waiting: Waiting) -> None:
        """Take something out, wherever it stands; it must be here."""
        flow = self._flows[waiting.tenant]
        at = bisect_left(flow.waiting, waiting.rank, key=_rank_of)
        while flow.waiting[at] is not waiting:
            at += 1
        del flow.waiting[at]
        flow.cost -= waiting.cost
        self._count(waiting, -1)
        if not flow.waiting:
            if self._ring[0] is flow:
                self._has_quantum = False
            self._ring.remove(flow)
            del self._flows[waiting.tenant]

    def head(self) -> Waiting | None:
        """Return what goes next; the same until it is taken, removed or overtaken."""
        num_passed = 0
        while self._ring:
            flow = self._ring[0]
            first = flow.waiting[0]
            if flow.deficit < first.cost and not self._has_quantum:
                flow.deficit += QUANTUM * flow.weight
                self._has_quantum = True
            if flow.deficit >= first.cost:
                return first
            self._ring.rotate(-1)
            self._has_quantum = False
            num_passed += 1
            if num_passed == len(self._ring):
                self._skip_rounds()
                num_passed = 0
        return None

    def take(self, waiting: Waiting) -> None:
        """Take out what `head` returned; its tenant has spent its cost."""
        self._flows[waiting.tenant].deficit -= waiting.cost
        self.remove(waiting)

    def cost_ahead(self, tenant: str, priority: int, cost: int, now: float) -> float:
        """Estimate what goes before something that would be added now, in cost.

        Of its own tenant that is exact as long as nothing more comes; of every other it is what
        the other may spend meanwhile by its weight, if it has so much here.
        """
        own = self._flows.get(tenant)
        ahead = 0.0
        if own is not None:
            at = bisect_right(own.waiting, self._rank(priority, now), key=_rank_of)
            ahead = own.cost - sum(w.cost for w in own.waiting[at:])
        weight = self._weights.get(tenant, 1.0)
        rounds = ceil((ahead + cost) / (QUANTUM * weight))
        others = (f for f in self._ring if f is not own)
        return ahead + sum(min(f.cost, f.weight * rounds * QUANTUM) for f in others)

    def displaced_by(self, newcomer: Waiting) -> Waiting | None:
        """Return what should make room for a newcomer when nothing more fits; None = nothing.

        It is the last of the tenant that has most here for its weight, and only if the newcomer's
        tenant would have less, or the newcomer goes before it.
        """
        if not self._ring:
            return None
        largest = max(self._ring, key=lambda f: f.cost / f.weight)
        last = largest.waiting[-1]
        if newcomer.tenant == largest.tenant:
            rank = self._rank(newcomer.priority, newcomer.queued_at)
            return last if rank < last.rank else None
        own = self._flows.get(newcomer.tenant)
        share = newcomer.cost + (own.cost if own is not None else 0)
        share_of_weight = share / self._weights.get(newcomer.tenant, 1.0)
        return last if share_of_weight < largest.cost / largest.weight else None

    def check_integrity(self) -> None:
        """Raise AssertionError when the totals are not those of what is here."""
        assert sorted(self._flows) == sorted(flow.tenant for flow in self._ring)
        for flow in self._ring:
            assert flow.waiting
            assert flow.deficit >= 0
            assert flow.cost == sum(w.cost for w in flow.waiting)
            ranks = [w.rank for w in flow.waiting]
            assert ranks == sorted(ranks)
        assert self._num == sum(1 for _ in self)
        assert self.cost == sum(w.cost for w in self)
        assert self.size_bytes == sum(w.size_bytes for w in self)

    def _rank(self, priority: int, queued_at: float) -> float:
        # Both ages grow alike, so the order of two never changes: no timers, no second sorting.
        return queued_at - priority * self._ageing_s

    def _count(self, waiting: Waiting, sign: int) -> None:
        self._num += sign
        self.cost += sign * waiting.cost
        self.size_bytes += sign * waiting.size_bytes

    def _skip_rounds(self) -> None:
        """Nobody could go in a whole round: grant at once all further rounds like it."""
        rounds = min(
            ceil((f.waiting[0].cost - f.deficit) / (QUANTUM * f.weight)) for f in self._ring
        )
        for flow in self._ring:
            flow.deficit += (rounds - 1) * QUANTUM * flow.weight


def _rank_of(waiting: Waiting) -> float:
    return waiting.rank
