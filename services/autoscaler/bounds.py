"""The least and the most replicas of a pool, after schedules. Pure."""

from __future__ import annotations

from services.autoscaler.sizing import Sizing


def with_bounds(sizing: Sizing) -> Sizing:
    """Keep within the limits that hold now; none has fewer than one here."""
    limits, floor = sizing.limits, sizing.floor
    by = f" by schedule {', '.join(limits.schedules)}" if limits.schedules else ""
    if sizing.desired < floor:
        return sizing.moved(floor, "bounds", f"never fewer than {floor}{by}")
    most = max(limits.max_replicas, floor)
    return sizing.moved(min(sizing.desired, most), "bounds", f"never more than {most}{by}")
