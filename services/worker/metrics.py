"""What a worker writes to the catalogue's metrics besides its work items and transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.engine.api import Engine
from services.engine.plan import StepPlan, StepResult
from services.registry.lease import RENEWAL_OUTCOMES, WorkerLease
from services.telemetry import catalog
from services.telemetry.metrics import Metrics, Reading
from services.telemetry.tracing import Tracing
from services.transfer.announce import REASONS
from services.transfer.counters import SinkCounters, SourceCounters
from services.transfer.key_ring import KEY_REFUSALS
from services.transfer.sink import TransferSink
from services.transfer.source import TransferSource
from services.transfer.values import RejectCode


def count_step(metrics: Metrics, plan: StepPlan, result: StepResult) -> None:
    """Count one engine step; called on the engine thread."""
    metrics.add(catalog.STEPS)
    metrics.observe(catalog.STEP_TIME, result.elapsed_s)
    metrics.observe(catalog.STEP_TOKENS, plan.num_tokens)


def watch_gauges(
    metrics: Metrics,
    engine: Engine,
    source: TransferSource,
    sink: TransferSink,
    tracing: Tracing,
) -> None:
    """Register the gauges; each reads a value its owner keeps ready. Totals begin at 0."""
    metrics.begin(catalog.WORKER_TOTALS)
    metrics.watch(catalog.KV_BLOCKS, lambda: _block_readings(engine))
    metrics.watch(catalog.KV_BLOCKS_ATTACHED, lambda: engine.load().blocks_attached)
    metrics.watch(catalog.WORK_OPEN, lambda: _work_readings(engine))
    metrics.watch(
        catalog.TRANSFERS_OPEN,
        lambda: ((source.num_open(), {"side": "send"}), (sink.num_open(), {"side": "receive"})),
    )
    metrics.watch(catalog.SPANS_DROPPED, lambda: tracing.num_dropped)


@dataclass(slots=True)
class Total:
    """A number some thread counts for itself, and how much of it the counter was told."""

    metric: catalog.Counter
    read: Callable[[], int]
    labels: Mapping[str, str] = field(default_factory=dict)
    told: int = 0

    def tell(self, metrics: Metrics) -> None:
        """Add what has come since the last call."""
        now = self.read()
        if now > self.told:
            metrics.add(self.metric, now - self.told, **self.labels)
            self.told = now


def worker_totals(
    engine: Engine, source: TransferSource, sink: TransferSink, lease: WorkerLease
) -> tuple[Total, ...]:
    """Name the totals that are told by housekeeping rather than by who counts them."""
    return (
        Total(catalog.PREEMPTIONS, lambda: engine.load().preemptions),
        Total(catalog.KV_INTEGRITY_ERRORS, lambda: sink.counters.integrity_errors),
        *(_rejects(source.counters, code.name) for code in RejectCode),
        *(_plans(source.counters, reason) for reason in REASONS),
        *transfer_faults(source.counters, sink.counters),
        *_attach_totals(engine, source.counters, sink.counters),
        *(_renewals(lease, outcome) for outcome in RENEWAL_OUTCOMES),
    )


def transfer_faults(source: SourceCounters, sink: SinkCounters) -> tuple[Total, ...]:
    """Name what went wrong on KV connections."""

    def fault(side: str, kind: str, read: Callable[[], int]) -> Total:
        return Total(catalog.TRANSFER_FAULTS, read, {"side": side, "kind": kind})

    return (
        fault("send", "resent_block", lambda: source.resends),
        fault("send", "bad_frame", lambda: source.bad_frames),
        fault("send", "muted_frame", lambda: source.muted_frames),
        fault("send", "incompatible", lambda: source.incompatible),
        *(_key_fault(source, reason) for reason in KEY_REFUSALS),
        fault("send", "key_file", lambda: source.key_file_errors),
        fault("receive", "key_file", lambda: sink.key_file_errors),
        fault("receive", "key_refused", lambda: sink.key_refused),
        fault("receive", "bad_frame", lambda: sink.bad_frames),
        fault("receive", "gap", lambda: sink.gaps),
        fault("receive", "plane_fallback", lambda: sink.plane_fallbacks),
        fault("receive", "discarded_frame", lambda: sink.discarded_frames),
    )


def _attach_totals(engine: Engine, source: SourceCounters, sink: SinkCounters) -> tuple[Total, ...]:
    """Name what the plane attach did; all zero where it is not used."""
    blocks, events = catalog.ATTACH_BLOCKS, catalog.ATTACH_EVENTS
    return (
        Total(blocks, lambda: sink.attached, {"what": "attached"}),
        Total(blocks, lambda: engine.load().attach_moved, {"what": "moved"}),
        Total(events, lambda: sink.attach_refused, {"what": "refused"}),
        Total(events, lambda: engine.load().attach_changed, {"what": "changed"}),
        Total(events, lambda: source.asked_back, {"what": "asked_back"}),
    )


def _key_fault(source: SourceCounters, reason: str) -> Total:
    labels = {"side": "send", "kind": f"key_{reason}"}
    return Total(catalog.TRANSFER_FAULTS, lambda: source.key_refusals.get(reason, 0), labels)


def _rejects(source: SourceCounters, code: str) -> Total:
    return Total(catalog.TRANSFER_REJECTS, lambda: source.rejects.get(code, 0), {"code": code})


def _plans(source: SourceCounters, reason: str) -> Total:
    return Total(catalog.TRANSFER_PLANS, lambda: source.plans.get(reason, 0), {"reason": reason})


def _renewals(lease: WorkerLease, outcome: str) -> Total:
    return Total(catalog.LEASE_RENEWALS, lambda: lease.renewals[outcome], {"outcome": outcome})


def _block_readings(engine: Engine) -> tuple[Reading, ...]:
    load = engine.load()
    return (
        (load.blocks_in_use, {"state": "in_use"}),
        (load.blocks_cached, {"state": "cached"}),
        (load.blocks_free, {"state": "free"}),
    )


def _work_readings(engine: Engine) -> tuple[Reading, ...]:
    load = engine.load()
    return (load.running, {"state": "running"}), (load.waiting, {"state": "waiting"})
