"""Growth at once where the last seconds alone ask for a multiple of what works. Pure.

Growth in panic skips the stabilisation window, not the rate policies. Nothing shrinks until long
after the last tick of it: a calm figure right after a burst is what the new replicas achieve.
"""

from __future__ import annotations

from dataclasses import replace

from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Ask


def with_panic(sizing: Sizing, now: float) -> Sizing:
    """Let nothing shrink while panic lasts, and for a while after."""
    panic = sizing.pool.behavior.scale_up.panic
    if not panic.enabled:
        return sizing
    state = sizing.state
    recent = tuple(a for a in state.recent if now - a.at < panic.window_seconds and a.at < now)
    if any(p.value is not None for p in sizing.proposals):
        recent = (*recent, Ask(now, sizing.asked))
    mean = sum(a.replicas for a in recent) / max(len(recent), 1)
    is_multiple = mean * 100 >= max(len(sizing.staff.ready), 1) * panic.threshold_percent
    # It begins where there are too few, and goes on until those asked for work.
    is_more = sizing.asked > sizing.before or state.panicked_at is not None
    at = now if is_multiple and is_more else state.panicked_at
    is_on = at is not None and now - at <= panic.hold_seconds
    state = replace(state, recent=recent, panicked_at=at if is_on else None)
    sizing = replace(sizing, state=state, is_panicking=is_on)
    if not is_on:
        return sizing
    size = max(sizing.before, sizing.desired)
    return sizing.moved(size, "panic", f"nothing shrinks for {panic.hold_seconds} s")
