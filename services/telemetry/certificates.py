"""How long the certificates of a process are still good for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.clock import Clock
from services.telemetry import catalog
from services.telemetry.metrics import Metrics


def watch_expiry(metrics: Metrics, clock: Clock, ends: Mapping[str, Callable[[], float]]) -> None:
    """Show the time left of each certificate; `ends` gives Unix seconds."""
    metrics.watch(
        catalog.CERT_EXPIRY,
        lambda: [(read() - clock.unix_ms() / 1000, {"use": use}) for use, read in ends.items()],
    )
