"""A WorkerShell over a recording engine and recording transfer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from services.common.clock import ManualClock
from services.common.errors import RequestError
from services.common.ids import BlockHash, BlockId, Incarnation, WorkerId
from services.common.model_manifest import ModelManifest
from services.decode.admission import AdmissionLimits
from services.engine.api import (
    CacheDelta,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    FirstToken,
    RequestKey,
)
from services.kv.attached import AttachedKv
from services.kv.hashing import HashScope, chain_hashes
from services.pb import worker_pb2
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Tracing
from services.transfer.api import FinalInfo, Offer, SinkEvent, SourceEvent
from services.worker.intake import WorkerIdentity
from services.worker.session import Outgoing, RouterSession
from services.worker.shell import WorkerShell
from services.worker.trace import WorkTracer

INCARNATION = 77
ROUTER = 5
DIGEST = "d" * 64


class RecordingEngine:
    """Notes commands; the test plays the engine thread with `emit`."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.cancelled: list[RequestKey] = []
        self.released: list[RequestKey] = []
        self.migrated: list[RequestKey] = []
        self.moved: list[RequestKey] = []
        self.paused: list[RequestKey] = []
        self.unpinned: list[tuple[RequestKey, tuple[BlockId, ...]]] = []
        self.received_keys: list[RequestKey] = []
        self.failed: list[tuple[RequestKey, str, bool]] = []
        self.load_value = EngineLoad(blocks_total=8, blocks_free=8)
        self.refuses = False
        self.emit: Callable[[Sequence[EngineEvent]], None]

    def start(
        self,
        on_events: Callable[[Sequence[EngineEvent]], None],
        on_cache_delta: Callable[[CacheDelta], None],
    ) -> None:
        self.emit = on_events

    def submit(self, request: EngineRequest) -> None:
        if self.refuses:
            raise RequestError("overloaded", "too much work arrived within one step")
        self.requests.append(request)

    def cancel(self, key: RequestKey, reason: str) -> None:
        self.cancelled.append(key)

    def pause(self, key: RequestKey) -> None:
        self.paused.append(key)

    def resume(self, key: RequestKey) -> None:
        self.paused.remove(key)

    def migrate(self, key: RequestKey) -> None:
        self.migrated.append(key)

    def source_released(self, key: RequestKey) -> None:
        self.released.append(key)

    def source_unpinned(self, key: RequestKey, block_ids: Sequence[BlockId]) -> None:
        self.unpinned.append((key, tuple(block_ids)))

    def received(
        self,
        key: RequestKey,
        first: tuple[FirstToken, ...],
        prefill_us: int,
        kv_form: str = "",
        attached: AttachedKv | None = None,
    ) -> None:
        self.received_keys.append(key)

    def move_attached(self, key: RequestKey) -> None:
        self.moved.append(key)

    def receive_failed(self, key: RequestKey, code: str, message: str, *, recompute: bool) -> None:
        self.failed.append((key, code, recompute))

    def load(self) -> EngineLoad:
        return self.load_value

    def set_role(self, prefill_weight: float, decode_weight: float) -> None:
        self.role = (prefill_weight, decode_weight)

    def drop_cache(self) -> Future[tuple[int, int]]:
        answer: Future[tuple[int, int]] = Future()
        answer.set_result((5, 1))
        return answer

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        return ()

    def is_alive(self) -> bool:
        return True

    def stop(self, timeout_s: float) -> None:
        pass


class RecordingSource:
    """Notes what the prefill end was told."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.sealed: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.unpinned: list[str] = []
        self.num_asked_back = 0
        self.cancelled: list[str] = []
        self.refuses = False
        self.emit: Callable[[SourceEvent], None]

    def start(self, on_event: Callable[[SourceEvent], None]) -> None:
        self.emit = on_event

    def offer(self, offer: Offer) -> bytes:
        if self.refuses:
            raise RequestError("overloaded", "too many handoffs are open")
        self.offers.append(offer)
        return b"ticket"

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def blocks_sealed(self, key: str, lo: int, block_ids: Sequence[BlockId]) -> None:
        self.sealed.append((key, lo))

    def prefill_finished(self, key: str, final: FinalInfo) -> None:
        self.finished.append(key)

    def unpin(self, key: str) -> None:
        self.unpinned.append(key)

    def ask_back(self) -> None:
        self.num_asked_back += 1

    def cancel(self, key: str, reason: str) -> None:
        self.cancelled.append(key)

    def num_open(self) -> int:
        return len(self.offers)

    def stop(self, timeout_s: float) -> None:
        pass


class RecordingSink:
    """Notes what the decode end was told."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, bytes, int]] = []
        self.reserved: list[str] = []
        self.cancelled: list[str] = []
        self.detached: list[tuple[str, bool]] = []
        self.emit: Callable[[SinkEvent], None]

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self.emit = on_event

    def open(
        self,
        key: str,
        ticket: bytes,
        attempt: int,
        have: Sequence[bool],
        block_hashes: Sequence[BlockHash],
        traceparent: str = "",
        kv_form: str = "",
    ) -> None:
        self.opened.append((key, ticket, attempt))

    def form_of(self, ticket: bytes) -> str:
        return ""

    def reserve(
        self, key: str, block_ids: Sequence[BlockId | None], tail_block: BlockId | None
    ) -> None:
        self.reserved.append(key)

    def cancel(self, key: str, reason: str) -> None:
        self.cancelled.append(key)

    def detach(self, key: str, *, is_intact: bool) -> None:
        self.detached.append((key, is_intact))

    def num_open(self) -> int:
        return len(self.opened)

    def planes(self) -> dict[str, str]:
        return {}

    def stop(self, timeout_s: float) -> None:
        pass


class FakeRegistration:
    """Notes what was announced in the registry, in order."""

    def __init__(self) -> None:
        self.announced: list[str] = []

    def set_state(self, state: str) -> None:
        self.announced.append(state)

    def set_role(self, role: str) -> None:
        self.announced.append(role)


class ShellRig:
    """Everything around one shell, with one router attached."""

    def __init__(self) -> None:
        self.engine = RecordingEngine()
        self.source = RecordingSource()
        self.sink = RecordingSink()
        self.clock = ManualClock()
        self.sent: list[Outgoing] = []
        tracer = WorkTracer(Tracing.disabled(), Metrics.disabled(), self.clock)
        identity = WorkerIdentity(
            WorkerId("w"), Incarnation(INCARNATION), make_manifest(), "identity"
        )
        self.shell = WorkerShell(
            identity, self.engine, self.source, self.sink, self.clock, tracer, AdmissionLimits()
        )
        self.session: RouterSession

    def start(self) -> ShellRig:
        """Start on the running loop and attach the router."""
        self.shell.start(asyncio.get_running_loop(), lambda _delta: None)
        self.attach()
        return self

    def attach(self, **resume: tuple[int, ...]) -> tuple[int, ...]:
        """Attach a (new) Link; resume by request number as r1=(next indexes)."""
        frame = worker_pb2.Attach(router_id="r", router_incarnation=ROUTER)
        for name, indexes in resume.items():
            frame.resume.add(request=int(name[1:]), next_index=indexes)
        self.session, lost = self.shell.attach(frame, self.send)
        return lost

    def send(self, items: Sequence[Outgoing]) -> None:
        """Stand in for the Link's writer."""
        self.sent.extend(items)

    def work(self, **fields: Any) -> RequestKey:
        """Send one work item; returns its key."""
        frame = worker_pb2.RouterFrame(work=[make_work(**fields)])
        self.shell.handle(self.session, frame)
        work = frame.work[0]
        return RequestKey(f"{ROUTER:x}/{work.request}/{work.attempt}")

    async def emit(self, *events: EngineEvent) -> None:
        """Deliver engine events and let the loop pass them on."""
        self.engine.emit(events)
        await asyncio.sleep(0)


def make_manifest() -> ModelManifest:
    fields: dict[str, object] = {
        "name": "toy", "family": "llama", "weights_digest": DIGEST, "config_digest": "c",
        "tokenizer_digest": "t", "context_length": 64, "vocab_size": 100, "num_layers": 1,
        "num_kv_heads": 1, "head_dim": 8, "rope": "{}", "eos_token_ids": (0,),
    }  # fmt: skip
    return ModelManifest.model_validate(fields)


def make_work(
    kind: str = "whole", tokens: Sequence[int] = tuple(range(1, 40)), **fields: Any
) -> worker_pb2.Work:
    """Build a work item that is taken unless `fields` spoil it."""
    ids = np.asarray(tokens, dtype="<u4")
    values: dict[str, Any] = {
        "request": 1,
        "request_id": "req-1",
        "attempt": 0,
        "expect_incarnation": INCARNATION,
        "token_ids": ids.tobytes(),
        "block_hashes": b"".join(chain_hashes(HashScope(DIGEST), ids)),
        "max_tokens": 8,
        "deadline_ms": 60_000,
        **fields,
    }
    work = worker_pb2.Work(**values)
    if kind == "whole":
        work.whole.SetInParent()
    elif kind == "prefill":
        work.prefill.SetInParent()
    elif kind == "continue":
        work.continue_from.ticket = b"t"
    return work
