"""Renews leases and measures liveness from a thread of its own, over connections of its own.

A busy sink must not lose its leases; but a sink whose thread has stopped turning must, so it
gives a beat every turn and nothing is renewed without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.clock import Clock
from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer import codec
from services.transfer.config import TransferConfig
from services.transfer.fault_plane import open_dealer
from services.transfer.key_ring import KeyWatch
from services.transfer.loop import Inbox
from services.transfer.wire import Message, MessageType, WireError
from services.transfer.zmq_plane import RENEW, DealerLink, NoSocket, Poller, SinkContext

log = get_logger(__name__)

_MAX_ASKED = 64
_MAX_IDS = 4096  # of one RENEW; more than a sink may have open


@dataclass(frozen=True, slots=True)
class Target:
    """One life of one prefill worker, as a ticket names it."""

    endpoint: str
    worker_id: str
    incarnation: int


@dataclass(slots=True)
class _Watch:
    target: Target
    xfer_ids: frozenset[int] = frozenset()
    link: DealerLink | None = None
    num_dials: int = 0  # without an answer
    asked: deque[frozenset[int]] = field(default_factory=lambda: deque(maxlen=_MAX_ASKED))


Heard = Callable[[Target, float], None]
Renewed = Callable[[Target, frozenset[int], frozenset[int]], None]


class LeaseRenewer:
    """One RENEW a peer every third of a lease, one PING a second, answers reported back."""

    def __init__(
        self,
        context: SinkContext,
        base: bytes,
        clock: Clock,
        config: TransferConfig,
        keys: KeyWatch | None,
        on_heard: Heard,
        on_renewed: Renewed,
    ) -> None:
        self._context = context
        self._base = base
        self._clock = clock
        self._config = config
        self._keys = keys
        self._on_heard = on_heard
        self._on_renewed = on_renewed
        self._lock = threading.Lock()
        self._wanted: dict[Target, frozenset[int]] = {}
        self._beat = clock.now()
        self._watches: dict[Target, _Watch] = {}
        self._inbox = Inbox()
        self._poller = Poller()
        self._poller.add(self._inbox.fileno())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-renew", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def beat(self, now: float) -> None:
        """Say that the sink's thread still turns."""
        self._beat = now

    def set(self, target: Target, xfer_ids: frozenset[int]) -> None:
        """Say which transfers of a peer hold a lease; none ends the watch."""
        with self._lock:
            if xfer_ids:
                self._wanted[target] = xfer_ids
            else:
                self._wanted.pop(target, None)

    def stop(self, timeout_s: float) -> None:
        """Join the thread."""
        self._stopping.set()
        self._inbox.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._inbox.close()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        config = self._config
        interval = min(config.ping_interval_s, config.renew_interval_s)
        next_tick, next_renew = 0.0, 0.0
        while not self._stopping.is_set():
            try:
                now = self._clock.now()
                if now >= next_tick:
                    is_renew = now >= next_renew
                    self._tick(now, is_renew)
                    next_tick = now + interval
                    if is_renew:
                        next_renew = now + config.renew_interval_s
                self._poller.wait(max(0.0, min(next_tick - now, interval)))
                self._inbox.take()
                self._read()
            except Exception:  # the outermost loop: leases must go on being renewed
                log.exception("transfer.renew_turn_failed")
                self._stopping.wait(0.05)
        for watch in self._watches.values():
            self._close(watch)

    def _tick(self, now: float, is_renew: bool) -> None:
        with self._lock:
            wanted = dict(self._wanted)
        for target in [t for t in self._watches if t not in wanted]:
            self._close(self._watches.pop(target))
        is_turning = now - self._beat < self._config.lease_s
        for target, xfer_ids in wanted.items():
            watch = self._watches.setdefault(target, _Watch(target))
            watch.xfer_ids = xfer_ids
            try:
                link = self._link_of(watch)
            except NoSocket as error:  # the others have to be renewed all the same
                log.warning("transfer.renew_no_socket", reason=str(error))
                continue
            link.send(MessageType.PING, pb.Ping(sent_ns=round(now * 1e9)).SerializeToString())
            if is_renew and is_turning:
                self._renew(watch, link)

    def _renew(self, watch: _Watch, link: DealerLink) -> None:
        ids = frozenset(sorted(watch.xfer_ids)[:_MAX_IDS])
        if link.send(MessageType.RENEW, pb.Renew(xfer_ids=sorted(ids)).SerializeToString()):
            watch.asked.append(ids)

    def _link_of(self, watch: _Watch) -> DealerLink:
        if watch.link is not None and watch.link.broken() is None:
            return watch.link
        self._close(watch)
        endpoint, keys = watch.target.endpoint, None
        if self._keys is not None:
            candidates = self._keys.candidates(endpoint)
            keys = candidates[watch.num_dials % len(candidates)]
        watch.num_dials += 1
        watch.link = open_dealer(self._context, endpoint, self._base, RENEW, self._config, keys)
        watch.asked.clear()
        self._poller.add(watch.link)
        return watch.link

    def _close(self, watch: _Watch) -> None:
        if watch.link is not None:
            self._poller.remove(watch.link)
            watch.link.close()
            watch.link = None

    def _read(self) -> None:
        for watch in self._watches.values():
            if watch.link is None:
                continue
            try:
                while (message := watch.link.recv()) is not None:
                    self._on_message(watch, message)
            except WireError as error:
                log.warning("transfer.bad_frame", reason=error.reason)
            if watch.link.broken() is not None:
                self._close(watch)  # the next tick connects anew

    def _on_message(self, watch: _Watch, message: Message) -> None:
        header = message.header
        if header.incarnation != watch.target.incarnation:
            return  # another life at the same address: silence lets the sink's timer decide
        watch.num_dials = 0
        self._on_heard(watch.target, self._clock.now())
        if header.type is MessageType.RENEWED and watch.asked:
            asked = watch.asked.popleft()
            known = frozenset(codec.parse(pb.Renewed, message.body).xfer_ids)
            self._on_renewed(watch.target, asked, known)
