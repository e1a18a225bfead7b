"""Whether the transfers of one receive bring every layer and head of a pool exactly once; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.kv.layout import KvLayout
from services.transfer.pairing import Range
from services.transfer.ticket import Ticket

MAX_SHARDS = 64  # transfers of one receive


@dataclass(frozen=True, slots=True)
class Shard:
    """What one prefill pool holds, in the model's numbers."""

    layers: Range
    heads: Range

    @classmethod
    def of(cls, ticket: Ticket, own: KvLayout) -> Shard:
        """Read what a ticket says of its issuer's pool; one that says nothing holds all."""
        return cls(
            ticket.layers if ticket.layers[1] else (0, own.total_layers),
            ticket.heads if ticket.heads[1] else (0, own.total_heads),
        )

    def is_of(self, layout: KvLayout) -> bool:
        """Tell whether a pool holds just this."""
        return (self.layers, self.heads) == (layout.layers, layout.heads)

    def covers(self, layer: int, head: int) -> bool:
        """Tell whether it holds one head of one layer."""
        return _holds(self.layers, layer) and _holds(self.heads, head)


def cover_fault(own: KvLayout, shards: Sequence[Shard]) -> str | None:
    """Say what of a pool would come never or more than once, or None when all of it comes once.

    What a prefill pool holds beyond ours is cut off and does no harm.
    """
    if not 0 < len(shards) <= MAX_SHARDS:
        return f"{len(shards)} transfers for one receive, 1 to {MAX_SHARDS} are possible"
    for number, shard in enumerate(shards):
        why = _shard_fault(own, shard)
        if why is not None:
            return f"transfer {number}: {why}: this worker has {own}"
    # Between two neighbouring cuts nothing changes: one cell speaks for all there.
    for lo, hi in _cells(own.layers, (shard.layers for shard in shards)):
        for first, end in _cells(own.heads, (shard.heads for shard in shards)):
            count = sum(shard.covers(lo, first) for shard in shards)
            if count != 1:
                times = "no transfer" if count == 0 else f"{count} transfers"
                return f"layers {lo}-{hi} of heads {first}-{end} come from {times}: have {own}"
    return None


def _shard_fault(own: KvLayout, shard: Shard) -> str | None:
    for name, (lo, hi), (first, end), total in (
        ("layer", shard.layers, own.layers, own.total_layers),
        ("KV head", shard.heads, own.heads, own.total_heads),
    ):
        if not 0 <= lo < hi <= total:
            return f"{name}s {lo}-{hi} of {total} are no range"
        if hi <= first or lo >= end:
            return f"no {name} in common with {name}s {lo}-{hi}"
    return None


def _cells(own: Range, ranges: Iterable[Range]) -> list[Range]:
    """Cut our range wherever one of the others begins or ends."""
    inside = {cut for each in ranges for cut in each if own[0] < cut < own[1]}
    cuts = sorted({*own, *inside})
    return list(itertools.pairwise(cuts))


def _holds(held: Range, at: int) -> bool:
    return held[0] <= at < held[1]
