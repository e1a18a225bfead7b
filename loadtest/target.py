"""What a load is sent to: a server over the wire, or a simulation of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from loadtest.records import PlannedRequest, PoolSize, RequestRecord


class TargetUnusable(Exception):
    """Nothing can be measured there; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a target says of itself before the load begins."""

    kind: str  # grpc, http, mock, sim
    address: str
    model: str = ""
    context_length: int | None = None  # None: it does not say
    vocab_size: int | None = None
    server: str = ""  # its version, as far as it tells
    notes: tuple[str, ...] = field(default=())  # what it cannot tell, such as cached tokens


class LiveTarget(Protocol):
    """A server that is measured in real time."""

    async def open(self) -> TargetFacts:
        """Connect and ask what is there; raise TargetUnusable where no load can be sent."""
        ...

    async def send(self, request: PlannedRequest, record: RequestRecord, timeout_s: float) -> None:
        """Send one request and fill its record; faults of the server are its status, no exception.

        `record.scheduled_s` is set by the caller; `sent_s`, chunks, `done_s`, usage, stages and
        status by the target, on the clock it was made with.
        """
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """What is behind a target at one moment."""

    replicas: Mapping[str, int]  # live workers, by pool
    queued: int  # requests that wait for a worker or in one
    pools: tuple[PoolSize, ...] = ()  # by the autoscaler, while one is at work


@runtime_checkable
class LookingTarget(Protocol):
    """A target that can see what is behind it."""

    async def look(self) -> ClusterLook | None:
        """Look; None when that failed, and no exception."""
        ...


class VirtualTarget(Protocol):
    """A cluster in virtual time: a whole schedule goes in, its records come out."""

    def facts(self) -> TargetFacts:
        """Say what is simulated."""
        ...

    def run(self, schedule: Sequence[PlannedRequest]) -> Sequence[RequestRecord]:
        """Simulate it; deterministic."""
        ...
