"""A pool on its way through the steps of a decision: a frozen value that each step replaces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.autoscaler.decision import Clamp, Proposal
from services.autoscaler.observation import PoolSeen, Replica, ReplicaState
from services.autoscaler.policy import Pool
from services.autoscaler.schedules import Limits
from services.autoscaler.state import PoolState

# A start that takes so many times what is expected no longer counts as capacity: decisions go on
# without it long before it is given up.
_OVERDUE = 1.5


@dataclass(frozen=True, slots=True)
class Staff:
    """The replicas of a pool, by what can be expected of them."""

    ready: tuple[Replica, ...]
    starting: tuple[Replica, ...]
    failed: tuple[Replica, ...]  # never came up
    draining: int
    incoming: int  # flips on their way here
    num_settled: int  # ready, and warm
    num_coming: int  # capacity in a while: those that start in time, come, or warm up
    num_late: int  # of those that start: overdue, not given up yet

    @property
    def num_live(self) -> int:
        """Those that are here to stay unless something is decided."""
        return len(self.ready) + len(self.starting) + self.incoming


@dataclass(frozen=True, slots=True)
class Sizing:
    """One pool at one tick."""

    pool: Pool
    seen: PoolSeen
    state: PoolState
    staff: Staff
    limits: Limits
    before: int  # the size decided last
    desired: int
    may_shrink: bool = True  # False: figures are stale or missing
    is_held: bool = False  # nothing may change for want of figures
    is_panicking: bool = False
    asked: int = 0  # by metrics, before any other step
    proposals: tuple[Proposal, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    forecast: int | None = None

    @property
    def floor(self) -> int:
        """The least it may have while it has any."""
        return max(self.limits.min_replicas, 1)

    def moved(self, desired: int, step: str, reason: str) -> Sizing:
        """Return it at another size, and why; itself where the size is the same."""
        if desired == self.desired:
            return self
        clamp = Clamp(step, self.desired, desired, reason)
        return replace(self, desired=desired, clamps=(*self.clamps, clamp))


def staff_of(
    pool: Pool, seen: PoolSeen, leaving_for: frozenset[str], incoming: int, now: float
) -> Staff:
    """Sort a pool's replicas.

    Args:
        pool: its limits in time.
        seen: its replicas.
        leaving_for: those of them on their way to the other pool.
        incoming: on their way here.
        now: the moment.
    """
    here = [r for r in seen.replicas if r.replica_id not in leaving_for]
    ready = tuple(r for r in here if r.state is ReplicaState.READY)
    begun = [r for r in here if r.state is ReplicaState.STARTING]
    deadline_s = pool.startup.failure_deadline_seconds
    starting = tuple(r for r in begun if now - r.since < deadline_s)
    late = sum(1 for r in starting if now - r.since > overdue_s(pool))
    settled = sum(1 for r in ready if is_warm(pool, r, now))
    return Staff(
        ready=ready,
        starting=starting,
        failed=tuple(r for r in begun if now - r.since >= deadline_s),
        draining=sum(1 for r in seen.replicas if r.state is ReplicaState.DRAINING),
        incoming=incoming,
        num_settled=settled,
        num_coming=len(starting) - late + incoming + len(ready) - settled,
        num_late=late,
    )


def overdue_s(pool: Pool) -> float:
    """Return how long a start may take before decisions no longer wait for it."""
    return _OVERDUE * pool.startup.expected_seconds


def is_warm(pool: Pool, replica: Replica, now: float) -> bool:
    """Tell whether a replica that serves has left its warm-up behind."""
    return now - replica.since >= pool.startup.warm_up_seconds
