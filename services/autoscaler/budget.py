"""What all pools may take together: never above, and opposing moves both or none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.autoscaler.policy import Budget
from services.autoscaler.sizing import Sizing


def with_budget(sizings: Sequence[Sizing], budget: Budget) -> list[Sizing]:
    """Return the pools within the budget."""
    cap = budget.accelerator_cap
    wanted = [s.desired for s in sizings]
    sizes = wanted if cap is None else _within(sizings, cap, budget)
    if any(sizes):
        sizes = _at_least(sizings, sizes, budget.min_accelerators, cap)
    return [
        s.moved(size, "budget", _reason(size, want, s, cap, budget))
        for s, size, want in zip(sizings, sizes, wanted, strict=True)
    ]


def _within(sizings: Sequence[Sizing], cap: int, budget: Budget) -> list[int]:
    wanted = [s.desired for s in sizings]
    kept = [min(max(s.before, s.limits.min_replicas), s.desired) for s in sizings]
    # What would be in use if those that shrink stayed as they are.
    unshrunk = [max(s.before, s.desired) for s in sizings]
    is_opposing = any(s.desired < s.before for s in sizings) and any(
        s.desired > s.before for s in sizings
    )
    if _total(sizings, unshrunk) <= cap:
        return wanted
    if not is_opposing or budget.allow_rebalance_at_cap:
        free = cap - _total(sizings, kept)
    else:
        free = cap - _total(sizings, [s.before for s in sizings])
    if _total(sizings, kept) > cap:
        shrunk = _shrunk(sizings, kept, cap)
        # The last replica taken may have been larger than what was missing.
        return _grown(sizings, shrunk, cap - _total(sizings, shrunk)) if all(shrunk) else shrunk
    grown = _grown(sizings, kept, max(free, 0))
    before = [s.before for s in sizings]
    is_in_vain = (
        is_opposing
        and budget.allow_rebalance_at_cap
        and not any(size > s.before for s, size in zip(sizings, grown, strict=True))
    )
    # One gives up, and it is not enough for the other: then it keeps what it has.
    return before if is_in_vain and _total(sizings, before) <= cap else grown


def _grown(sizings: Sequence[Sizing], kept: Sequence[int], free: int) -> list[int]:
    """Share what is free in proportion to what each asks for more."""
    sizes = list(kept)
    asks = [
        max(s.desired - k, 0) * s.pool.accelerators_per_replica
        for s, k in zip(sizings, kept, strict=True)
    ]
    total = sum(asks)
    for i, sizing in enumerate(sizings):
        each = sizing.pool.accelerators_per_replica
        if each == 0:
            sizes[i] = sizing.desired
        elif asks[i]:
            sizes[i] += min(asks[i], free * asks[i] // total) // each
    # Whole replicas leave a rest: to the pool that got the smallest share of its ask.
    while True:
        left = free - (_total(sizings, sizes) - _total(sizings, kept))
        fits = [
            i
            for i, s in enumerate(sizings)
            if sizes[i] < s.desired and s.pool.accelerators_per_replica <= left
        ]
        if not fits:
            return sizes
        sizes[min(fits, key=lambda i: (sizes[i] / max(sizings[i].desired, 1), i))] += 1


def _shrunk(sizings: Sequence[Sizing], kept: Sequence[int], cap: int) -> list[int]:
    """Take from the pool that is furthest above its least; go below that where nothing else is."""
    sizes = list(kept)
    for floors in ([s.floor for s in sizings], [1 for _ in sizings]):
        while _total(sizings, sizes) > cap:
            above = [
                i
                for i, s in enumerate(sizings)
                if sizes[i] > floors[i] and s.pool.accelerators_per_replica > 0
            ]
            if not above:
                break
            sizes[max(above, key=lambda i: (sizes[i] / max(floors[i], 1), -i))] -= 1
    # One pool alone answers nothing.
    return sizes if _total(sizings, sizes) <= cap else [0 for _ in sizings]


def _at_least(
    sizings: Sequence[Sizing], sizes: list[int], least: int, cap: int | None
) -> list[int]:
    """Give to the pool that has the smallest share of what it may have."""
    sizes = list(sizes)
    while (total := _total(sizings, sizes)) < least:
        fits = [
            i
            for i, s in enumerate(sizings)
            if sizes[i] < s.limits.max_replicas
            and s.pool.accelerators_per_replica > 0
            and (cap is None or total + s.pool.accelerators_per_replica <= cap)
        ]
        if not fits:
            break
        sizes[min(fits, key=lambda i: (sizes[i] / sizings[i].limits.max_replicas, i))] += 1
    return sizes


def _total(sizings: Sequence[Sizing], sizes: Sequence[int]) -> int:
    return sum(
        s.pool.accelerators_per_replica * size for s, size in zip(sizings, sizes, strict=True)
    )


def _reason(size: int, wanted: int, sizing: Sizing, cap: int | None, budget: Budget) -> str:
    if size < wanted:
        return f"no more than {cap} accelerators for all pools"
    if size <= sizing.before and wanted < sizing.before:
        return f"what it gives up is not enough for the other pool, at {cap} accelerators"
    return f"no fewer than {budget.min_accelerators} accelerators for all pools"
