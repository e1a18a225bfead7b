"""When a slow prefill is worth a second one elsewhere. Pure.

Prompts differ in length and workers in load, so what is learnt is the ratio of the time until a
prefill worker was first heard to the time the cost model predicted for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LEAST_S = 0.001  # predictions below this are noise


@dataclass(frozen=True, slots=True)
class HedgeConfig:
    """Off unless enabled: a second prefill costs the fleet work to spare one client a wait."""

    enabled: bool = False
    quantile: float = 0.95  # of all prefills, those that take longer are slow
    min_delay_s: float = 0.02
    min_samples: int = 20  # a quantile of fewer means nothing
    window: int = 256
    ratio: float = 0.05  # second prefills over requests
    reserve: float = 10.0  # of them at once: a worker that stalls keeps many requests waiting


class HedgeClock:
    """Learns how long a prefill takes of what was predicted."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._ratios: deque[float] = deque(maxlen=config.window)

    def note(self, predicted_s: float, took_s: float) -> None:
        """A prefill worker was first heard, or given up, after `took_s`."""
        self._ratios.append(took_s / max(predicted_s, _LEAST_S))

    def delay_s(self, predicted_s: float) -> float | None:
        """Return how long to wait for a prefill before a second one; None while not known."""
        config = self._config
        if not config.enabled or len(self._ratios) < config.min_samples:
            return None
        ordered = sorted(self._ratios)
        ratio = ordered[min(len(ordered) - 1, int(config.quantile * len(ordered)))]
        return max(config.min_delay_s, ratio * max(predicted_s, _LEAST_S))
