"""Receives whose KV lies in the pools of several prefill workers: one transfer for each shard.

To the worker it is one receive with one key. It is ready when every shard is, and it has failed
when one of them has and none of the others writes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.common.ids import BlockHash, BlockId
from services.kv.form import EXACT, UNKNOWN
from services.transfer.api import (
    NO_STATS,
    ReceiveEnd,
    SinkEvent,
    SinkMoveWanted,
    SinkReady,
    SinkReleased,
    TransferStats,
)
from services.transfer.cover import Shard, cover_fault
from services.transfer.receive import OpenRequest
from services.transfer.sink import TransferSink
from services.transfer.ticket import TicketError, read_unverified


@dataclass(slots=True)
class ShardGroup:
    """The shards of one receive and how they ended; pure."""

    key: str
    parts: tuple[str, ...]  # keys of the shards' own receives
    ended: dict[str, ReceiveEnd] = field(default_factory=dict)  # in the order they ended
    fault: SinkReleased | None = None  # the first one

    def open_parts(self) -> tuple[str, ...]:
        """Return the shards that have not ended."""
        return tuple(part for part in self.parts if part not in self.ended)

    def note(self, part: str, event: ReceiveEnd) -> bool:
        """Note the end of a shard; True if the others are to be cancelled for it."""
        self.ended[part] = event
        if isinstance(event, SinkReady) or self.fault is not None:
            return False
        self.fault = event
        return True

    def outcome(self) -> ReceiveEnd | None:
        """Return how the receive ended, once every shard has."""
        if self.open_parts():
            return None
        stats = merged_stats([event.stats for event in self.ended.values()])
        if self.fault is not None:
            return replace(self.fault, key=self.key, stats=stats)
        ready = [event for event in self.ended.values() if isinstance(event, SinkReady)]
        final = ready[0].final
        if any(
            (r.final.first, r.final.num_tokens) != (final.first, final.num_tokens) for r in ready
        ):
            why = "the shards of a prompt have different first tokens"
            return SinkReleased(self.key, "handoff_failed", why, True, stats)
        forms = {event.kv_form for event in ready}
        form = forms.pop() if len(forms) == 1 else UNKNOWN
        return SinkReady(self.key, final, stats, form)


def merged_stats(parts: Sequence[TransferStats]) -> TransferStats:
    """Add up what the shards of a receive did; times are those of the slowest."""
    planes = sorted({part.plane for part in parts})
    return TransferStats(
        plane=planes[0] if len(planes) == 1 else "mixed",
        peer=",".join(part.peer for part in parts if part.peer),
        size_bytes=sum(part.size_bytes for part in parts),
        blocks_moved=sum(part.blocks_moved for part in parts),
        blocks_deduped=sum(part.blocks_deduped for part in parts),
        open_us=max(part.open_us for part in parts),
        pull_us=max(part.pull_us for part in parts),
        nacks=sum(part.nacks for part in parts),
        blocks_attached=sum(part.blocks_attached for part in parts),
        single_shot=all(part.single_shot for part in parts),
    )


class ShardedSink:
    """A sink for receives of several shards; wraps the one that pulls them.

    What is opened at that one itself passes through.
    """

    def __init__(self, sink: TransferSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()  # guards _groups, _group_of and the groups
        self._groups: dict[str, ShardGroup] = {}
        self._group_of: dict[str, ShardGroup] = {}  # by the key of a shard's own receive

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Start the sink's threads."""
        self._on_event = on_event
        self._sink.start(self._on_sink_event)

    def open(
        self,
        key: str,
        tickets: Sequence[bytes],
        attempt: int,
        have: Sequence[bool],
        block_hashes: Sequence[BlockHash],
        traceparent: str = "",
        kv_form: str = EXACT,
    ) -> None:
        """Open every ticket, or none: they must bring each head of each layer exactly once.

        A fault is told by SinkReleased before anything was sent.
        """
        fault = self._fault_of(tickets)
        if fault is not None:
            self._on_event(SinkReleased(key, *fault, True, NO_STATS))
            return
        parts = tuple(f"{key}#{number}" for number in range(len(tickets)))
        group = ShardGroup(key, parts)
        with self._lock:
            if key in self._groups:
                raise ValueError("this key is already receiving")
            self._groups[key] = group
            self._group_of |= dict.fromkeys(parts, group)
        for part, ticket in zip(parts, tickets, strict=True):
            request = OpenRequest(
                part, ticket, attempt, tuple(have), traceparent, kv_form, is_shard=True
            )
            self._sink.open_request(request, block_hashes)

    def reserve(
        self, key: str, block_ids: Sequence[BlockId | None], tail_block: BlockId | None
    ) -> None:
        """Lend blocks to write to every shard: each writes its own part of them."""
        for part in self._parts_of(key):
            self._sink.reserve(part, block_ids, tail_block)

    def cancel(self, key: str, reason: str) -> None:
        """Abort; SinkReleased follows when no shard writes the blocks any more."""
        for part in self._parts_of(key):
            self._sink.cancel(part, reason)

    def num_open(self) -> int:
        """Receives not yet ended."""
        with self._lock:
            return len(self._groups)

    def stop(self, timeout_s: float) -> None:
        """Abort everything and join the threads."""
        self._sink.stop(timeout_s)

    def _fault_of(self, tickets: Sequence[bytes]) -> tuple[str, str] | None:
        own = self._sink.layout
        try:
            shards = [Shard.of(read_unverified(ticket), own) for ticket in tickets]
        except TicketError as error:
            return "handoff_failed", f"a ticket cannot be read: {error}"
        fault = cover_fault(own, shards)
        return None if fault is None else ("incompatible", fault)

    def _parts_of(self, key: str) -> tuple[str, ...]:
        with self._lock:
            group = self._groups.get(key)
            return group.open_parts() if group is not None else ()

    def _on_sink_event(self, event: SinkEvent) -> None:
        if isinstance(event, SinkMoveWanted):
            self._on_event(event)  # never of a shard: those are copied
            return
        outcome: ReceiveEnd | None = event
        others: tuple[str, ...] = ()
        with self._lock:
            group = self._group_of.pop(event.key, None)
            if group is not None:
                outcome, others = self._note(group, event)
        for part in others:
            self._sink.cancel(part, "another shard of the prompt has failed")
        if outcome is not None:
            self._on_event(outcome)

    def _note(
        self, group: ShardGroup, event: ReceiveEnd
    ) -> tuple[ReceiveEnd | None, tuple[str, ...]]:
        """Return how the receive ended, if it has, and the shards to cancel."""
        is_first_fault = group.note(event.key, event)
        others = group.open_parts() if is_first_fault else ()
        outcome = group.outcome()
        if outcome is not None:
            del self._groups[group.key]
        return outcome, others
