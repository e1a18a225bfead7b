"""Which limits hold at a moment: the pool's own, or those of schedules. Pure.

Where several schedules hold at once the highest limits win: none of them takes away what another
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from services.autoscaler.cron import first_start
from services.autoscaler.policy import PoolSize, Schedule


@dataclass(frozen=True, slots=True)
class Limits:
    """The least and the most replicas of a pool, and the schedules they come from."""

    min_replicas: int
    max_replicas: int
    schedules: tuple[str, ...] = ()  # empty = the pool's own


def window_start(schedule: Schedule, unix_s: float) -> float | None:
    """Return when the window began that holds at a moment, the earliest of several; None = none.

    A window has its start, and not its end.
    """
    now = datetime.fromtimestamp(unix_s, UTC)
    start = next_start(schedule, (now - timedelta(seconds=schedule.duration_seconds)).timestamp())
    return start if start <= unix_s else None


def next_start(schedule: Schedule, unix_s: float) -> float:
    """Return the first start after a moment."""
    after = datetime.fromtimestamp(unix_s, UTC)
    return first_start(schedule.start, schedule.time_zone, after).timestamp()


def active_schedules(schedules: Sequence[Schedule], unix_s: float) -> tuple[Schedule, ...]:
    """Return those that hold at a moment, as ordered in the file."""
    return tuple(s for s in schedules if window_start(s, unix_s) is not None)


def limits_at(pool: PoolSize, schedules: Sequence[Schedule], unix_s: float) -> Limits:
    """Return a pool's limits at a moment."""
    return limits_under(pool, active_schedules(schedules, unix_s))


def limits_under(pool: PoolSize, active: Sequence[Schedule]) -> Limits:
    """Return a pool's limits where these schedules hold.

    A limit that a schedule leaves out is the pool's own. So the least never exceeds the most: it
    does not within any one schedule.
    """
    named = [(s.name, s.pools[pool.name]) for s in active if pool.name in s.pools]
    if not named:
        return Limits(pool.min_replicas, pool.max_replicas)
    least = (pool.min_replicas if p.min_replicas is None else p.min_replicas for _, p in named)
    most = (pool.max_replicas if p.max_replicas is None else p.max_replicas for _, p in named)
    return Limits(max(least), max(most), tuple(name for name, _ in named))
