"""The Knative pod autoscaler by its published rules: a stable and a panic window. Pure.

Both windows hold a mean of concurrency. What the stable one asks for is the size; where the short
one asks for a multiple of what is ready, it panics: the largest size asked for counts, and nothing
shrinks until a whole stable window after the last such moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.sim.autoscaling.hpa import Gauge
from services.sim.controller import Observation, Orders


@dataclass(frozen=True, slots=True)
class KpaConfig:
    """One KPA; the defaults are those of Knative."""

    target: float  # concurrency of each replica
    min_replicas: int = 1
    max_replicas: int = 100
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0  # a tenth of the stable one
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_s: float = 0.0


@dataclass(slots=True)
class Kpa:
    """What one KPA remembers."""

    config: KpaConfig
    panicked_at: float | None = None
    panic_size: int = 0  # the most asked for in this panic
    delayed: list[tuple[float, int]] = field(default_factory=list)  # when, how many

    def begin(self, now: float, num_ready: int) -> None:
        """Begin in panic where more than one serve: they are kept until something is known."""
        self.panicked_at = now if num_ready > 1 else None
        self.panic_size = num_ready

    def desired(self, now: float, num_ready: int, stable: float, panic: float) -> int:
        """Return the size wanted now, before the least and the most that are allowed.

        Args:
            num_ready: replicas that serve.
            stable: mean concurrency over the stable window.
            panic: the same over the panic window.
        """
        config, ready = self.config, max(1, num_ready)
        most = math.ceil(config.max_scale_up_rate * ready)
        least = math.floor(ready / config.max_scale_down_rate)
        by_stable = math.ceil(stable / config.target)
        by_panic = math.ceil(panic / config.target)
        self._panic(now, by_panic / ready >= config.panic_threshold)
        size = min(max(by_stable, least), most)
        if self.panicked_at is not None:
            self.panic_size = max(self.panic_size, size, min(max(by_panic, least), most))
            size = self.panic_size
        return self._delay(now, size)

    def _panic(self, now: float, is_over: bool) -> None:
        if is_over:
            self.panicked_at = now
        elif self.panicked_at is not None and self.panicked_at + self.config.stable_window_s < now:
            self.panicked_at, self.panic_size = None, 0

    def _delay(self, now: float, size: int) -> int:
        delay_s = self.config.scale_down_delay_s
        if not delay_s:
            return size
        self.delayed = [(at, was) for at, was in self.delayed if at > now - delay_s]
        self.delayed.append((now, size))
        return max(was for _, was in self.delayed)


@dataclass(slots=True)
class KpaPools:
    """A controller: one KPA for each pool, fed with what is in flight at each tick."""

    pools: Mapping[str, tuple[Kpa, Gauge]]
    tick_s: float = 2.0
    _samples: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def orders(self, seen: Observation) -> Orders:
        """Size every pool by its own concurrency."""
        sizes = {}
        for name, (kpa, gauge) in self.pools.items():
            pool, config = seen.pools[name], kpa.config
            if name not in self._samples:
                kpa.begin(seen.now, pool.num_live)
            samples = self._samples.setdefault(name, deque())
            samples.append((seen.now, gauge(pool)))
            while samples[0][0] <= seen.now - config.stable_window_s:
                samples.popleft()
            recent = [value for at, value in samples if at > seen.now - config.panic_window_s]
            stable = sum(value for _, value in samples) / len(samples)
            size = kpa.desired(seen.now, pool.num_live, stable, sum(recent) / len(recent))
            sizes[name] = min(max(size, config.min_replicas), config.max_replicas)
        return Orders(sizes)
