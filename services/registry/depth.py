"""How deep each owner holds a prompt, by bisection on the sets of owners. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

O = TypeVar("O", bound=Hashable)  # noqa: E741  # an owner
MAX_LEVEL = 3  # GPU memory; a level counts for those below it too


def depths(look: Callable[[int], Mapping[O, int]], num_strides: int) -> dict[int, dict[O, int]]:
    """Return, per level and owner, how many leading strides it holds at that level or better.

    Caches are prefix-closed, so the sets only shrink with depth and are read only where they
    differ. A hole makes an estimate wrong, in the same way as in `route.lua`.

    Args:
        look: owners of a stride, counted from 1, each with its level.
    """
    found: dict[int, dict[O, int]] = {level: {} for level in range(1, MAX_LEVEL + 1)}
    if num_strides == 0:
        return found
    first = dict(look(1))
    for owner, level in first.items():
        for counted in range(1, level + 1):
            found[counted][owner] = num_strides
    if num_strides > 1 and first:
        _bisect(look, found, (1, num_strides), first, _within(look(num_strides), first))
    return found


def _bisect(
    look: Callable[[int], Mapping[O, int]],
    found: dict[int, dict[O, int]],
    span: tuple[int, int],
    at_lo: dict[O, int],
    at_hi: dict[O, int],
) -> None:
    if sum(at_lo.values()) == sum(at_hi.values()):
        return
    lo, hi = span
    if hi - lo == 1:
        for owner, level in at_lo.items():
            for counted in range(at_hi.get(owner, 0) + 1, level + 1):
                found[counted][owner] = lo
        return
    mid = (lo + hi) // 2
    at_mid = _within(look(mid), at_lo)
    _bisect(look, found, (lo, mid), at_lo, at_mid)
    _bisect(look, found, (mid, hi), at_mid, _within(at_mid, at_hi))


def _within(owners: Mapping[O, int], limits: Mapping[O, int]) -> dict[O, int]:
    return {o: min(level, limits[o]) for o, level in owners.items() if o in limits}
