"""What a worker counts elsewhere reaches its metrics once."""

from __future__ import annotations

from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.worker.metrics import Total


def test_total_tells_what_has_come_since_the_last_time() -> None:
    metrics = Metrics.enabled()
    count = {"ok": 3}
    total = Total(catalog.LEASE_RENEWALS, lambda: count["ok"], {"outcome": "ok"})

    total.tell(metrics)
    total.tell(metrics)
    assert b'isthmus_lease_renewals_total{outcome="ok"} 3.0' in metrics.render()

    count["ok"] = 5
    total.tell(metrics)
    assert b'isthmus_lease_renewals_total{outcome="ok"} 5.0' in metrics.render()
    metrics.shutdown()
