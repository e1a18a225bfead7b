"""When KV has crossed from one simulated worker to another: a queue at each worker's line. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.sim.performance import PerformanceModel


@dataclass(frozen=True, slots=True)
class Handoff:
    """KV that one worker fetches from another."""

    source: int  # slots
    sink: int
    num_tokens: int
    tail_tokens: int  # of them, those that are there only when the prefill is over
    ready_at: float  # when the first of them can be fetched


@dataclass(slots=True)
class Lines:
    """Each worker has one line, and what comes first has the whole of it."""

    num_bytes: int = 0  # that crossed
    wait_s: float = 0.0  # for a line, all in all
    _free_at: dict[int, float] = field(default_factory=dict)

    def fetch(
        self, handoff: Handoff, source: PerformanceModel, sink: PerformanceModel, now: float
    ) -> float:
        """Return when the last of it has arrived; blocks cross while the prefill goes on."""
        ours, theirs = source.network, sink.network
        bytes_s = min(ours.bytes_s, theirs.bytes_s)
        free_at = max(self._free_at.get(slot, 0.0) for slot in (handoff.source, handoff.sink))
        begin = max(handoff.ready_at, free_at)
        size = handoff.num_tokens * ours.token_bytes
        tail_s = min(handoff.num_tokens, handoff.tail_tokens) * ours.token_bytes / bytes_s
        done = max(begin + size / bytes_s, now + tail_s)
        self._free_at[handoff.source] = self._free_at[handoff.sink] = done
        self.num_bytes += size
        self.wait_s += max(0.0, begin - handoff.ready_at)
        return done + max(ours.latency_s, theirs.latency_s)

    def forget(self, slot: int) -> None:
        """A worker is gone; another one may take its slot."""
        self._free_at.pop(slot, None)
