"""How deep each owner holds a prompt, by bisection on the sets of owners. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

O = TypeVar("O", bound=Hashable)  # noqa: E741  # an owner
MAX_LEVEL = 3  # GPU memory; a level counts for those below it too


def depths(
    look: Callable[[int], Mapping[O, int]],
    num_strides: int,
    levels: Sequence[int] = tuple(range(1, MAX_LEVEL + 1)),
) -> dict[int, dict[O, int]]:
    """Return, per level and owner, how many leading strides it holds at that level or better.

    Caches are prefix-closed, so the sets only shrink with depth and are read only where they
    differ. A hole makes an estimate wrong, in the same way as in `route.lua`.

    Args:
        look: owners of a stride, counted from 1, each with its level.
        levels: those that are asked for.
    """
    found: dict[int, dict[O, int]] = {level: {} for level in levels}
    if num_strides == 0:
        return found
    first = look(1)
    for level, at_level in found.items():
        at_level.update({o: num_strides for o, held in first.items() if held >= level})
    if num_strides > 1 and first:
        _bisect(look, found, (1, num_strides), first, _within(look(num_strides), first))
    return found


def _bisect(
    look: Callable[[int], Mapping[O, int]],
    found: dict[int, dict[O, int]],
    span: tuple[int, int],
    at_lo: Mapping[O, int],
    at_hi: Mapping[O, int],
) -> None:
    if at_lo is at_hi or sum(at_lo.values()) == sum(at_hi.values()):
        return
    lo, hi = span
    if hi - lo == 1:
        for level, at_level in found.items():
            at_level.update({o: lo for o, held in at_lo.items() if at_hi.get(o, 0) < level <= held})
        return
    mid = (lo + hi) // 2
    at_mid = _within(look(mid), at_lo)
    _bisect(look, found, (lo, mid), at_lo, at_mid)
    _bisect(look, found, (mid, hi), at_mid, _within(at_mid, at_hi))


def _within(owners: Mapping[O, int], limits: Mapping[O, int]) -> Mapping[O, int]:
    if owners is limits:
        return limits  # neighbouring strides mostly share their owners
    return {o: min(level, limits[o]) for o, level in owners.items() if o in limits}
