"""Reads what a tick is decided by: routers' words and leases from the store, workers' counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from services.autoscaler.observation import Reading
from services.autoscaler.signals import RouterCounts, WorkerCounts, parse_word
from services.autoscaler.worker_calls import WorkerCalls
from services.pb import common_pb2, worker_pb2
from services.registry.base import WorkerRecord
from services.registry.scaling import Word

DRAINING = common_pb2.WORKER_STATE_DRAINING


class Snapshots(Protocol):
    """The part of RegistryReader that is used here."""

    async def snapshot(self) -> tuple[WorkerRecord, ...]:
        """All workers whose entries exist, expired ones included; raises StoreUnavailable."""
        ...


class Words(Protocol):
    """The part of ScalingStore that is used here."""

    async def told(self) -> tuple[Word, ...]:
        """Every router's last word; raises StoreUnavailable."""
        ...


class External(Protocol):
    """Figures that others measure."""

    async def read(self, now: float) -> Mapping[str, Reading]:
        """Return readings by name; what could not be had is left out. Never raises for that."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """What was read for a tick."""

    routers: tuple[RouterCounts, ...]
    workers: tuple[WorkerCounts, ...]
    addresses: Mapping[str, str]  # of workers that hold a lease, by id
    external: Mapping[str, Reading]


class SignalReader:
    """Belongs to the event loop."""

    def __init__(
        self,
        snapshots: Snapshots,
        words: Words,
        calls: WorkerCalls,
        external: External | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._words = words
        self._calls = calls
        self._external = external

    async def read(self, now: float) -> Read:
        """Read all of it; `now` is the controller's. Raises StoreUnavailable."""
        words = await self._words.told()
        records = [r for r in await self._snapshots.snapshot() if r.lease_left_ms > 0]
        addresses = {str(record.info.worker_id): record.info.address for record in records}
        statuses = await self._calls.statuses(addresses)
        parsed = (parse_word(word.router_id, word.text, now - word.age_s) for word in words)
        external = {} if self._external is None else await self._external.read(now)
        return Read(
            routers=tuple(counts for counts in parsed if counts is not None),
            workers=tuple(
                worker_counts(record, statuses[str(record.info.worker_id)], now)
                for record in records
            ),
            addresses=addresses,
            external=external,
        )


def worker_counts(
    record: WorkerRecord, status: worker_pb2.StatusResponse | None, now: float
) -> WorkerCounts:
    """Join what a worker's lease says with its counters, if it answered."""
    info, load = record.info, record.load
    counts = WorkerCounts(
        worker_id=info.worker_id,
        role=info.role,
        incarnation=info.incarnation,
        measured_at=now,
        is_draining=record.state == "draining",
        queued_tokens=load.queued_uncached_tokens,
        resident_tokens=load.resident_tokens,
        num_running=load.running,
        num_waiting=load.waiting,
        kv_tokens_used=(load.kv_total - load.kv_free) * info.block_size,
        kv_tokens_total=load.kv_total * info.block_size,
        step_s=(load.tbt_a_us + load.tbt_b_us * load.resident_tokens) / 1e6,
    )
    if status is None or status.incarnation != info.incarnation:
        return counts
    return replace(
        counts,
        prefill_tokens=status.prefill_tokens,
        decode_tokens=status.decode_tokens,
        busy_s=status.busy_us / 1e6,
        num_held=status.blocks_in_use + status.transfers_open + status.requests_open,
        refuses_work=status.state == DRAINING,
    )
