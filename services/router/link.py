"""The router's end of one Worker.Link: attach, resume, heartbeats, batched frames.

A Link lives as long as its worker is known. When the stream breaks it connects again and asks
to resume; requests that are not resumed within a grace time are reported as lost, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
import grpc.aio

from services.common.address import split_host_port
from services.common.clock import Clock
from services.common.config import is_loopback
from services.common.ids import Incarnation, WorkerId
from services.common.token_rows import TOKEN_ROW
from services.pb import common_pb2, worker_pb2, worker_pb2_grpc
from services.registry.base import LoadReport, WorkerInfo
from services.router.config import LinkConfig
from services.router.view import LinkState, LinkStatus
from services.router.wire import load_report
from services.telemetry.logs import get_logger

log = get_logger(__name__)

PROTO = 1
_CLOSE_TIMEOUT_S = 0.1
_PROBE_TIMEOUT_S = 0.2
_FIRST_BACKOFF_S = 0.05
_CLOSED = "the worker closed the stream"

LinkCall = grpc.aio.StreamStreamCall[worker_pb2.RouterFrame, worker_pb2.WorkerFrame]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """An open work item and, per choice, the next token index wanted."""

    request: int
    attempt: int
    next_index: tuple[int, ...]


class LossCause(Enum):
    """Why work of a life of a worker will not come back."""

    DIED = "died"  # its listener is gone, or another life answers in its place
    CUT = "cut"  # silent or out of reach for too long; it may well live
    FORGOTTEN = "forgotten"  # it is there and no longer has the work
    CLOSED = "closed"  # by us


class LinkEvents(Protocol):
    """What a Link tells the router; every method runs on the event loop and must not block."""

    def on_frame(self, link: WorkerLink, frame: worker_pb2.WorkerFrame) -> None:
        """A frame after the Welcome came in."""
        ...

    def on_load(self, worker_id: WorkerId, reported_at: float) -> None:
        """The worker reported its load."""
        ...

    def on_lost(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        requests: Sequence[int] | None,
        cause: LossCause,
    ) -> None:
        """These requests (None: all) of this life of the worker will not come back."""
        ...

    def on_cut(self, worker_id: WorkerId, reason: str) -> None:
        """The stream broke or was cut."""
        ...

    def resume_points(self, worker_id: WorkerId, incarnation: Incarnation) -> Sequence[ResumePoint]:
        """Work items open at this worker."""
        ...


class LinkBroken(Exception):
    """Why a stream ended; the message goes to the view."""


class NotOurWorker(LinkBroken):
    """Somebody answers at the address, and it is not who we look for."""


class WorkerLink:
    """One Link. All methods belong to the event loop."""

    def __init__(
        self,
        info: WorkerInfo,
        router_id: str,
        router_incarnation: Incarnation,
        events: LinkEvents,
        clock: Clock,
        config: LinkConfig,
    ) -> None:
        self.info = info
        self._attach_as = (router_id, router_incarnation)
        self._events = events
        self._clock = clock
        self._config = config
        self._status = LinkStatus.CONNECTING
        self._since = clock.now()
        self._detail = ""
        self._incarnation: Incarnation | None = None
        self._slot_gen = 0
        self._is_draining = False
        self._told_lost: Incarnation | None = None  # of which it was said, and not heard since
        self._is_gone = False  # nobody of its name listens at its address, when we last looked
        self._state: LinkState | None = None  # as told last; None once something has changed
        self._load: LoadReport | None = None
        self._load_at = 0.0
        self._heard_at = 0.0
        self._seq = 0
        self._work: list[worker_pb2.Work] = []
        self._cancels: list[worker_pb2.Cancel] = []
        self._migrates: list[worker_pb2.Migrate] = []
        self._acks: dict[int, dict[int, int]] = {}  # by choice and request
        self._ping_due = False
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # -- commands ----------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, and stay connected until `close`."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.info.worker_id}")

    async def close(self) -> None:
        """End the Link; its requests are reported as lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._set_status(LinkStatus.DOWN, "closed")
        self._forget_pending()
        self._stop_grace()
        if self._incarnation is not None:
            self._declare_lost(LossCause.CLOSED)

    @property
    def is_up(self) -> bool:
        """Whether work can be sent."""
        return self._status in (LinkStatus.UP, LinkStatus.LAGGING)

    @property
    def is_coming(self) -> bool:
        """Whether its worker may well be usable in a moment: it is being connected, or lags."""
        return self._status is not LinkStatus.UP and not self._is_gone

    @property
    def incarnation(self) -> Incarnation | None:
        """The life of the worker that welcomed us last."""
        return self._incarnation

    def send_work(self, work: worker_pb2.Work) -> bool:
        """Queue a work item for the next frame; False when the Link cannot take it."""
        if not self.is_up or len(self._work) >= self._config.max_queued_work:
            return False
        self._work.append(work)
        self._wake.set()
        return True

    def cancel(self, request: int, attempt: int, reason: str) -> None:
        """Queue a cancel. On a broken Link none is needed: what is not resumed is cancelled."""
        if self.is_up:
            self._cancels.append(worker_pb2.Cancel(request=request, attempt=attempt, reason=reason))
            self._wake.set()

    def migrate(self, request: int, attempt: int) -> None:
        """Ask the worker to offer this request's KV to another; asked again if it matters."""
        if self.is_up:
            self._migrates.append(worker_pb2.Migrate(request=request, attempt=attempt))
            self._wake.set()

    def ack(self, indexes: Mapping[int, int], choice: int = 0) -> None:
        """Note which tokens of one choice are ours now, as the last index by request.

        Sent with the next frame or soon.
        """
        if not (indexes and self.is_up):
            return
        acks = self._acks.get(choice)
        if acks is None:
            self._acks[choice] = dict(indexes)
        else:
            acks.update(indexes)
        if self._ack_timer is None:
            loop = asyncio.get_running_loop()
            self._ack_timer = loop.call_later(self._config.ack_delay_s, self._wake.set)

    def state(self) -> LinkState:
        """Return what the view needs; the same value as long as nothing has changed."""
        state = self._state
        if state is not None and state.info is self.info:
            return state
        self._state = LinkState(
            info=self.info,
            status=self._status,
            since=self._since,
            incarnation=self._incarnation,
            slot_gen=self._slot_gen,
            is_draining=self._is_draining,
            load=self._load,
            load_at=self._load_at,
            detail=self._detail,
        )
        return self._state

    # -- life --------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            is_ours = True
            try:
                await self._session()
                reason = _CLOSED
            except LinkBroken as error:
                reason, is_ours = str(error), not isinstance(error, NotOurWorker)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
            except TimeoutError:
                reason = "no answer in time"
            except (grpc.RpcError, OSError) as error:
                reason = type(error).__name__
            except Exception as error:
                # Whatever it was: a Link whose task has died would look up for ever.
                log.exception("router.link_fault", worker=self.info.worker_id)
                reason = f"a fault of this router: {type(error).__name__}"
            was_up = self.is_up
            if was_up:
                backoff_s = 0.0
                self._events.on_cut(self.info.worker_id, reason)
                self._tell_end(reason)
            self._set_status(LinkStatus.DOWN, reason)
            self._forget_pending()
            if was_up:
                self._start_grace(reason)
            self._is_gone = not is_ours or await is_port_closed(self.info.address)
            if was_up and self._is_gone:
                # No grace for a process that is gone: its listener went with it.
                self._declare_lost(LossCause.DIED)
            await asyncio.sleep(backoff_s)
            backoff_s = min(max(_FIRST_BACKOFF_S, backoff_s * 2), self._config.max_backoff_s)

    def _tell_end(self, reason: str) -> None:
        if reason == _CLOSED and self._is_draining:  # as announced
            log.info("router.link_closed", worker=self.info.worker_id)
        else:
            log.warning("router.link_cut", worker=self.info.worker_id, reason=reason)

    async def _session(self) -> None:
        """One stream from connect to break; raises the reason of the break."""
        channel = open_channel(self.info.address, self._config)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            await self._check_who_answers(stub)
            # No deadline: a Link lives for days. Heartbeats watch it instead.
            call: LinkCall = stub.Link()
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await call.write(self._attach_frame())
                    first = await call.read()
                self._take_welcome(first)
                await self._serve(call)
            finally:
                call.cancel()
        finally:
            # Not in a task of its own: a channel outlives nothing it was opened for.
            # Bounded: what was cut must be told of at once, however long a dead peer's close takes.
            with suppress(grpc.RpcError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await channel.close()

    async def _check_who_answers(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        """Ask before attaching: another worker may have got the address.

        To such a one our Attach would replace the good Link we have with it under its own name.
        """
        status = await stub.Status(
            worker_pb2.StatusRequest(), timeout=self._config.connect_timeout_s
        )
        if status.worker_id != self.info.worker_id:
            raise NotOurWorker(f"worker {status.worker_id!r} answers at its address")

    async def _serve(self, call: LinkCall) -> None:
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_take_exception)
            # wait, for a gather that times out still waits for what resists its cancel.
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in done:
            if task.cancelled():  # by grpc, which cancels a read or write of a call that ended
                raise LinkBroken("the stream was cancelled")
            task.result()

    async def _read(self, call: LinkCall) -> None:
        while True:
            frame = await call.read()
            if not isinstance(frame, worker_pb2.WorkerFrame):  # grpc.aio.EOF
                return
            self._heard()
            if frame.HasField("load"):
                self._take_load(frame.load)
            if len(frame.rows) % TOKEN_ROW.size:
                raise LinkBroken("a frame with a part of a row")
            self._events.on_frame(self, frame)

    async def _write(self, call: LinkCall) -> None:
        """Write what has gathered since the last frame; a write in progress gathers more."""
        while True:
            # Woken in the next tick: all that this tick's handlers have to say is in one frame.
            await self._wake.wait()
            self._wake.clear()
            frame = self._next_frame()
            try:
                await call.write(frame)
            except asyncio.InvalidStateError:
                raise LinkBroken("the stream has ended") from None

    async def _watch(self) -> None:
        """Ping; mark and cut a Link on which the worker is silent."""
        interval_s = self._config.ping_interval_s
        pinged_at = float("-inf")
        while True:
            slept_from = self._clock.now()
            if slept_from - pinged_at >= interval_s:
                pinged_at, self._ping_due = slept_from, True
                self._wake.set()
            await asyncio.sleep(interval_s / 2)
            now = self._clock.now()
            if now - slept_from > 2 * interval_s:
                continue  # this loop was the one that stood still: the worker is not to blame
            silent_s = now - self._heard_at
            if silent_s > self._config.cut_after_s:
                raise LinkBroken(f"silent for {silent_s:.1f} s")
            if silent_s > self._config.lagging_after_s:
                self._set_status(LinkStatus.LAGGING, f"silent for {silent_s:.1f} s")

    # -- frames ------------------------------------------------------------------------------

    def _attach_frame(self) -> worker_pb2.RouterFrame:
        router_id, incarnation = self._attach_as
        points: Sequence[ResumePoint] = ()
        if self._incarnation is not None:
            points = self._events.resume_points(self.info.worker_id, self._incarnation)
        self._seq = 1
        return worker_pb2.RouterFrame(
            seq=1,
            attach=worker_pb2.Attach(
                proto_min=PROTO,
                proto_max=PROTO,
                router_id=router_id,
                router_incarnation=incarnation,
                reads_rows=True,
                resume=[
                    worker_pb2.Resume(request=p.request, attempt=p.attempt, next_index=p.next_index)
                    for p in points
                ],
            ),
        )

    def _take_welcome(self, frame: object) -> None:
        """Check who answered: another worker may have got the port, or the same one a new life."""
        if not isinstance(frame, worker_pb2.WorkerFrame) or not frame.HasField("welcome"):
            raise LinkBroken("the first frame was no Welcome")
        welcome = frame.welcome
        if welcome.worker_id != self.info.worker_id:
            raise NotOurWorker(f"worker {welcome.worker_id!r} answered at its address")
        if welcome.kv_identity_fp != self.info.kv_identity_fp:
            raise NotOurWorker("it serves another model than it registered with")
        incarnation = Incarnation(welcome.incarnation)
        previous, self._incarnation = self._incarnation, incarnation
        self._slot_gen, self._state = welcome.slot_gen, None
        self._stop_grace()
        self._heard()
        self._is_gone = False
        self._set_status(LinkStatus.UP, "")
        if frame.HasField("load"):
            self._take_load(frame.load)
        self._told_lost = None if previous == incarnation else self._told_lost
        if previous is not None and previous != incarnation:
            self._tell_lost(previous, LossCause.DIED)
        elif welcome.lost:
            forgotten = list(welcome.lost)
            self._events.on_lost(self.info.worker_id, incarnation, forgotten, LossCause.FORGOTTEN)
        log.info("router.link_up", worker=self.info.worker_id, role=self.info.role)
        self._events.on_frame(self, frame)

    def _next_frame(self) -> worker_pb2.RouterFrame:
        self._seq += 1
        frame = worker_pb2.RouterFrame(
            seq=self._seq,
            work=self._work,
            cancel=self._cancels,
            migrate=self._migrates,
            ack=[
                worker_pb2.Ack(request=request, choice=choice, index=index)
                for choice, indexes in self._acks.items()
                for request, index in indexes.items()
            ],
        )
        if self._ping_due:
            frame.ping_ns = max(1, int(self._clock.now() * 1e9))
        self._forget_pending()
        return frame

    def _forget_pending(self) -> None:
        self._work, self._cancels, self._ping_due = [], [], False
        self._migrates = []
        self._acks.clear()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None

    def _take_load(self, load: worker_pb2.Load) -> None:
        self._load, self._load_at, self._state = load_report(load), self._clock.now(), None
        self._is_draining = load.state in (
            common_pb2.WORKER_STATE_DRAINING,
            common_pb2.WORKER_STATE_SLEEPING,
        )
        self._events.on_load(self.info.worker_id, self._load_at)

    # -- state -------------------------------------------------------------------------------

    def _heard(self) -> None:
        self._heard_at = self._clock.now()
        if self._status is LinkStatus.LAGGING:
            self._set_status(LinkStatus.UP, "")

    def _set_status(self, status: LinkStatus, detail: str) -> None:
        # A Link that lagged and recovered is as old as it was.
        if status is not self._status and {status, self._status} != {
            LinkStatus.UP,
            LinkStatus.LAGGING,
        }:
            self._since = self._clock.now()
        self._status, self._detail, self._state = status, detail, None

    def _start_grace(self, reason: str) -> None:
        frozen = reason.startswith("silent")
        delay_s = self._config.frozen_grace_s if frozen else self._config.resume_grace_s
        self._stop_grace()
        loop = asyncio.get_running_loop()
        self._grace_timer = loop.call_later(delay_s, self._declare_lost, LossCause.CUT)

    def _declare_lost(self, cause: LossCause) -> None:
        assert self._incarnation is not None, "a Link that was up was welcomed"
        self._stop_grace()
        self._tell_lost(self._incarnation, cause)

    def _tell_lost(self, incarnation: Incarnation, cause: LossCause) -> None:
        """Say once that a life of the worker is over, as far as we are concerned."""
        if self._told_lost != incarnation:
            self._told_lost = incarnation
            self._events.on_lost(self.info.worker_id, incarnation, None, cause)

    def _stop_grace(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None


def _take_exception(task: asyncio.Task[None]) -> None:
    """Mark a task's exception as seen: the Link has ended for another reason, or is told of it."""
    if not task.cancelled():
        task.exception()


async def is_port_closed(address: str) -> bool:
    """Say whether nothing listens at `host:port`; False also when that is not known in time."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*split_host_port(address))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):  # ValueError: no host and port
        return False
    writer.close()
    return False


def open_channel(address: str, config: LinkConfig) -> grpc.aio.Channel:
    """Open a channel of its own: a shared one would share back-off and a broken connection."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Without ping_timeout a frozen peer is noticed after a minute, whatever keepalive says.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 2_000),
        ("grpc.http2.ping_timeout_ms", 2_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.tls is not None:
        # Credentials are made for every channel: certificates may have been rotated.
        credentials = config.tls.identity.channel_credentials()
        options.append(("grpc.ssl_target_name_override", config.tls.worker_name))
        return grpc.aio.secure_channel(address, credentials, options=options)
    if not (config.allow_plaintext or is_loopback_address(address)):
        raise LinkBroken("plaintext to another host needs auth.allow_plaintext")
    return grpc.aio.insecure_channel(address, options=options)


def is_loopback_address(address: str) -> bool:
    """Say whether `host:port` is of this machine alone."""
    try:
        return is_loopback(split_host_port(address)[0])
    except ValueError:
        return False
