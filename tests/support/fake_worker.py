"""A worker without an engine: speaks Worker.Link from a script, remembers what it was told.

Tokens are a function of prompt, choice and index alone, as those of a real worker with a
counter-based sampler are, so that retries and hand-offs can be compared to one answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from services.common.clock import SystemClock
from services.common.ids import BlockHash, Incarnation, WorkerId
from services.common.token_rows import TOKEN_ROW
from services.pb import common_pb2, worker_pb2, worker_pb2_grpc
from services.registry.base import LoadReport, WorkerInfo
from services.registry.lease import WorkerLease
from services.registry.store_client import StoreAddress
from services.runtime.tls import TlsIdentity
from services.worker.peer_auth import PeerAuth
from tests.support.registry import make_worker_info

LinkContext = grpc.aio.ServicerContext[worker_pb2.RouterFrame, worker_pb2.WorkerFrame]


def expected_token(prompt: Sequence[int], choice: int, index: int) -> int:
    """The token every worker draws at this place."""
    return (sum(prompt) * 31 + choice * 17 + index * 7) % 200 + 1


def prompt_of(work: worker_pb2.Work) -> tuple[int, ...]:
    """Read the prompt of a work item."""
    return struct.unpack(f"<{len(work.token_ids) // 4}I", work.token_ids)


@dataclass(eq=False)
class Job:
    """One work item being run."""

    work: worker_pb2.Work
    sent: list[worker_pb2.Tokens] = field(default_factory=list)  # for a resume
    ends: list[worker_pb2.Done] = field(default_factory=list)
    ticket: worker_pb2.TicketReady | None = None
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def kind(self) -> str:
        """ "prefill", "continue_from" or "whole"."""
        return self.work.WhichOneof("kind") or ""


Script = Callable[["FakeWorker", Job], Awaitable[None]]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One life of a worker; `kill` ends it abruptly, `freeze` silences it."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        *,
        incarnation: int = 1,
        token_delay_s: float = 0.0,
        script: Script | None = None,
        identity: dict[str, str] | None = None,
        tls: TlsIdentity | None = None,
    ) -> None:
        self.worker_id = WorkerId(worker_id)
        self.role = role
        self.incarnation = Incarnation(incarnation)
        self.token_delay_s = token_delay_s
        self.script = script or run_job
        self.identity = identity or {}
        self.tls = tls  # then only peers named isthmus-router may open a Link
        self.address = ""
        self.jobs: list[Job] = []
        self.cancels: list[worker_pb2.Cancel] = []
        self.migrates: list[worker_pb2.Migrate] = []
        self.can_offer = True  # False: a migration ends without a ticket
        self.acks: dict[tuple[int, int], int] = {}
        self.num_attaches = 0
        self._reads_rows = False  # the router that attached last
        self.load = LoadReport(kv_free=1000, kv_total=1000)
        self.is_draining = False
        self.is_leaving = False  # streams end as those of a worker that stops, not as broken ones
        self.refuse_with: str | None = None
        self.cached_tokens = 0
        self.cached: tuple[BlockHash, ...] = ()  # hints it publishes when it joins
        self.forgets = False  # answers a resume with "lost"
        self._awake = asyncio.Event()
        self._awake.set()
        self._outbox: asyncio.Queue[worker_pb2.WorkerFrame] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._lease: WorkerLease | None = None
        self._links: set[asyncio.Task[None]] = set()

    # -- life --------------------------------------------------------------------------------

    async def start(self, port: int = 0, *, store_url: str | None = None, ns: str = "") -> None:
        """Serve on loopback, and register when a store is given."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", 16 << 20),
                ("grpc.max_receive_message_length", 16 << 20),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ],
            interceptors=[PeerAuth(frozenset({"isthmus-router"}))] if self.tls else [],
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        at = f"127.0.0.1:{port}"
        if self.tls is None:
            bound = self._server.add_insecure_port(at)
        else:
            bound = self._server.add_secure_port(at, self.tls.server_credentials())
        assert bound, "the port is taken"
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        if store_url is not None:
            self._lease = WorkerLease(
                StoreAddress(store_url),
                ns,
                self.info(),
                lambda: self.load,
                lambda: self.cached,
                SystemClock(),
            )
            self._lease.start()

    @property
    def port(self) -> int:
        """Port in use."""
        return int(self.address.rsplit(":", 1)[1])

    @property
    def lease(self) -> WorkerLease:
        """The lease of a registered worker."""
        assert self._lease is not None
        return self._lease

    def info(self) -> WorkerInfo:
        """What this worker registers with."""
        return make_worker_info(
            self.worker_id, incarnation=self.incarnation, role=self.role, address=self.address,
            **self.identity,
        )  # fmt: skip

    async def kill(self) -> None:
        """Die at once: connections break, the lease is left to run out."""
        for job in self.jobs:
            if job.task is not None:
                job.task.cancel()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        if self._lease is not None:
            # What a killed process does: it says nothing more.
            lease, self._lease = self._lease, None
            lease._slot = None
            await asyncio.to_thread(lease.stop)

    async def stop(self) -> None:
        """Leave in good order."""
        if self._lease is not None:
            await asyncio.to_thread(self._lease.stop)
            self._lease = None
        await self.kill()

    def freeze(self) -> None:
        """Go silent without closing anything."""
        self._awake.clear()

    def thaw(self) -> None:
        """Wake up."""
        self._awake.set()

    def cut_links(self) -> None:
        """Break every stream, as a network does, and keep the work."""
        for task in list(self._links):
            task.cancel()

    # -- the service -------------------------------------------------------------------------

    async def Link(  # type: ignore[override]  # writes through the context
        self, request_iterator: AsyncIterator[worker_pb2.RouterFrame], context: LinkContext
    ) -> None:
        """Serve one router."""
        first = await anext(aiter(request_iterator))
        assert first.HasField("attach")
        self.num_attaches += 1
        self._reads_rows = first.attach.reads_rows
        self._outbox = asyncio.Queue()  # an earlier Link's writer keeps its own
        lost = self._resume(first.attach)
        await self._awake.wait()
        await context.write(worker_pb2.WorkerFrame(seq=1, welcome=self._welcome(lost)))
        tasks = [
            asyncio.create_task(self._read(request_iterator)),
            asyncio.create_task(self._write(context, self._outbox)),
        ]
        self._links.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._links.difference_update(tasks)
        if not self.is_leaving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was cut")

    async def Status(
        self, request: worker_pb2.StatusRequest, context: object
    ) -> worker_pb2.StatusResponse:
        """Say who this is."""
        await self._awake.wait()
        return worker_pb2.StatusResponse(worker_id=self.worker_id, incarnation=self.incarnation)

    async def _read(self, frames: AsyncIterator[worker_pb2.RouterFrame]) -> None:
        async for frame in frames:
            await self._awake.wait()
            for cancel in frame.cancel:
                self._take_cancel(cancel)
            for migrate in frame.migrate:
                self.migrates.append(migrate)
                self.migrate(migrate)
            for ack in frame.ack:
                self.acks[(ack.request, ack.choice)] = ack.index
            for work in frame.work:
                self._take(work)
            if frame.ping_ns:
                self.send(worker_pb2.WorkerFrame(pong_ns=frame.ping_ns, load=self._load()))

    async def _write(
        self, context: LinkContext, outbox: asyncio.Queue[worker_pb2.WorkerFrame]
    ) -> None:
        while True:
            frame = await outbox.get()
            await self._awake.wait()
            await context.write(frame)

    def _resume(self, attach: worker_pb2.Attach) -> list[int]:
        """Send again what the router has not got; return what is not here."""
        lost = []
        for resume in attach.resume:
            wanted = (resume.request, resume.attempt)
            jobs = [
                j
                for j in self.jobs
                if (j.work.request, j.work.attempt) == wanted and not j.is_cancelled
            ]
            if not jobs or self.forgets:
                lost.append(resume.request)
                continue
            job = jobs[-1]
            frame = worker_pb2.WorkerFrame(tokens=job.sent, done=job.ends)  # duplicates and all
            if job.ticket is not None:
                frame.tickets.append(job.ticket)
            self.send(frame)
        return lost

    def _welcome(self, lost: Sequence[int]) -> worker_pb2.Welcome:
        info = self.info()
        return worker_pb2.Welcome(
            proto=1, worker_id=self.worker_id, incarnation=self.incarnation,
            slot_gen=self._lease.slot_gen if self._lease else 0, model=info.model,
            kv_identity_fp=info.kv_identity_fp, weights_digest=info.weights_digest, lost=lost,
        )  # fmt: skip

    def _load(self) -> worker_pb2.Load:
        state = (
            common_pb2.WORKER_STATE_DRAINING if self.is_draining else common_pb2.WORKER_STATE_LIVE
        )
        return worker_pb2.Load(
            queued_uncached_tokens=self.load.queued_uncached_tokens,
            resident_tokens=self.load.resident_tokens,
            kv_free=self.load.kv_free,
            kv_total=self.load.kv_total,
            state=state,
        )

    # -- work --------------------------------------------------------------------------------

    def _take(self, work: worker_pb2.Work) -> None:
        job = Job(work)
        self.jobs.append(job)
        code = self.refuse_with
        if code is None and work.expect_incarnation != self.incarnation:
            code = "stale_incarnation"
        if code is not None:
            job.is_cancelled = True
            refusal = worker_pb2.Refusal(
                request=work.request, attempt=work.attempt,
                error=common_pb2.Error(code=code, message=f"refused by {self.worker_id}"),
            )  # fmt: skip
            self.send(worker_pb2.WorkerFrame(refusals=[refusal]))
            return
        job.task = asyncio.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        await self.script(self, job)

    def _take_cancel(self, cancel: worker_pb2.Cancel) -> None:
        self.cancels.append(cancel)
        for job in self.jobs:
            if job.work.request == cancel.request and job.work.attempt <= cancel.attempt:
                job.is_cancelled = True
                if job.task is not None:
                    job.task.cancel()

    def migrate(self, migrate: worker_pb2.Migrate) -> None:
        """Stop the request and offer what it has, as an engine between two steps does."""
        for job in self.jobs:
            if (job.work.request, job.work.attempt) != (migrate.request, migrate.attempt):
                continue
            if job.task is None or job.ends or not job.sent:
                continue
            job.task.cancel()
            if self.can_offer:
                before = job.work.generated or struct.pack("<I", expected_token(
                    prompt_of(job.work), 0, 0)) * job.work.first_index  # fmt: skip
                self.send_ticket(job, before + b"".join(t.token_ids for t in job.sent))
            self.send_done(job, handed_off=True)

    def report(self) -> None:
        """Send a load report now."""
        self.send(worker_pb2.WorkerFrame(load=self._load()))

    def send(self, frame: worker_pb2.WorkerFrame) -> None:
        """Queue a frame."""
        self._outbox.put_nowait(frame)

    def send_tokens(self, job: Job, choice: int, first: int, count: int) -> None:
        """Send tokens as the sampler would draw them."""
        prompt = prompt_of(job.work)
        ids = [expected_token(prompt, choice, first + i) for i in range(count)]
        tokens = worker_pb2.Tokens(
            request=job.work.request, attempt=job.work.attempt, choice=choice, first_index=first,
            token_ids=struct.pack(f"<{count}I", *ids),
        )  # fmt: skip
        if job.work.sampling.logprobs:
            tokens.logprobs.extend(common_pb2.Logprob(token_id=i, logprob=-0.5) for i in ids)
        job.sent.append(tokens)
        if self._reads_rows and count == 1 and choice == 0 and not tokens.logprobs:
            row = TOKEN_ROW.pack(tokens.request, tokens.attempt, first, ids[0])
            self.send(worker_pb2.WorkerFrame(rows=row))
        else:
            self.send(worker_pb2.WorkerFrame(tokens=[tokens]))

    def send_ticket(self, job: Job, generated: bytes = b"") -> None:
        """Send the ticket; with the tokens so far, the request migrates."""
        job.ticket = worker_pb2.TicketReady(
            request=job.work.request, attempt=job.work.attempt,
            ticket=f"ticket of {self.worker_id}".encode(), generated=generated,
        )  # fmt: skip
        self.send(worker_pb2.WorkerFrame(tickets=[job.ticket]))

    def send_done(self, job: Job, choice: int = 0, **fields: object) -> None:
        """Send the end of a choice or of the item."""
        values: dict[str, object] = {
            "reason": common_pb2.FINISH_REASON_LENGTH,
            "all_choices": True,
            "cached_tokens": self.cached_tokens,
            "timing": TIMING,
            **fields,
        }
        done = worker_pb2.Done(
            request=job.work.request, attempt=job.work.attempt, choice=choice,
            **values,  # type: ignore[arg-type]  # keyword arguments of a message
        )  # fmt: skip
        job.ends.append(done)
        self.send(worker_pb2.WorkerFrame(done=[done]))


# What a fake worker says of every leg; its peers do not tell a handoff from a migration either.
TIMING = common_pb2.Timing(
    prefill_us=100,
    decode_us=200,
    handoff_us=50,
    handoff_bytes=4_000,
    handoff_blocks=4,
    handoff_blocks_attached=2,
    plane=common_pb2.PLANE_MEMFD,
)


def prefill_worker(worker_id: str = "p0", **options: Any) -> FakeWorker:
    """Make a prefill worker."""
    return FakeWorker(worker_id, "prefill", **options)  # type: ignore[abstract]  # Link is enough


def decode_worker(worker_id: str = "d0", **options: Any) -> FakeWorker:
    """Make a decode worker."""
    return FakeWorker(worker_id, "decode", **options)  # type: ignore[abstract]  # Link is enough


async def run_job(worker: FakeWorker, job: Job) -> None:
    """The well-behaved script."""
    work = job.work
    if job.kind == "prefill" and work.generated:
        check_so_far(job)
        worker.send_tokens(job, 0, work.first_index, 1)
        is_last = work.first_index + 1 == work.max_tokens
        if not is_last:
            worker.send_ticket(job, work.generated + job.sent[-1].token_ids)
        worker.send_done(job, handed_off=not is_last)
        return
    if job.kind == "prefill":
        if work.max_tokens > 1:
            worker.send_ticket(job)
        for choice in range(work.n):
            worker.send_tokens(job, choice, 0, 1)
        for choice in range(work.n - 1):
            if work.max_tokens == 1:
                worker.send_done(job, choice, all_choices=False)
        worker.send_done(job, work.n - 1, handed_off=work.max_tokens > 1)
        return
    await decode(worker, job, work.first_index)


async def decode(worker: FakeWorker, job: Job, first: int, count: int | None = None) -> None:
    """Send tokens from index `first` on, one a step and choice, then the ends."""
    work = job.work
    check_so_far(job)
    starts = dict.fromkeys(range(work.n), first)
    if work.resumed:
        starts = {one.choice: len(one.token_ids) // 4 for one in work.resumed}
    last = work.max_tokens if count is None else first + count
    for index in range(min(starts.values()), last):
        await asyncio.sleep(worker.token_delay_s)
        for choice, start in starts.items():
            if index >= start:
                worker.send_tokens(job, choice, index, 1)
    if count is None:
        for choice in starts:
            worker.send_done(job, choice, all_choices=choice == max(starts))


def check_so_far(job: Job) -> None:
    """Tokens a work item brings along must be those the client has."""
    work, prompt = job.work, prompt_of(job.work)
    brought = [(0, work.generated), *((one.choice, one.token_ids) for one in work.resumed)]
    for choice, packed in brought:
        ids = struct.unpack(f"<{len(packed) // 4}I", packed)
        assert ids == tuple(expected_token(prompt, choice, i) for i in range(len(ids)))
