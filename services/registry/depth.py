"""How deep each owner holds a prompt, by bisection on the sets of owners. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, TypeVar

O = TypeVar("O", bound=Hashable)  # noqa: E741  # an owner
Group = tuple[int, AbstractSet[O]]  # strides, and who holds so many
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


@dataclass(frozen=True, slots=True)
class Depths(Generic[O]):
    """How many leading strides each owner holds: a set of owners for each number of strides.

    Many owners hold equally much of a prompt, so sets are compared and joined as a whole.
    """

    groups: Sequence[Group[O]] = ()  # the deepest first; an owner counts in the first that has it

    def of(self, owner: O) -> int:
        """Return how many strides an owner holds."""
        for num_strides, owners in self.groups:
            if owner in owners:
                return num_strides
        return 0

    def by_owner(self) -> dict[O, int]:
        """Return everybody with what they hold."""
        return {owner: n for n, owners in reversed(self.groups) for owner in owners}

    def cumulated(self) -> list[Group[O]]:
        """Return the same with all those who hold more in each set."""
        found: list[Group[O]] = []
        for num_strides, owners in self.groups:
            found.append((num_strides, owners | found[-1][1] if found else owners))
        return found


def depths_of_one_level(look: Callable[[int], AbstractSet[O]], num_strides: int) -> Depths[O]:
    """Return what `depths` does where only one level is there.

    Args:
        look: owners of a stride, counted from 1.
    """
    first: AbstractSet[O] = look(1) if num_strides else frozenset()
    if not first:
        return Depths()
    ended: list[Group[O]] = []
    if num_strides > 1:
        at_end = look(num_strides)
        within = first if at_end is first else at_end & first
        _bisect_sets(look, ended, (1, num_strides), first, within)
    whole = first
    for _, owners in ended:
        whole = whole - owners
    return Depths(([(num_strides, whole)] if whole else []) + ended[::-1])


def _bisect_sets(
    look: Callable[[int], AbstractSet[O]],
    ended: list[Group[O]],
    span: tuple[int, int],
    at_lo: AbstractSet[O],
    at_hi: AbstractSet[O],
) -> None:
    """Note, from the least depth on, who holds how much within a span and no more."""
    if at_lo is at_hi or len(at_lo) == len(at_hi):
        return
    lo, hi = span
    if hi - lo == 1:
        ended.append((lo, at_lo - at_hi))
        return
    mid = (lo + hi) // 2
    at_mid = look(mid)
    if at_mid is not at_lo:  # neighbouring strides mostly share their owners
        at_mid = at_mid & at_lo
    _bisect_sets(look, ended, (lo, mid), at_lo, at_mid)
    _bisect_sets(look, ended, (mid, hi), at_mid, at_hi if at_mid is at_hi else at_mid & at_hi)


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
