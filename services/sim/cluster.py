"""What is simulated: how many workers of which kind, routers, and how late hints are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.admission import AdmissionConfig
from services.sim.performance import PerformanceModel, default_model

PREFILL, DECODE, AGGREGATED = "prefill", "decode", "aggregated"
POOLS = (PREFILL, DECODE, AGGREGATED)


@dataclass(frozen=True, slots=True)
class Group:
    """Workers of one pool that differ from its others."""

    pool: str
    count: int
    model: PerformanceModel


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Two pools, or one whose workers do both. Either is a whole cluster; they are not mixed."""

    num_prefill: int = 8
    num_decode: int = 8
    num_aggregated: int = 0  # above 0: the only pool
    model: PerformanceModel = field(default_factory=default_model)
    groups: tuple[Group, ...] = ()  # besides these
    num_routers: int = 1
    max_output_tokens: int = 2048  # what clients allow; their answers are shorter
    hold: float = 1.0  # price of a second in which a prefill worker decodes, as routers see it
    hint_lag_s: float = 0.01  # from a change of a cache to its hints
    hint_loss: float = 0.0  # share of publishes that never arrive
    heartbeat_s: float = 0.5
    # For a worker to end what it has. Then the rest goes on elsewhere, if it leaves; one that was
    # to change its pool stays in the old one.
    drain_s: float = 120.0
    # Seconds of a worker's start, by its name; inf = it never comes up. None = its model's.
    startup: Callable[[str], float] | None = None
    hold_s: float = 0.0  # a request waits so long at its router where nobody can take it
    max_held: int = 256  # such requests at once; more are refused
    admission: AdmissionConfig | None = None  # None = routers let all in at once

    def __post_init__(self) -> None:
        sizes = self.sizes()
        if any(count < 0 for count in (*sizes.values(), *(g.count for g in self.groups))):
            raise ValueError("a pool has no negative number of workers")
        has_one, has_two = bool(sizes[AGGREGATED]), bool(sizes[PREFILL] or sizes[DECODE])
        if has_one == has_two:
            raise ValueError("give prefill and decode workers, or aggregated ones")
        if has_two and not (sizes[PREFILL] and sizes[DECODE]):
            raise ValueError("each of two pools needs a worker")
        if self.num_routers < 1:
            raise ValueError("a cluster needs a router")
        if min(self.drain_s, self.hold_s, self.max_held) < 0:
            raise ValueError("no time or number of a cluster's requests is negative")

    def sizes(self) -> dict[str, int]:
        """Return the number of workers of each pool."""
        if self.num_aggregated:
            sizes = {PREFILL: 0, DECODE: 0, AGGREGATED: self.num_aggregated}
        else:
            sizes = {PREFILL: self.num_prefill, DECODE: self.num_decode, AGGREGATED: 0}
        for group in self.groups:
            sizes[group.pool] += group.count
        return sizes

    def members(self) -> list[tuple[str, PerformanceModel]]:
        """Return the pool and the kind of every worker."""
        plain = {PREFILL: self.num_prefill, DECODE: self.num_decode}
        if self.num_aggregated:
            plain = {AGGREGATED: self.num_aggregated}
        found = [(pool, self.model) for pool, count in plain.items() for _ in range(count)]
        return found + [(g.pool, g.model) for g in self.groups for _ in range(g.count)]
