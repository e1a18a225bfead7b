"""Prefill end: a thread that owns the ROUTER socket, every sender session and the pool's readers.

The engine lends blocks by `blocks_sealed` and `prefill_finished`; they go back by one
SourceReleased, delivered by whoever holds the turn lock. That is this thread, which reads them
(over ZMQ) or knows who does (memfd); or, while it waits for something to do, the engine's thread
at the end of a `batch`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np

from services.common.address import join_host_port
from services.common.errors import RequestError
from services.common.ids import BlockId
from services.kv.block_copy import read_blocks
from services.kv.digest import tail_digest
from services.kv.layout import BLOCK_TOKENS, KvLayout
from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer import codec, sender
from services.transfer.announce import AnnouncePlan, CostMeter, Pending, plan_announcements
from services.transfer.api import FinalInfo, Offer, SourceEvent, SourceReleased, SourceUnpinned
from services.transfer.counters import SourceCounters
from services.transfer.data_pump import DataPump
from services.transfer.doorbell import HungUp
from services.transfer.end_parts import EndParts, ListenAt
from services.transfer.handshake import answer_hello
from services.transfer.key_ring import KeyWatch
from services.transfer.loop import Inbox, Timers
from services.transfer.memfd_plane import HandoverError, PoolPeerLost, PoolServer
from services.transfer.offer_table import OfferTable
from services.transfer.offered import Offered, SendAction
from services.transfer.pairing import AS_STORED, Unservable, requested
from services.transfer.peer_table import Mutes, PeerTable
from services.transfer.planes import HANDED_PLANES, SENT_PLANES
from services.transfer.sender import DataOut, SenderAction, SenderPolicy, SenderTransfer
from services.transfer.source_groups import FramesOut, SourceGroups
from services.transfer.ticket import Ticket, TicketError, TicketSigner, read_unverified
from services.transfer.values import FinalBlocks, OpenArgs, Peer, RejectCode
from services.transfer.wire import GROUP_MESSAGES, Message, MessageType, WireError, decode
from services.transfer.zmq_plane import (
    PeerGone,
    Poller,
    RouterPort,
    check_host,
    is_loopback,
    parse_route,
    worker_id_of,
)

log = get_logger(__name__)

_MESSAGES_A_TURN = 64
_IDLE_WAIT_S = 0.5
_GROUPS_STOP_S = 1.0
_EARLY_S = 0.001  # the thread need not be woken for a deadline that is this much earlier
_REBIND_POLL_S = 0.005
_UNBOUND_ALARM_S = 5.0
# ZMQ tells that it is done with a block only when asked: by who wants to send more, or to release.
_FLIGHT_POLL_S = 0.001
_IDLE_FLIGHT_POLL_S = 0.005
_POINT_AFTER: dict[type[SenderAction], str] = {
    sender.SendOpened: "after_open",
    sender.SendReady: "after_ready",
    sender.SendFinal: "after_final",
}


class TransferSource:
    """Offers this worker's KV to decode workers; implements api.Source."""

    def __init__(self, parts: EndParts, listen: ListenAt) -> None:
        config = parts.config
        check_host(listen.host, config)
        self.counters, self._meter = SourceCounters(), CostMeter()
        self._memory = parts.memory
        self._layout = parts.layout
        self._identity = parts.identity
        self._worker_id = parts.worker_id
        self._incarnation = parts.incarnation
        self._listen = listen
        self._clock = parts.clock
        self._faults = parts.faults
        self._config = config
        self._keys = KeyWatch.open(config.curve_key_file, parts.clock.now())
        self._signer = TicketSigner()
        self._policy = SenderPolicy(
            block_bytes=parts.layout.block_bytes,
            ticket_ttl_s=config.ticket_ttl_s,
            lease_s=config.lease_s,
            tombstone_s=config.tombstone_s,
            data_message_bytes=config.data_message_bytes,
            max_nacks=config.max_nacks,
        )
        self._offers = OfferTable(config.max_transfers)
        self._inbox = Inbox()
        self._timers = Timers()
        self._peers = PeerTable(config.max_peers)
        self._mutes = Mutes(config.max_bad_frames)
        self._pump = DataPump(config.max_data_in_flight)
        self._pool_server: PoolServer | None = None
        self._end = replace(parts.local_end(), num_blocks=parts.memory.num_blocks)
        if not (is_loopback(listen.host) or config.allow_plaintext_kv):
            self._end = replace(self._end, group_backend="")  # groups are not encrypted
        self._export: Callable[[], bytes] | None = None
        if parts.device is not None and parts.device.kind == "cuda":
            self._export = parts.device.export_pool
        self._groups = SourceGroups(
            parts, listen.host, self._inbox, self._send, self._has_open_on_group, self._group_ended
        )
        self._port: RouterPort | None = None
        self._thread: threading.Thread | None = None
        # Held by whoever runs commands and sends: the thread but while it waits, and then
        # sometimes the engine's thread. All else of the object belongs to its holder.
        self._turn_lock = threading.Lock()
        self._wakes_at = 0.0  # when the thread looks around again by itself
        self._is_lent = False  # the lock's holder is another thread, which must not touch ZMQ
        self._stop_deadline: float | None = None
        self._unbound_since = 0.0
        self._is_asking_back = False
        self._max_attached = int(config.attach_pin_share * parts.memory.num_blocks)
        self.endpoint = ""
        self.port: int | None = None  # of the bound socket

    # ---- api.Source, any thread ---------------------------------------------------------------

    def start(self, on_event: Callable[[SourceEvent], None]) -> None:
        """Bind and start the thread."""
        self._on_event = on_event
        host = self._listen.host
        port = RouterPort(host, self._incarnation, self._config, self._keys, self._listen.port)
        self._port = port
        self.port = port.port
        self.endpoint = f"tcp://{self._listen.advertise or join_host_port(host, port.port)}"
        self._poller = Poller()
        self._poller.add(self._inbox.fileno())
        self._poller.add(port)
        if any(plane in HANDED_PLANES for plane in self._end.planes):
            self._start_pool_server()
        self._thread = threading.Thread(target=self._run, name="transfer-source", daemon=True)
        self._thread.start()
        self._offers.start()

    def offer(self, offer: Offer) -> bytes:
        """Open a transfer and return its signed ticket."""
        num_blocks = offer.num_tokens // self._layout.block_size
        if len(offer.block_hashes) != offer.num_tokens // BLOCK_TOKENS:
            raise RequestError("internal", f"an offer needs a hash per {BLOCK_TOKENS} tokens")
        xfer_id = self._offers.admit(offer.key)
        expires_ms = self._clock.unix_ms() + round(self._config.ticket_ttl_s * 1000)
        ticket = Ticket(
            xfer_id=xfer_id,
            worker_id=self._worker_id,
            zmq_endpoint=self.endpoint,
            uds_path=self._end.uds_path,
            incarnation=self._incarnation,
            kv_identity_fp=self._identity.fingerprint,
            num_tokens=offer.num_tokens,
            block_hashes=offer.block_hashes,
            tenant=offer.tenant,
            expires_unix_ms=expires_ms,
            request_id=offer.request_id,
            block_size=self._layout.block_size,
            kv_dtype=self._layout.kv_dtype if offer.is_exact else "",
            layers=self._layout.layers,
            heads=self._layout.heads,
        )
        signed = self._signer.issue(ticket)
        # Queued before the ticket leaves: whoever opens the ticket finds it (see _find_offer).
        self._inbox.put(lambda: self._add(xfer_id, offer, num_blocks))
        return signed

    def batch(self) -> AbstractContextManager[None]:
        """Take what is announced inside together, and send it from here if the thread sleeps.

        A wake-up costs a change of threads, and the interpreter's lock may be somebody else's
        just then: the first token is about to be sent, and would leave before the FINAL.
        """
        return self._inbox.hold(self._run_lent)

    def blocks_sealed(self, key: str, lo: int, block_ids: Sequence[BlockId]) -> None:
        """Announce full blocks [lo, lo + len(block_ids))."""
        ids = tuple(block_ids)
        self._inbox.put(lambda: self._sealed(key, lo, ids))

    def prefill_finished(self, key: str, final: FinalInfo) -> None:
        """Announce first tokens and tail."""
        self._inbox.put(lambda: self._finished(key, final))

    def unpin(self, key: str) -> None:
        """Memory is short: give blocks back by SourceUnpinned once their reader has them."""
        self._inbox.put(lambda: self._unpin(key))

    def ask_back(self) -> None:
        """Have whoever reads our blocks in place move them, now and from now on."""
        self._inbox.put(self._ask_back)

    def cancel(self, key: str, reason: str) -> None:
        """Abort; SourceReleased follows when nothing reads the blocks any more."""
        self._inbox.put(lambda: self._cancel(key, reason))

    def num_open(self) -> int:
        """Transfers not yet closed."""
        return self._offers.num_open()

    def is_alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Abort everything and join the thread."""
        is_first = self._offers.close()
        thread = self._thread
        if thread is None:
            self._inbox.close()
            return
        if is_first:
            self._inbox.put(lambda: self._begin_stop(timeout_s / 2))
        thread.join(timeout_s)
        if thread.is_alive():
            log.error("transfer.source_stuck", timeout_s=timeout_s)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        is_running = True
        while is_running:
            try:
                is_running = self._turn()
            except Exception:  # the outermost loop: one bad turn must not end the handoffs
                log.exception("transfer.source_turn_failed")
                threading.Event().wait(0.01)
        self._shut_down()

    def _is_finished(self) -> bool:
        if self._stop_deadline is None:
            return False
        return not self._offers.open() or self._clock.now() >= self._stop_deadline

    def _turn(self) -> bool:
        """Wait for something to do, and do it; False when there will be nothing any more."""
        with self._turn_lock:
            if self._is_finished():
                return False
            wait_s = self._wait_s()
            self._wakes_at = self._clock.now() + wait_s
        readable = self._poller.wait(wait_s)
        with self._turn_lock:
            self._handle_all(readable)
        return True

    def _handle_all(self, readable: set[object]) -> None:
        self._run_commands()
        self._ring()
        self._read_router()
        if self._pool_server is not None:
            self._read_pool_server(self._pool_server, readable)
        self._watch_keys()
        self._run_timers()
        self._land_flights()
        for route in self._router.flush():
            self._peer_lost(parse_route(route).base)
        self._pump.run(self._send_some)
        self._ring()

    def _run_lent(self) -> bool:
        """Run the commands on the caller's thread while ours waits; False = it must wake up."""
        if self._thread is None or not self._turn_lock.acquire(blocking=False):
            return False
        try:
            self._is_lent = True
            self._run_commands()
            self._guarded(self._ring)  # a fault of ours must not end the caller's step
            # What was put off has woken it already.
            is_all = not self._pump.is_hungry and not self._is_finished()
            return is_all and self._clock.now() + self._wait_s() >= self._wakes_at - _EARLY_S
        finally:
            self._is_lent = False
            self._turn_lock.release()

    def _is_put_off(self, command: Callable[[], None]) -> bool:
        """Leave to the thread itself what nobody else may do: ZMQ and the poller are its own."""
        if self._is_lent:
            self._inbox.put(command)
        return self._is_lent

    def _ring(self) -> None:
        """Send what waits for peers on this host."""
        if self._pool_server is not None:
            for route in self._pool_server.flush():
                # Noted by a command: it is the thread that watches the connections.
                self._inbox.put(partial(self._hang_up, route))

    def _run_commands(self) -> None:
        for command in self._inbox.take():
            self._guarded(command)

    def _watch_keys(self) -> None:
        if self._keys is None:
            return
        now = self._clock.now()
        change = self._keys.poll(now)
        self.counters.key_file_errors = self._keys.file_errors
        if change is not None and change.retired:
            log.info("transfer.rebinding", reason="a key was retired")
            self._router.rebind()
            self._unbound_since = now
        if not self._router.bind_again() and now - self._unbound_since > _UNBOUND_ALARM_S:
            log.error("transfer.cannot_listen_again", endpoint=self.endpoint)
            self._unbound_since = now
        for reason, count in self._router.take_refusals().items():
            self.counters.note_key_refusal(reason, count)
            # In a rotation peers find the right pair by trying, and only by that.
            is_usual = self._keys.is_rotating and reason != "unknown"
            tell = log.info if is_usual else log.warning
            tell("transfer.key_refused", reason=reason, count=count)

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # a command that fails must not take the others with it
            log.exception("transfer.source_command_failed")

    def _wait_s(self) -> float:
        now = self._clock.now()
        wait = _IDLE_WAIT_S
        due = self._timers.next_due()
        if due is not None:
            wait = min(wait, due - now)
        if self._stop_deadline is not None:
            wait = min(wait, self._stop_deadline - now)
        if self._pump.is_hungry or self._has_backlog():
            wait = min(wait, _FLIGHT_POLL_S)
        if self._pump.is_flying:
            wait = min(wait, _IDLE_FLIGHT_POLL_S)
        if not self._router.is_bound:
            wait = min(wait, _REBIND_POLL_S)
        return max(0.0, wait)

    def _has_backlog(self) -> bool:
        server = self._pool_server
        return self._router.has_backlog or (server is not None and server.has_backlog)

    def _hang_up(self, route: bytes) -> None:
        """Cut off a peer that does not read what the pool's socket has for it."""
        if self._is_put_off(partial(self._hang_up, route)):
            return
        assert self._pool_server is not None
        fd = self._pool_server.drop(route)
        if fd is not None:
            self._poller.remove(fd)
        self._peer_lost(parse_route(route).base)

    @property
    def _router(self) -> RouterPort:
        assert self._port is not None
        return self._port

    def _start_pool_server(self) -> None:
        memory, runtime_dir = self._memory, self._listen.runtime_dir
        try:
            runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            server = PoolServer(
                runtime_dir, memory, self._incarnation, self._config.max_peers, self._export
            )
        except HandoverError as error:
            log.warning("transfer.memfd_unavailable", reason=str(error))
            planes = tuple(plane for plane in self._end.planes if plane not in HANDED_PLANES)
            self._end = replace(self._end, planes=planes)
            return
        self._pool_server = server
        self._poller.add(server.fileno())
        nonce = os.urandom(len(memory.nonce))
        memory.nonce[:] = np.frombuffer(nonce, np.uint8)
        self._end = replace(self._end, uds_path=server.path, nonce=nonce)

    # ---- commands -----------------------------------------------------------------------------

    def _add(self, xfer_id: int, offer: Offer, num_blocks: int) -> None:
        has_tail = offer.num_tokens % self._layout.block_size != 0
        now = self._clock.now()
        planner = self._plan if self._config.single_shot else None
        machine = SenderTransfer(xfer_id, num_blocks, has_tail, self._policy, now, planner)
        offered = Offered.make(offer, machine, self._memory, self._meter)
        self._offers.add(offered)
        self.counters.offers += 1
        self._timers.at_latest(xfer_id, machine.next_deadline())
        self._faults.hit("after_ticket")

    def _sealed(self, key: str, lo: int, block_ids: tuple[BlockId, ...]) -> None:
        offered = self._offers.by_key(key)
        if offered is None:
            return  # released meanwhile
        index = np.array(block_ids, dtype=np.int64)
        gens = self._memory.gens[index]
        try:
            if (gens & np.uint64(1)).any():
                raise ValueError("a block was announced before it was sealed")
            actions = offered.machine.on_sealed(lo, block_ids)
        except ValueError as error:
            self._fault(offered, str(error))
            return
        if offered.machine.closed_reason == "":
            offered.note_sealed(lo, gens, self._memory.digests[index])
        if lo:
            self._meter.note_chunk(len(block_ids))
        started = self._clock.now()
        self._apply(offered, actions)
        if actions:
            meter = self._meter.plane(offered.machine.plane)
            meter.ready_s.add(self._clock.now() - started)

    def _plan(self, plane: str, pending: Pending) -> AnnouncePlan:
        return plan_announcements(pending, self._meter.costs(plane))

    def _finished(self, key: str, final: FinalInfo) -> None:
        offered = self._offers.by_key(key)
        if offered is None:
            return
        self._faults.hit("before_final")
        gen = digest = 0
        try:
            if final.num_tokens != offered.offer.num_tokens:
                raise ValueError("FINAL is about another prompt length")
            if final.tail_block is not None:
                gen = int(self._memory.gens[final.tail_block])
                if gen % 2:
                    raise ValueError("the tail was announced before it was frozen")
                (block,) = read_blocks(self._memory, [final.tail_block])
                digest = tail_digest(self._layout, block, final.tail_valid_tokens)
            actions = offered.machine.on_prefill_finished(FinalBlocks(final, gen, digest))
        except ValueError as error:
            self._fault(offered, str(error))
            return
        self._apply(offered, actions)

    def _fault(self, offered: Offered, message: str) -> None:
        log.error(
            "transfer.engine_fault",
            request_id=offered.offer.request_id,
            error=message,
        )
        self._apply(offered, offered.machine.cancel(message, self._clock.now()))

    def _ask_back(self) -> None:
        self._is_asking_back = True
        for offered in self._offers.open():
            self._apply(offered, offered.machine.ask_back())

    def _unpin(self, key: str) -> None:
        offered = self._offers.by_key(key)
        if offered is not None:
            self._apply(offered, offered.machine.unpin())

    def _cancel(self, key: str, reason: str) -> None:
        offered = self._offers.by_key(key)
        if offered is not None:
            self._apply(offered, offered.machine.cancel(reason, self._clock.now()))

    def _begin_stop(self, grace_s: float) -> None:
        now = self._clock.now()
        self._stop_deadline = now + grace_s
        for offered in self._offers.open():
            self._apply(offered, offered.machine.cancel("worker stops", now, "stopped"))

    def _shut_down(self) -> None:
        with self._turn_lock:
            self._give_all_back()

    def _give_all_back(self) -> None:
        if self._pool_server is not None:
            self._pool_server.close()
        self._groups.close(_GROUPS_STOP_S)
        self._router.close()
        # Closing the context has ended every send, so what still waits can be given back now.
        self._land_flights()
        now = self._clock.now()
        for offered in self._offers.open():
            if offered.machine.owner is not None:
                actions = offered.machine.on_peer_lost(offered.machine.owner.base, now)
                self._apply(offered, [a for a in actions if isinstance(a, sender.Release)])
        for command in self._inbox.close():
            self._guarded(command)
        for offered in self._offers.open():
            # Offers that came in while the thread ended; nothing was announced of them.
            actions = offered.machine.cancel("worker stops", now, "stopped")
            self._apply(offered, [a for a in actions if isinstance(a, sender.Release)])
            if self._offers.by_key(offered.offer.key) is not None:
                log.error("transfer.source_not_released", xfer=offered.machine.xfer_id)

    # ---- timers, data -------------------------------------------------------------------------

    def _run_timers(self) -> None:
        now = self._clock.now()
        for xfer_id in self._timers.pop_due(now):
            assert isinstance(xfer_id, int)
            offered = self._offers.by_xfer(xfer_id)
            if offered is None:
                continue
            if offered.machine.is_forgotten(now):
                self._bury(xfer_id)
            else:
                self._apply(offered, offered.machine.on_time(now))

    def _bury(self, xfer_id: int) -> None:
        self._offers.bury(xfer_id)
        self._timers.discard(xfer_id)

    def _land_flights(self) -> None:
        now = self._clock.now()
        for xfer_id in self._pump.landed():
            offered = self._offers.by_xfer(xfer_id)
            if offered is not None:
                self._apply(offered, offered.machine.on_data_left(now))

    def _send_some(self, xfer_id: int) -> bool:
        """Send one DATA message of a transfer; True if it may have more."""
        offered = self._offers.by_xfer(xfer_id)
        owner = offered.machine.owner if offered is not None else None
        if offered is None or owner is None:
            return False
        is_grouped = offered.machine.plane == "nccl"
        if is_grouped and not self._groups.can_send(owner.base):
            return self._groups.has_group(owner.base)
        if not self._router.can_send_data(owner.route):
            return True
        out = offered.machine.take_data()
        if out is None:
            return False
        self._send_data(offered, out)
        return True

    def _send_data(self, offered: Offered, out: DataOut) -> None:
        now = self._clock.now()
        machine = offered.machine
        current = self._memory.gens[np.array(out.block_ids, dtype=np.int64)]
        if not offered.is_unchanged(out, current):
            self._apply(offered, machine.on_data_left(now))
            self._fault(offered, "a lent block has changed")
            return
        try:
            blocks, digests = offered.frames(out)
        except BaseException:
            self._apply(offered, machine.on_data_left(now))  # or its blocks are lent for ever
            raise
        body = codec.data_body(() if out.is_tail else out.indexes, out.is_tail, digests)
        if machine.plane == "nccl":
            self._groups.send(out.peer, FramesOut(machine.xfer_id, out.attempt, blocks, body))
            self._apply(offered, machine.on_data_left(self._clock.now()))  # a copy is under way
            self._faults.hit("mid_data")
            return
        try:
            sent = self._router.send_data(out.peer, machine.xfer_id, out.attempt, body, blocks)
        except BlockingIOError:
            # The pipe filled up in between; the receiver will ask for these blocks again.
            self._apply(offered, machine.on_data_left(now))
        except PeerGone:
            self._apply(offered, machine.on_data_left(now))
            self._peer_lost(out.peer.base)
        else:
            self._pump.flying(out.peer.base, machine.xfer_id, sent)
            offered.note_data(out, now)
            self._faults.hit("mid_data")

    # ---- sockets ------------------------------------------------------------------------------

    def _read_pool_server(self, server: PoolServer, readable: set[object]) -> None:
        for fd in readable:
            if not isinstance(fd, int) or fd == self._inbox.fileno():
                continue
            if fd == server.fileno():
                accepted = server.accept(self._clock.now())
                if accepted is not None:
                    self._poller.add(accepted)
                continue
            try:
                heard = server.read(fd, _MESSAGES_A_TURN)
            except PoolPeerLost as lost:
                self._poller.remove(fd)
                self._peer_lost(lost.base)
                continue
            for peer, message in heard:
                self._take(peer.route, message)
        # After reading: what it asked may have come while we were stopped.
        for fd in server.drop_silent(self._clock.now() - self._config.connect_timeout_s):
            self._poller.remove(fd)

    def _take(self, route: bytes, message: Message | WireError) -> None:
        """Handle what a connection said, unless it has said too much that makes no sense."""
        if self._is_muted(route):
            return
        try:
            if isinstance(message, WireError):
                raise message
            self._handle(parse_route(route), message)
        except WireError as error:
            self._bad_frame(route, error.reason)

    def _read_router(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            received = self._router.recv()
            if received is None:
                return
            route, frames = received
            if self._is_muted(route):
                continue
            try:
                self._handle(parse_route(route), decode(frames))
            except WireError as error:
                self._bad_frame(route, error.reason)
        self._inbox.wake()  # more may be waiting, but commands and timers come first

    def _is_muted(self, route: bytes) -> bool:
        is_muted = self._mutes.is_muted(route, self._clock.now())
        self.counters.muted_frames += is_muted
        return is_muted

    def _bad_frame(self, route: bytes, reason: str) -> None:
        self.counters.bad_frames += 1
        if self._mutes.add(route, self._clock.now()):
            log.warning("transfer.peer_muted", reason=reason)

    def _handle(self, peer: Peer, message: Message) -> None:
        header = message.header
        if peer.base[-8:] != header.incarnation.to_bytes(8, "little"):
            raise WireError("incarnation")
        self._peers.heard(peer.base, self._clock.now())
        if header.type is MessageType.HELLO:
            self._on_hello(peer, message)
        elif header.type is MessageType.PING:
            codec.parse(pb.Ping, message.body)
            self._send(peer, MessageType.PONG, message.body)
        elif header.type is MessageType.RENEW:
            self._on_renew(peer, message)
        elif header.type is MessageType.OPEN:
            self._on_open(peer, message)
        elif header.type in GROUP_MESSAGES:
            info = self._peers.get(peer.base)
            self._groups.handle(peer, message, info.plane if info is not None else "")
        else:
            self._on_session_message(peer, message)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        answer = answer_hello(self._end, message.body)
        if peer.base[-8:] != answer.incarnation.to_bytes(8, "little"):
            raise WireError("incarnation")
        log_fields = {"peer": answer.worker_id, "plane": answer.plane, "reason": answer.reason}
        if answer.plane is None:
            self.counters.incompatible += 1
            log.warning("transfer.peer_refused", **log_fields)
        else:
            busy, now = self._offers.busy_peers(), self._clock.now()
            if not self._peers.admit(peer.base, answer.plane, busy, now):
                self._reject(peer, 0, 0, RejectCode.BUSY, "too many peers", 1.0)
                return
            log.info("transfer.peer_welcome", **log_fields)
        self._send(peer, answer.type, answer.body)

    def _on_renew(self, peer: Peer, message: Message) -> None:
        ids = list(codec.parse(pb.Renew, message.body).xfer_ids)
        now = self._clock.now()
        known: list[int] = []
        for xfer_id in ids:
            offered = self._offers.by_xfer(xfer_id)
            if offered is not None and offered.machine.on_renew(peer.base, now):
                known.append(xfer_id)
                self.counters.renewals += 1
                self._timers.at_latest(xfer_id, offered.machine.next_deadline())
        body = pb.Renewed(xfer_ids=known).SerializeToString()
        self._send(peer, MessageType.RENEWED, body)

    def _on_open(self, peer: Peer, message: Message) -> None:
        header = message.header
        request = codec.parse(pb.Open, message.body)
        offered, refusal = self._find_offer(peer, header.xfer_id, request)
        if offered is None or refusal is not None:
            code, detail = refusal or (RejectCode.UNKNOWN, "no such transfer")
            self._reject(peer, header.xfer_id, header.attempt, code, detail)
            return
        try:
            args = codec.open_args(request, offered.machine.num_blocks, self._wire_of(request))
        except Unservable as error:
            detail = str(error)
            self._reject(peer, header.xfer_id, header.attempt, RejectCode.LAYOUT, detail)
            return
        if args.attempt != header.attempt:
            raise WireError("attempt")
        info = self._peers.get(peer.base)
        agreed = info.plane if info is not None else ""
        # Who may read in place may also copy; zmq serves whatever fails, but only if it is allowed.
        is_lesser = (args.plane, agreed) == ("memfd", "attach") or (
            args.plane == "zmq" and "zmq" in self._end.planes
        )
        if args.plane != agreed and not is_lesser:
            detail = "plane was not agreed"
            self._reject(peer, header.xfer_id, header.attempt, RejectCode.LAYOUT, detail)
            return
        if args.plane == "nccl" and not self._has_group_for(peer, args):
            return
        actions = offered.machine.on_open(peer, args, self._clock.now())
        if args.plane == "attach" and (
            self._is_asking_back or self._num_attached() > self._max_attached
        ):
            # So that those who read in place cannot starve the prefill of its own memory.
            actions += offered.machine.ask_back()
        self._apply(offered, actions)

    def _num_attached(self) -> int:
        return sum(offered.machine.num_attached for offered in self._offers.open())

    def _has_group_for(self, peer: Peer, args: OpenArgs) -> bool:
        """Tell whether an OPEN can be served by this peer's group; if not, it is told so."""
        frame_bytes = (args.wire or self._layout).block_bytes
        why = self._groups.problem(peer, frame_bytes)
        if why is not None:
            log.info("transfer.group_missing", peer=worker_id_of(peer.base), reason=why)
            self._groups.tell_gone(peer)
        return why is None

    def _group_ended(self, base: bytes) -> None:
        for offered in self._offers.open():
            if offered.machine.plane == "nccl":
                offered.machine.on_plane_lost(base)

    def _has_open_on_group(self, base: bytes) -> bool:
        return any(
            offered.machine.plane == "nccl"
            and offered.machine.owner is not None
            and offered.machine.owner.base == base
            for offered in self._offers.open()
        )

    def _find_offer(
        self, peer: Peer, xfer_id: int, request: pb.Open
    ) -> tuple[Offered | None, tuple[RejectCode, str] | None]:
        """Return the offer an OPEN means, or why it may not have it."""
        if self._peers.get(peer.base) is None:
            return None, (RejectCode.AUTH, "OPEN before HELLO")
        try:
            ticket = self._signer.verify(request.signed_ticket)
        except TicketError as error:
            return None, self._why_forged(request.signed_ticket, error)
        if ticket.xfer_id != xfer_id:
            return None, (RejectCode.AUTH, "the ticket is for another transfer")
        if self._offers.by_xfer(xfer_id) is None:
            # The offer may have been made, and its ticket opened, since this turn's commands ran.
            self._run_commands()
        return self._offers.by_xfer(xfer_id), None

    def _why_forged(self, signed: bytes, error: TicketError) -> tuple[RejectCode, str]:
        """Tell a ticket of an earlier life, which had another key, from one that is nobody's."""
        with contextlib.suppress(TicketError):
            if read_unverified(signed).incarnation != self._incarnation:
                return RejectCode.UNKNOWN, "the ticket is of an earlier life"
        return RejectCode.AUTH, str(error)

    def _wire_of(self, request: pb.Open) -> KvLayout | None:
        """Return what a frame is if the OPEN does not want blocks as they are."""
        # A mapped pool is read as it is; only what is sent can be converted.
        is_sent = codec.plane_name(request.plane) in SENT_PLANES
        agreed = self._config.wire_dtype if is_sent else AS_STORED
        layers = (request.layer_lo, request.layer_hi)
        heads = (request.head_lo, request.head_hi)
        return requested(self._layout, layers, heads, request.wire_dtype, agreed)

    def _on_session_message(self, peer: Peer, message: Message) -> None:
        header = message.header
        offered = self._offers.by_xfer(header.xfer_id)
        if offered is None:
            self._answer_unknown(peer, message)
            return
        if header.type is MessageType.NACK:
            indexes, tail = codec.nack_args(message.body)
            self.counters.resends += len(indexes) + tail
        started = self._clock.now()
        self._apply(offered, offered.event(peer, message, started))
        if header.type is MessageType.PULLED:
            meter = self._meter.plane(offered.machine.plane)
            meter.pulled_s.add(self._clock.now() - started)

    def _answer_unknown(self, peer: Peer, message: Message) -> None:
        header = message.header
        answers = {MessageType.DONE: MessageType.CLOSED, MessageType.ABORT: MessageType.ABORTED}
        answer = answers.get(header.type)
        if answer is not None:
            self._send(peer, answer, b"", header.xfer_id, header.attempt)

    def _peer_lost(self, base: bytes) -> None:
        if not base or self._is_put_off(partial(self._peer_lost, base)):
            return
        self._groups.on_peer_lost(base)
        now = self._clock.now()
        for offered in self._offers.open():
            self._apply(offered, offered.machine.on_peer_lost(base, now))

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, offered: Offered, actions: Sequence[SenderAction]) -> None:
        machine = offered.machine
        for action in actions:
            if isinstance(action, sender.Release):
                self._release(offered, action)
            elif isinstance(action, sender.Unpin):
                self.counters.unpinned += len(action.block_ids)
                self._on_event(SourceUnpinned(offered.offer.key, action.block_ids))
            elif isinstance(action, sender.DataReady):
                if machine.plane in SENT_PLANES:
                    self._pump.wants(action.peer.base, machine.xfer_id)
            else:
                self._send_action(offered, action)
        if self._offers.by_xfer(machine.xfer_id) is not None:
            self._timers.at_latest(machine.xfer_id, machine.next_deadline())

    def _send_action(self, offered: Offered, action: SendAction) -> None:
        if isinstance(action, sender.SendOpened):
            self.counters.opened += 1
        elif isinstance(action, sender.SendDrain):
            self.counters.asked_back += 1
        elif isinstance(action, sender.SendReject):
            self._note_reject(action.peer, action.code, action.detail)
        for kind, body in offered.messages(action):
            self._send(action.peer, kind, body, offered.machine.xfer_id, action.attempt)
        point = _POINT_AFTER.get(type(action))
        if point is not None:
            self._faults.hit(point)

    def _reject(
        self,
        peer: Peer,
        xfer_id: int,
        attempt: int,
        code: RejectCode,
        detail: str,
        retry_after_s: float = 0.0,
    ) -> None:
        self._note_reject(peer, code, detail)
        body = codec.reject_body(code, retry_after_s, detail)
        self._send(peer, MessageType.REJECT, body, xfer_id, attempt)

    def _note_reject(self, peer: Peer, code: RejectCode, detail: str) -> None:
        self.counters.note_reject(code.name)
        log.info("transfer.rejected", peer=worker_id_of(peer.base), code=code.name, detail=detail)

    def _send(
        self, peer: Peer, kind: MessageType, body: bytes, xfer_id: int = 0, attempt: int = 0
    ) -> None:
        server = self._pool_server
        bell = server.bell(peer.route) if server is not None else None
        again = partial(self._send, peer, kind, body, xfer_id, attempt)
        if bell is None and self._is_put_off(again):
            return
        # Noted by a command: the caller is in the middle of one session's actions.
        try:
            if bell is None:
                self._router.send(peer.route, kind, body, xfer_id, attempt)
            else:
                bell.send(kind, body, xfer_id, attempt)
        except PeerGone as error:
            log.info("transfer.peer_gone", peer=worker_id_of(peer.base), reason=str(error))
            self._inbox.put(lambda: self._peer_lost(peer.base))
        except HungUp as error:
            log.info("transfer.peer_gone", peer=worker_id_of(peer.base), reason=str(error))
            self._inbox.put(lambda: self._hang_up(peer.route))

    def _release(self, offered: Offered, action: sender.Release) -> None:
        surplus = self._offers.release(offered)
        if surplus is not None:
            self._bury(surplus)
        self.counters.note_released(action.outcome)
        if offered.machine.plan is not None:
            self.counters.note_plan(offered.machine.plan.reason)
        event = SourceReleased(offered.offer.key, action.outcome, action.reason, offered.stats())
        try:
            self._on_event(event)
        except Exception:  # a listener's fault is not the transfer's
            log.exception("transfer.source_listener_failed")
