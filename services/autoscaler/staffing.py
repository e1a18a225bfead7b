"""Which replicas start, are cancelled or leave, so that a pool has the size decided. Pure.

Those that start are given up before any that serves, and those that serve by how little they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.autoscaler.observation import Replica
from services.autoscaler.policy import VictimPolicy
from services.autoscaler.sizing import Sizing


@dataclass(frozen=True, slots=True)
class Staffing:
    """What is done to the replicas of a pool."""

    sizing: Sizing
    cancel: tuple[str, ...]
    drain: tuple[str, ...]
    start: int


def staffing_of(sizing: Sizing) -> Staffing:
    """Return what makes the pool as large as decided."""
    staff = sizing.staff
    excess = max(staff.num_live - sizing.desired, 0)
    unborn = _in_order(sizing, staff.starting, VictimPolicy.NEWEST)[:excess]
    victims = _in_order(sizing, staff.ready, sizing.pool.drain.victim_policy)
    return Staffing(
        sizing,
        cancel=(*(r.replica_id for r in staff.failed), *unborn),
        drain=victims[: excess - len(unborn)],
        start=max(sizing.desired - staff.num_live, 0),
    )


def within_free(staffings: Sequence[Staffing], cap: int | None) -> list[Staffing]:
    """Put off starts that the budget has no accelerators for until replicas that leave are gone."""
    if cap is None:
        return list(staffings)
    free = cap - sum(_held(s) * s.sizing.pool.accelerators_per_replica for s in staffings)
    plans = []
    for plan in staffings:
        each = plan.sizing.pool.accelerators_per_replica
        start = plan.start if each == 0 else min(plan.start, max(free, 0) // each)
        free -= start * each
        plans.append(replace(plan, start=start))
    return plans


def _held(plan: Staffing) -> int:
    return len(plan.sizing.seen.replicas) - len(plan.cancel)


def _in_order(sizing: Sizing, replicas: Sequence[Replica], policy: VictimPolicy) -> tuple[str, ...]:
    """Return replicas by who leaves first; those named before are named again."""
    named = {replica_id: i for i, replica_id in enumerate(sizing.state.leaving)}

    def key(replica: Replica) -> tuple[int, int, float, str]:
        held = replica.kv_tokens_used if policy is VictimPolicy.LEAST_KV_BLOCKS else 0
        rank = named.get(replica.replica_id, len(named))
        return rank, held, -replica.since, replica.replica_id

    return tuple(r.replica_id for r in sorted(replicas, key=key))
