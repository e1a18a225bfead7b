"""Replicas on their way out: when each may be stopped. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from services.autoscaler.decision import Decision
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline, Pool
from services.autoscaler.signals import WorkerCounts

LOST_S = 10.0  # without a lease for so long: its process is gone, or nobody can reach it


@dataclass(frozen=True, slots=True)
class Drain:
    """One replica that is to leave."""

    replica_id: str
    pool: str
    began_at: float
    deadline_at: float
    on_deadline: OnDeadline
    missed_since: float | None = None  # its worker has no lease; None = it had one at the last tick


@dataclass(frozen=True, slots=True)
class Stop:
    """A replica to be stopped now."""

    replica_id: str
    pool: str
    reason: str  # empty, deadline, lost


def begun(decision: Decision, pools: Mapping[str, Pool], now: float) -> tuple[Drain, ...]:
    """Return the drains that a decision asks for."""
    return tuple(
        _drain(replica_id, pools[plan.pool], now)
        for plan in decision.pools
        for replica_id in plan.drain
    )


def adopted(
    told: Mapping[str, Sequence[Replica]],
    known: Collection[str],
    pools: Mapping[str, Pool],
    now: float,
) -> tuple[Drain, ...]:
    """Take on what a driver drains and nobody remembers: who asked for it is gone.

    Args:
        told: by pool, what the driver says itself. What an operator drained is not among it.
        known: replicas that drain or change their pool as far as is known.
    """
    return tuple(
        _drain(replica.replica_id, pools[name], now)
        for name, replicas in told.items()
        for replica in replicas
        if replica.state is ReplicaState.DRAINING
        and replica.replica_id not in known
        and name in pools
    )


def still_there(
    drains: Sequence[Drain],
    told: Mapping[str, Sequence[Replica]],
    workers: Collection[str],
    now: float,
) -> tuple[Drain, ...]:
    """Forget those whose replicas have gone; note since when the others' workers are missed.

    Args:
        drains: those known so far.
        told: by pool, what the driver says.
        workers: ids of those that hold a lease.
        now: the moment.
    """
    left = {replica.replica_id for replicas in told.values() for replica in replicas}
    return tuple(
        replace(drain, missed_since=None)
        if drain.replica_id in workers
        else replace(drain, missed_since=now if drain.missed_since is None else drain.missed_since)
        for drain in drains
        if drain.replica_id in left
    )


def due(
    drains: Sequence[Drain], workers: Mapping[str, WorkerCounts], now: float
) -> tuple[Stop, ...]:
    """Return those that hold nothing any more, whose time is over, or that are lost.

    Holding nothing counts only of a worker that refuses work by its own word: else a router that
    has not heard yet could still send some.
    """
    stops = []
    for drain in drains:
        worker = workers.get(drain.replica_id)
        if worker is not None and worker.refuses_work and worker.num_held == 0:
            reason = "empty"
        elif now >= drain.deadline_at:
            reason = "deadline"
        elif drain.missed_since is not None and now - drain.missed_since > LOST_S:
            reason = "lost"
        else:
            continue
        stops.append(Stop(drain.replica_id, drain.pool, reason))
    return tuple(stops)


def _drain(replica_id: str, pool: Pool, now: float) -> Drain:
    limits = pool.drain
    return Drain(replica_id, pool.name, now, now + limits.deadline_seconds, limits.on_deadline)
