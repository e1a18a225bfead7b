"""The Kubernetes HPA's stabilisation windows: never on the word of one tick alone. Pure.

Shrinking looks at the largest ask of its window, growing at the smallest of its own. Only asks that
can still be an extreme are kept.
"""

from __future__ import annotations

from dataclasses import replace

from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Ask


def with_stabilization(sizing: Sizing, now: float) -> Sizing:
    """Take the size that is nearest the one of now among those asked for in the windows."""
    behavior, state, asked = sizing.pool.behavior, sizing.state, sizing.desired
    down_s = behavior.scale_down.stabilization_window_seconds
    up_s = behavior.scale_up.stabilization_window_seconds
    # The first tick knows nothing of what was asked for before: as if what there is had been.
    highs = state.highs or (Ask(now, sizing.before),)
    lows = state.lows or (Ask(now, sizing.before),)
    most = max([asked, *(a.replicas for a in highs if a.at > now - down_s)])
    least = min([asked, *(a.replicas for a in lows if a.at > now - up_s)])
    kept_highs = tuple(a for a in highs if a.at > now - down_s and a.replicas > asked)
    kept_lows = tuple(a for a in lows if a.at > now - up_s and a.replicas < asked)
    ask = Ask(now, asked)
    state = replace(state, highs=(*kept_highs, ask), lows=(*kept_lows, ask))
    sizing = replace(sizing, state=state)
    if sizing.is_panicking:
        least = asked
    stable = min(max(sizing.before, least), most)
    if asked < stable:
        return sizing.moved(stable, "stabilization", f"{most} were wanted in the last {down_s} s")
    return sizing.moved(stable, "stabilization", f"{least} were enough in the last {up_s} s")
