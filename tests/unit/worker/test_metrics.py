"""What a worker counts elsewhere reaches its metrics once."""

from __future__ import annotations

from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.transfer.counters import SinkCounters, SourceCounters
from services.worker.metrics import Total, transfer_faults


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


def test_faults_of_transfers_reach_the_metrics_by_side_and_kind() -> None:
    metrics = Metrics.enabled()
    source, sink = SourceCounters(), SinkCounters()
    totals = transfer_faults(source, sink)
    source.resends, sink.gaps, sink.bad_frames = 4, 2, 1
    source.note_key_refusal("retired", 3)
    sink.key_file_errors = 1
    for total in totals:
        total.tell(metrics)
    text = metrics.render().decode()
    assert 'isthmus_transfer_faults_total{kind="resent_block",side="send"} 4.0' in text
    assert 'isthmus_transfer_faults_total{kind="gap",side="receive"} 2.0' in text
    assert 'isthmus_transfer_faults_total{kind="bad_frame",side="receive"} 1.0' in text
    assert 'isthmus_transfer_faults_total{kind="key_retired",side="send"} 3.0' in text
    assert 'isthmus_transfer_faults_total{kind="key_file",side="receive"} 1.0' in text
    assert 'kind="bad_frame",side="send"' not in text
    metrics.shutdown()
