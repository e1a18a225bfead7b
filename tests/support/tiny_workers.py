"""Whole workers in this process, but for gRPC: shell, engine and transfer threads, a tiny pool."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.clock import SystemClock
from services.common.ids import Incarnation, WorkerId
from services.decode.admission import AdmissionLimits
from services.engine.api import TokensOut
from services.engine.loop import EngineLoop
from services.engine.runner import KvStore, Runner
from services.engine.scheduler import Scheduler
from services.kv.block_pool import BlockPool
from services.kv.hashing import HashScope, chain_hashes
from services.kv.layout import KvIdentity
from services.kv.memory import KvPoolMemory
from services.pb import worker_pb2
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Tracing
from services.transfer.config import TransferConfig
from services.transfer.end_parts import EndParts, ListenAt
from services.transfer.sink import TransferSink
from services.transfer.source import TransferSource
from services.worker.intake import WorkerIdentity
from services.worker.session import DoneOut, Outgoing, RouterSession, TicketOut
from services.worker.shell import WorkerShell
from services.worker.trace import WorkTracer
from tests.support.engine_rig import make_config
from tests.support.fake_model import FAKE_LAYOUT, FakeModel
from tests.support.shell_rig import DIGEST, make_manifest

IDENTITY = KvIdentity(
    model="fake",
    revision="1",
    weights_digest=DIGEST,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    rope="none",
    tokenizer_digest="t",
    hash_scheme="isthmus/1",
)
ROUTER = 5
_incarnations = itertools.count(5_000_000)


@dataclass
class Heard:
    """What one worker said of one request."""

    tokens: dict[int, dict[int, int]] = field(default_factory=dict)  # choice -> index -> token
    ticket: asyncio.Future[bytes] = field(default_factory=asyncio.Future)
    end: asyncio.Future[str] = field(default_factory=asyncio.Future)  # "", or the error's code
    is_handed_off: bool = False


class TinyWorker:
    """One worker and the Link of its only router, the test."""

    def __init__(
        self, name: str, num_blocks: int, config: TransferConfig, runtime_dir: Path, **engine: Any
    ) -> None:
        self.incarnation = next(_incarnations)
        clock = SystemClock()
        self.memory = KvPoolMemory.create(FAKE_LAYOUT, num_blocks)
        self.memory.blocks.view(np.float32)[:] = np.nan
        model = FakeModel()
        store = KvStore(self.memory, model.device)
        fields = {"max_num_seqs": 4, "max_step_tokens": 48, "max_chunk_tokens": 20} | engine
        self.scheduler = Scheduler(
            make_config(model_digest=DIGEST, initial_chunk_tokens=20, **fields),
            BlockPool(num_blocks, self.memory.gens),
            store,
        )
        for _ in range(16):
            self.scheduler.stats.ended(2)  # expect little: let too many in, have to preempt
        self.engine = EngineLoop(self.scheduler, Runner(model, store, ()), clock)
        parts = EndParts(self.memory, IDENTITY, name, self.incarnation, clock, config)
        self.source = TransferSource(parts, ListenAt("127.0.0.1", runtime_dir))
        self.sink = TransferSink(parts)
        tracer = WorkTracer(Tracing.disabled(), Metrics.disabled(), clock)
        identity = WorkerIdentity(
            WorkerId(name), Incarnation(self.incarnation), make_manifest(), IDENTITY.fingerprint
        )
        self.shell = WorkerShell(
            identity, self.engine, self.source, self.sink, clock, tracer, AdmissionLimits()
        )
        self.heard: dict[str, Heard] = {}
        self.session: RouterSession

    def start(self) -> TinyWorker:
        """Start the threads and attach the Link."""
        self.shell.start(asyncio.get_running_loop(), lambda _delta: None)
        attach = worker_pb2.Attach(router_id="r", router_incarnation=ROUTER)
        self.session, _ = self.shell.attach(attach, self._hear)
        return self

    def stop(self) -> None:
        """Stop the threads."""
        self.shell.stop(5.0)

    def send(
        self,
        request: int,
        prompt: npt.NDArray[np.uint32],
        max_tokens: int,
        kind: str = "whole",
        ticket: bytes = b"",
        **fields: Any,
    ) -> Heard:
        """Send one work item; greedy."""
        work = worker_pb2.Work(
            request=request,
            request_id=f"req-{request}",
            expect_incarnation=self.incarnation,
            token_ids=prompt.astype("<u4").tobytes(),
            block_hashes=b"".join(chain_hashes(HashScope(DIGEST), prompt)),
            max_tokens=max_tokens,
            deadline_ms=60_000,
            **fields,
        )
        work.sampling.temperature = 0.0
        if kind == "continue":
            work.continue_from.ticket = ticket
        else:
            getattr(work, kind).SetInParent()
        heard = self.heard[f"{ROUTER:x}/{request}/{work.attempt}"] = Heard()
        self.shell.handle(self.session, worker_pb2.RouterFrame(work=[work]))
        return heard

    def cancel(self, request: int) -> None:
        """Cancel a request."""
        cancel = worker_pb2.Cancel(request=request, attempt=0, reason="test")
        self.shell.handle(self.session, worker_pb2.RouterFrame(cancel=[cancel]))

    def assert_at_rest(self) -> None:
        """Nothing is open or held; asked once the threads have stopped."""
        self.scheduler.check_integrity()
        load = self.scheduler.load()
        assert (load.requests_open, load.blocks_in_use) == (0, 0)
        assert load.blocks_free + load.blocks_cached == load.blocks_total
        assert self.source.num_open() == self.sink.num_open() == 0

    def is_at_rest(self) -> bool:
        """Tell whether nothing is open or held."""
        load = self.engine.load()
        is_idle = load.requests_open == load.blocks_in_use == 0
        return is_idle and self.source.num_open() == self.sink.num_open() == 0

    def _hear(self, items: Sequence[Outgoing]) -> None:
        for item in items:
            heard = self.heard[item.key]
            if isinstance(item, TokensOut):
                tokens = heard.tokens.setdefault(item.choice, {})
                tokens |= dict(enumerate(item.token_ids, start=item.first_index))
                entry = self.session.entry(item.key)
                if entry is not None:
                    index = item.first_index + len(item.token_ids) - 1
                    self.session.acknowledge(entry.request, item.choice, index)
            elif isinstance(item, TicketOut):
                heard.ticket.set_result(item.ticket)
            elif isinstance(item, DoneOut):
                if item.done.all_choices:
                    heard.is_handed_off = item.done.handed_off
                    is_cancelled = item.done.reason.value == "cancelled"
                    code = "cancelled" if is_cancelled else item.done.error_code or ""
                    heard.end.set_result(code)
            else:
                heard.end.set_result(item.code)
