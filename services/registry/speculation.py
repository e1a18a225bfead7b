"""Who will hold a prompt soon, because it was just sent there. Pure.

Kept at a few depths of a prompt only, so a long prompt costs a few writes and a look-up a few
reads; it underestimates by less than the gap between two of them. Routers in local mode keep
one of their own routes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

from services.registry.depth import Depths, depths_of_one_level

MAX_OWNERS = 8
GRACE_MS = 2000  # an entry outlives the predicted end of the prefill by this
MAX_PREFILL_MS = 120_000  # no prediction beyond this is believed

O = TypeVar("O", bound=Hashable)  # noqa: E741  # an owner: (slot, slot_gen), or a worker's name


def canonical(num_strides: int) -> list[int]:
    """Return the depths speculation is kept for: every 8th, from 256 on every 64th, and the end."""
    found = [*range(8, min(num_strides, 256) + 1, 8), *range(320, num_strides + 1, 64)]
    if num_strides and (not found or found[-1] != num_strides):
        found.append(num_strides)
    return found


def expiry_s(now_ms: float, prefill_s: float) -> int:
    """Return until when an entry counts, in whole seconds of the clock of `now_ms`."""
    done_ms = now_ms + min(MAX_PREFILL_MS, math.ceil(prefill_s * 1000))
    return math.ceil((done_ms + GRACE_MS) / 1000)


class Speculation(Generic[O]):
    """Prefix fields, each with owners and when they stop counting."""

    def __init__(self, max_fields: int | None = None) -> None:
        self._fields: OrderedDict[bytes, dict[O, int]] = OrderedDict()
        self._max_fields = max_fields

    def __len__(self) -> int:
        """Return the number of fields kept."""
        return len(self._fields)

    def note(
        self, fields: Sequence[bytes], owner: O, confirmed: int, until_s: int, now_ms: float
    ) -> None:
        """Say that `owner` will hold a prompt, beyond the strides it has confirmed."""
        for depth in canonical(len(fields)):
            if depth <= confirmed:
                continue
            name = fields[depth - 1]
            old = self._fields.pop(name, {})
            until = max(until_s, old.get(owner, 0))
            others = [(o, s) for o, s in old.items() if o != owner and s * 1000 > now_ms]
            self._fields[name] = {**dict(others[: MAX_OWNERS - 1]), owner: until}
            if self._max_fields is not None and len(self._fields) > self._max_fields:
                self._fields.popitem(last=False)

    def drop(self, name: bytes, owner: O) -> None:
        """Forget one owner of a field: it has confirmed it, or turned out not to hold it."""
        owners = self._fields.get(name)
        if owners is None:
            return
        owners.pop(owner, None)
        if not owners:
            del self._fields[name]

    def drop_all(self, names: Sequence[bytes], owner: O) -> None:
        """Forget one owner of many fields, few of which are kept."""
        for name in list(filter(self._fields.__contains__, names)):
            self.drop(name, owner)

    def strides(
        self,
        fields: Sequence[bytes],
        known: AbstractSet[O],
        confirmed: Depths[O],
        now_ms: float,
    ) -> Depths[O]:
        """Return how many strides each of `known` holds or will hold, as far as it is kept."""
        canon = canonical(len(fields))
        held = confirmed.cumulated()[::-1]

        def look(idx: int) -> AbstractSet[O]:
            depth = canon[idx - 1]
            holders: AbstractSet[O] = next((o for n, o in held if n >= depth), frozenset())
            owners = self._fields.get(fields[depth - 1])
            if owners is None:
                return holders
            coming = {o for o, s in owners.items() if s * 1000 > now_ms and o in known}
            return coming | holders if coming else holders

        found = depths_of_one_level(look, len(canon))
        return Depths([(canon[idx - 1], owners) for idx, owners in found.groups])

    def clear(self) -> None:
        """Forget everything."""
        self._fields.clear()
