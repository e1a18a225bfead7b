"""Decode end: a thread that owns every connection, every receiver session and all writing.

Blocks are lent by `reserve`; they go back by exactly one of SinkReady and SinkReleased, which is
delivered on this thread, the only one that writes them: once it is delivered, nothing writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.errors import ConfigError
from services.common.ids import BlockHash, BlockId
from services.kv.form import EXACT, UNKNOWN, form_of
from services.kv.layout import BLOCK_TOKENS, KvLayout
from services.telemetry.logs import get_logger
from services.transfer import receiver
from services.transfer.api import (
    NO_STATS,
    SinkEvent,
    SinkMoveWanted,
    SinkReady,
    SinkReleased,
    TransferStats,
)
from services.transfer.attach_plane import Attachments
from services.transfer.conversion import Conversion
from services.transfer.counters import SinkCounters
from services.transfer.cover import Shard, cover_fault
from services.transfer.doorbell import HungUp
from services.transfer.end_parts import EndParts
from services.transfer.heap import keep_freed
from services.transfer.intake import Intake
from services.transfer.key_ring import KeyWatch
from services.transfer.link_table import LinkParts, LinkTable
from services.transfer.loop import Inbox, Timers
from services.transfer.pairing import AS_STORED, expected_form, wire_layout
from services.transfer.peer_link import LinkState, PeerLink
from services.transfer.placement import Placement
from services.transfer.planes import SENT_PLANES
from services.transfer.receive import OpenRequest, Receive, target_of
from services.transfer.receive_table import ReceiveTable
from services.transfer.receiver import ReceiverAction, ReceiverPolicy, ReceiverTransfer
from services.transfer.renewer import LeaseRenewer, Target
from services.transfer.sink_groups import JoinTimer, SinkGroups, SinkParts
from services.transfer.ticket import Ticket, TicketError, read_unverified
from services.transfer.wire import GROUP_MESSAGES, Message, MessageType, WireError
from services.transfer.zmq_plane import (
    Poller,
    check_host,
    new_context,
    peer_base,
    split_endpoint,
)

log = get_logger(__name__)

_MESSAGES_A_TURN = 32
_IDLE_WAIT_S = 0.5
_GROUPS_STOP_S = 1.0
_LEASED = (
    receiver.ReceiverState.WAITING_BLOCKS,
    receiver.ReceiverState.PULLING,
    receiver.ReceiverState.ATTACHED,
)
_BACKLOG_POLL_S = 0.001  # a peer whose end is full reads on soon, or is stuck


class TransferSink:
    """Pulls KV from prefill workers into this worker's pool; implements api.Sink."""

    def __init__(self, parts: EndParts) -> None:
        config, layout, clock = parts.config, parts.layout, parts.clock
        self.counters = SinkCounters()
        self._memory = parts.memory
        self._layout = layout
        self._identity = parts.identity
        self._clock = clock
        self._faults = parts.faults
        self._config = config
        self._policy = ReceiverPolicy(
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            connect_timeout_s=config.connect_timeout_s * 2,  # HELLO, then the plane
            open_timeout_s=config.open_timeout_s,
            max_wait_s=config.max_wait_s,
            max_transfer_s=config.max_transfer_s,
            stall_timeout_s=config.stall_timeout_s,
            max_nacks=config.max_nacks,
            window_s=config.window_bytes / config.min_rate_bytes_s,
            attach_max_s=config.attach_max_s,
        )
        self._attachments = Attachments(parts.bases, config, self.counters)
        self._lock = threading.Lock()  # guards _open_keys and _is_stopping
        self._open_keys: set[str] = set()
        self._announced: list[Receive] = []  # told of blocks in this turn
        self._is_stopping = False
        self._inbox = Inbox()
        self._timers = Timers()
        self._poller = Poller()
        self._poller.add(self._inbox.fileno())
        self._context = new_context(config)
        self._stop_deadline: float | None = None
        self._has_backlog = False
        self._thread: threading.Thread | None = None
        self._keys = keys = KeyWatch.open(
            config.curve_key_file,
            clock.now(),
            is_quiet=True,  # the source tells
        )
        base = peer_base(parts.worker_id, parts.incarnation)
        self._receives = ReceiveTable()
        self._intake = Intake(parts, self.counters, self._receives, self._apply)
        end = self._attachments.end_of(parts.local_end())
        link_parts = LinkParts(
            self._context, end, config, keys, self._poller, self._timers, clock, parts.device
        )
        self._links = LinkTable(link_parts, self)
        shared = SinkParts(
            self.counters, self._receives, self._inbox, self._timers, self._intake, self._apply
        )
        self._groups = SinkGroups(parts, shared, self)
        self._renewer = LeaseRenewer(
            self._context, base, clock, config, keys, self._on_heard, self._on_renewed
        )

    # ---- api.Sink, any thread -----------------------------------------------------------------

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Start the threads."""
        self._on_event = on_event
        keep_freed(self._config.receive_budget_bytes)
        self._renewer.start()
        self._thread = threading.Thread(target=self._run, name="transfer-sink", daemon=True)
        self._thread.start()

    def open(
        self,
        key: str,
        ticket: bytes,
        attempt: int,
        have: Sequence[bool],
        block_hashes: Sequence[BlockHash],
        traceparent: str = "",
        kv_form: str = EXACT,
    ) -> None:
        """Send OPEN (credit 0); pulling begins with `reserve`."""
        request = OpenRequest(key, ticket, attempt, tuple(have), traceparent, kv_form)
        self.open_request(request, block_hashes)

    def open_request(self, request: OpenRequest, block_hashes: Sequence[BlockHash]) -> None:
        """The same, also for one shard of several whose cover the caller has checked."""
        key = request.key
        with self._lock:
            if key in self._open_keys:
                raise ValueError("this key is already receiving")
            refusal = None
            if self._is_stopping or self._thread is None:
                refusal = ("draining", "this worker is stopping")
            elif len(self._open_keys) >= self._config.max_transfers:
                refusal = ("overloaded", "too many handoffs are open")
            else:
                self._open_keys.add(key)
        hashes = tuple(block_hashes)

        def command() -> None:
            if refusal is not None:
                self._refuse(key, *refusal)
            else:
                self._open(request, hashes)

        if not self._inbox.put(command):
            # The thread has gone: nothing was and nothing will be written for this key.
            self._refuse(key, "draining", "this worker is stopping")

    def reserve(
        self, key: str, block_ids: Sequence[BlockId | None], tail_block: BlockId | None
    ) -> None:
        """Lend blocks to write: one per full block (None where it is had), and the tail's."""
        ids = tuple(block_ids)
        self._inbox.put(lambda: self._reserve(key, ids, tail_block))

    def cancel(self, key: str, reason: str) -> None:
        """Abort; SinkReleased follows when nothing writes the blocks any more."""
        self._inbox.put(lambda: self._cancel(key, reason))

    def detach(self, key: str, *, is_intact: bool) -> None:
        """Nothing reads the attached blocks of `key` any more; `is_intact`: they never changed."""
        self._inbox.put(lambda: self._detach(key, is_intact))

    def num_open(self) -> int:
        """Transfers not yet ended."""
        with self._lock:
            return len(self._open_keys)

    @property
    def layout(self) -> KvLayout:
        """Of the pool it writes to."""
        return self._layout

    def form_of(self, ticket: bytes) -> str:
        """Foretell the form of the KV a ticket brings; kv.form.UNKNOWN where that is open."""
        try:
            issued = read_unverified(ticket)
        except TicketError:
            return UNKNOWN  # `open` says what is wrong with it
        plane = self._links.planes().get(issued.worker_id)
        is_sent = None if plane is None else plane in SENT_PLANES
        return expected_form(issued.kv_dtype, self._layout, self._config.wire_dtype, is_sent)

    def planes(self) -> dict[str, str]:
        """Peer worker id -> plane in use."""
        return self._links.planes()

    def is_alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Abort everything and join the threads."""
        with self._lock:
            already, self._is_stopping = self._is_stopping, True
        thread = self._thread
        if thread is None:
            self._renewer.stop(0.0)
            self._inbox.close()
            self._context.term()
            return
        if not already:
            self._inbox.put(lambda: self._begin_stop(timeout_s / 2))
        thread.join(timeout_s)
        if thread.is_alive():
            log.error("transfer.sink_stuck", timeout_s=timeout_s)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_finished():
            try:
                self._turn()
            except Exception:  # the outermost loop: one bad turn must not end the handoffs
                log.exception("transfer.sink_turn_failed")
                threading.Event().wait(0.01)
        self._shut_down()

    def _is_finished(self) -> bool:
        if self._stop_deadline is None:
            return False
        return not self._receives or self._clock.now() >= self._stop_deadline

    def _turn(self) -> None:
        cpu_s, copy_cpu_s = time.thread_time(), self._intake.copy_cpu_s
        self._work()
        if self._announced:
            # All that an announcement has woken us for, but for the copying it was about.
            copied_s = self._intake.copy_cpu_s - copy_cpu_s
            spent_s = max(0.0, time.thread_time() - cpu_s - copied_s)
            for receive in self._announced:
                receive.announce_s += spent_s / len(self._announced)
            self._announced.clear()

    def _work(self) -> None:
        readable = self._poller.wait(self._wait_s())
        self._renewer.beat(self._clock.now())
        for command in self._inbox.take():
            self._guarded(command)
        for link in self._links.all():
            if link.is_client_readable(readable):
                self._read_client(link)
            if link.is_readable(readable):
                self._read_link(link)
            self._links.settle(link)
        self._watch_keys()
        self._run_timers()
        self._intake.grant_credit()
        self._flush_links()  # copying takes a while
        self._intake.pull_some()
        self._intake.say_pulled()
        self._flush_links()

    def _flush_links(self) -> None:
        self._has_backlog = False
        for link in self._links.all():
            self._has_backlog |= link.flush()

    def _watch_keys(self) -> None:
        if self._keys is None:
            return
        change = self._keys.poll(self._clock.now())
        self.counters.key_file_errors = self._keys.file_errors
        if change is not None and change.ended:
            self._links.cut(change.ended)

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # a command that fails must not take the others with it
            log.exception("transfer.sink_command_failed")

    def _wait_s(self) -> float:
        if self._intake.has_pulls:
            return 0.0
        now = self._clock.now()
        wait = _IDLE_WAIT_S
        due = self._timers.next_due()
        if due is not None:
            wait = min(wait, due - now)
        if self._stop_deadline is not None:
            wait = min(wait, self._stop_deadline - now)
        if self._has_backlog:
            wait = min(wait, _BACKLOG_POLL_S)
        return max(0.0, wait)

    # ---- commands -----------------------------------------------------------------------------

    def _open(self, request: OpenRequest, hashes: tuple[BlockHash, ...]) -> None:
        try:
            ticket = read_unverified(request.signed_ticket)
        except TicketError as error:
            why = f"the ticket cannot be read: {error}"
            self._refuse(request.key, "handoff_failed", why)
            return
        refusal = self._judge_ticket(ticket, request, hashes)
        if refusal is not None:
            self._refuse(request.key, *refusal)
            return
        now = self._clock.now()
        # The machine counts the peer's blocks; which rows of ours they are, the placement says.
        slot_size = ticket.block_size
        placement = Placement(ticket.num_tokens, slot_size, self._layout.block_size, request.have)
        policy = replace(self._policy, block_size=slot_size)
        machine = ReceiverTransfer(ticket.num_tokens, placement.slots_had(), policy, now)
        receive = Receive(request, ticket, machine, placement)
        self._receives.add(receive)
        self._apply(receive, machine.start())

    def _judge_ticket(
        self, ticket: Ticket, request: OpenRequest, hashes: tuple[BlockHash, ...]
    ) -> tuple[str, str] | None:
        """Return (code, message) if this ticket is not for us, not now, or not for this prompt."""
        if ticket.block_hashes != hashes:
            return "hash_mismatch", "the ticket names other blocks than the work item"
        num_hashes = ticket.num_tokens // BLOCK_TOKENS
        num_blocks = ticket.num_tokens // self._layout.block_size
        if (len(hashes), len(request.have)) != (num_hashes, num_blocks):
            return "hash_mismatch", "the ticket's length and its blocks do not fit"
        if ticket.kv_identity_fp != self._identity.fingerprint:
            return "incompatible", "the ticket is for another model or weights"
        if not request.is_shard:
            fault = cover_fault(self._layout, (Shard.of(ticket, self._layout),))
            if fault is not None:
                return "incompatible", fault
        wire_id = (ticket.xfer_id, request.attempt)
        if self._receives.by_wire(target_of(ticket), wire_id) is not None:
            return "handoff_failed", "the same attempt of this ticket is being received"
        try:
            check_host(split_endpoint(ticket.zmq_endpoint)[0], self._config)
        except (ConfigError, ValueError) as error:
            return "handoff_failed", f"the ticket's address is refused: {error}"
        return None

    def _reserve(
        self, key: str, ids: tuple[BlockId | None, ...], tail_block: BlockId | None
    ) -> None:
        receive = self._receives.by_key(key)
        if receive is None:
            return  # ended meanwhile; SinkReleased was sent
        self._faults.hit("before_pull")
        blocks = [block for block in (*ids, tail_block) if block is not None]
        if any(not 0 <= block < self._memory.num_blocks for block in blocks):
            log.error("transfer.engine_fault", request_id=receive.ticket.request_id)
            ids, tail_block = (), None  # does not fit the prompt: the receive fails by that
        now = self._clock.now()
        slots, tail_slot = receive.placement.bind(ids, tail_block)
        if receive.ticket.block_size == self._layout.block_size:
            slots, tail_slot = list(ids), tail_block
        self._apply(receive, receive.machine.reserve(slots, tail_slot, now))

    def _cancel(self, key: str, reason: str) -> None:
        receive = self._receives.by_key(key)
        if receive is not None:
            self._apply(receive, receive.machine.cancel(reason, self._clock.now()))

    def _detach(self, key: str, is_intact: bool) -> None:
        receive = self._attachments.end(key)
        if receive is None:
            return
        if not is_intact:
            self.counters.integrity_errors += 1
            log.warning("transfer.attached_block_changed", peer=receive.ticket.worker_id)
        self._apply(receive, receive.machine.detach(is_intact, self._clock.now()))

    def _begin_stop(self, grace_s: float) -> None:
        self._stop_deadline = self._clock.now() + grace_s
        for key in self._receives.open_keys():
            self._cancel(key, "worker stops")

    def _shut_down(self) -> None:
        self._receives.forget_all()
        self._groups.close(_GROUPS_STOP_S)
        self._links.close()
        for command in self._inbox.close():
            self._guarded(command)
        for key in self._receives.open_keys():
            self._cancel(key, "worker stops")
        self._renewer.stop(1.0)
        self._context.term()

    # ---- timers and liveness ------------------------------------------------------------------

    def _run_timers(self) -> None:
        now = self._clock.now()
        for item in self._timers.pop_due(now):
            if isinstance(item, Receive):
                link_progress_at = item.link.last_data if item.link is not None else 0.0
                self._apply(item, item.machine.on_time(now, link_progress_at))
            elif isinstance(item, PeerLink):
                self._links.check(item, now)
            elif isinstance(item, JoinTimer):
                self._groups.on_due(item.link)

    def _on_heard(self, target: Target, now: float) -> None:
        """Note a sign of life (called on the renew thread)."""
        self._inbox.put(lambda: self._links.heard(target, now))

    def _on_renewed(self, target: Target, asked: frozenset[int], known: frozenset[int]) -> None:
        """Take what the peer says about our leases (called on the renew thread)."""
        if asked != known:
            self._inbox.put(lambda: self._leases_lost(target, asked - known))

    def _leases_lost(self, target: Target, xfer_ids: frozenset[int]) -> None:
        now = self._clock.now()
        for receive in self._receives.of_peer(target):
            if receive.ticket.xfer_id in xfer_ids:
                self._apply(receive, receive.machine.on_renewed(False, now))

    # ---- connections (LinkOwner) ----------------------------------------------------------------

    def on_connected(self, receive: Receive) -> None:
        """The receive's connection is up."""
        link = receive.link
        assert link is not None
        if receive.ticket.block_size != link.layout.block_size:
            why = "the ticket and the prefill worker name different block sizes"
            self.on_connect_failed(receive, "incompatible", why)
            return
        if not Shard.of(receive.ticket, self._layout).is_of(link.layout):
            why = "the ticket and the prefill worker name different layers or heads"
            self.on_connect_failed(receive, "incompatible", why)
            return
        if link.agreed_plane == "nccl" and not self._groups.enter(receive):
            return
        self.on_plane_settled(receive)

    def on_plane_settled(self, receive: Receive) -> None:
        """The connection of a receive is up, and so is the plane it says."""
        link = receive.link
        assert link is not None
        wire_dtype = self._config.wire_dtype if receive.plane in SENT_PLANES else AS_STORED
        wire = wire_layout(link.layout, self._layout, wire_dtype)
        form = form_of(receive.ticket.kv_dtype, wire.kv_dtype, self._layout.kv_dtype)
        if not receive.takes(form):
            why = "the blocks that are here already are of another form"
            self.on_connect_failed(receive, "handoff_failed", why)
            return
        receive.conversion = None
        if not (link.layout.is_same(self._layout) and wire.is_same(self._layout)):
            receive.conversion = Conversion(self._memory, receive.placement, link.layout, wire)
        self._attachments.prepare(receive)
        now = self._clock.now()
        self._apply(receive, receive.machine.on_connected(receive.plane, now, wire.block_bytes))

    def on_connect_failed(self, receive: Receive, code: str, message: str) -> None:
        """There will be no connection."""
        self._apply(receive, receive.machine.on_connect_failed(code, message))

    def on_peer_lost(self, target: Target, *, is_dead: bool, is_planned: bool = False) -> None:
        """An established connection is gone; `is_planned` if we cut it to make another."""
        now = self._clock.now()
        for receive in self._receives.of_peer(target):
            self._apply(receive, receive.machine.on_peer_lost(is_dead, now, is_planned=is_planned))

    def on_plane_fallback(self, link: PeerLink) -> None:
        """A connection is up, but over a lesser plane than was agreed."""
        self.counters.plane_fallbacks += 1

    def on_link_closed(self, link: PeerLink) -> None:
        """A connection is closed."""
        self._groups.on_link_closed(link)

    def on_plane_changed(self, link: PeerLink) -> None:
        """The plane of a connection is another one now."""
        self._links.publish_planes()

    def is_in_use(self, target: Target) -> bool:
        """Tell whether anything is received from this peer."""
        return self._receives.uses(target)

    def _publish_leases(self, target: Target) -> None:
        opened = _LEASED
        table = self._receives.of_peer(target)
        ids = frozenset(r.ticket.xfer_id for r in table if r.machine.state in opened)
        self._renewer.set(target, ids)

    # ---- messages -----------------------------------------------------------------------------

    def _read_link(self, link: PeerLink) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                message = link.dealer.recv()
                if message is None:
                    break
                self._handle(link, message)
            except WireError as error:
                self.counters.bad_frames += 1
                log.warning("transfer.bad_frame", reason=error.reason)
                self.counters.discarded_frames += link.dealer.discard_rest()
                continue
            if link.state is LinkState.DOWN:
                return
            if message.header.type is MessageType.DATA:
                return  # its sender may be waiting for credit; what comes next is read next turn
        else:
            return  # more may be waiting, but commands and timers come first
        why = link.dealer.broken()
        if why is not None:
            log.info("transfer.link_broken", peer=link.target.worker_id, reason=why)
            if self._links.redial(link, why):
                return
            self.counters.key_refused += link.is_refused
            self._links.settle(link)
            self._links.drop(link, is_dead=False)

    def _read_client(self, link: PeerLink) -> None:
        """Read the pool's socket: the pool itself, then messages."""
        bell = link.bell
        if bell is None:
            link.on_client_readable()
            return
        num_messages = 0
        while num_messages < _MESSAGES_A_TURN or bell.has_unread:
            num_messages += 1
            try:
                message = bell.recv()
                if message is None:
                    return
                self._check_life(link, message)
                if link.has_bell_gap(message.header.seq):
                    self._on_gap(link)
                self._on_message(link, message)
            except WireError as error:
                self.counters.bad_frames += 1
                log.warning("transfer.bad_frame", reason=error.reason)
            except HungUp:
                self._links.drop(link, is_dead=True)
                return
            if link.state is LinkState.DOWN:
                return

    def _handle(self, link: PeerLink, message: Message) -> None:
        if link.state is LinkState.GREETING:
            link.on_greeting(message, self._clock.now())
            return
        self._check_life(link, message)
        if link.has_gap(message.header.seq):
            self._on_gap(link)
        self._on_message(link, message)

    def _check_life(self, link: PeerLink, message: Message) -> None:
        if message.header.incarnation != link.target.incarnation:
            raise WireError("incarnation")
        link.last_heard = self._clock.now()

    def _on_message(self, link: PeerLink, message: Message) -> None:
        header = message.header
        receive = self._receives.by_wire(link.target, (header.xfer_id, header.attempt))
        if header.type in GROUP_MESSAGES:
            self._groups.handle(link, message, receive)
            return
        if receive is None:
            self.counters.discarded_frames += link.dealer.discard_rest()
            if header.type is MessageType.ABORT:
                link.send(MessageType.ABORTED, b"", header.xfer_id, header.attempt)
            return
        if header.type is MessageType.DATA:
            self._intake.on_data(link, receive, message)
            return
        if header.type is MessageType.OPENED:
            self.counters.opened += receive.machine.state is receiver.ReceiverState.OPENING
        if header.type is MessageType.READY:
            self._announced.append(receive)
        self._apply(receive, receive.event(message, self._layout, self._clock.now()))

    def _on_gap(self, link: PeerLink) -> None:
        self.counters.gaps += 1
        log.warning("transfer.gap", peer=link.target.worker_id)
        now = self._clock.now()
        for receive in self._receives.of_peer(link.target):
            self._apply(receive, receive.machine.on_gap(now))

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, receive: Receive, actions: Sequence[ReceiverAction]) -> None:
        machine = receive.machine
        for action in actions:
            self._do(receive, action)
        if receive.published_state is not machine.state:
            receive.published_state = machine.state
            self._publish_leases(receive.target)
        if machine.state is not receiver.ReceiverState.RELEASED:
            self._timers.at_latest(receive, machine.next_deadline())

    def _do(self, receive: Receive, action: ReceiverAction) -> None:
        if isinstance(action, receiver.Deliver):
            self._faults.hit("before_done")
            self._deliver(receive, action)
        elif isinstance(action, receiver.Fail):
            self._fail(receive, action)
        elif isinstance(action, receiver.MoveIn):
            self._emit(SinkMoveWanted(receive.key, action.reason))
        elif isinstance(action, receiver.Forget):
            self._attachments.forget(receive)
            self._receives.forget(receive)
            self._timers.discard(receive)
        elif isinstance(action, receiver.Connect):
            self._links.connect(receive)
        elif isinstance(action, receiver.WorkReady):
            self._intake.queue(receive)
        else:
            receive.send(*receive.message(action))
            if isinstance(action, receiver.SendDone):
                self._faults.hit("after_done")

    def _deliver(self, receive: Receive, action: receiver.Deliver) -> None:
        self._end_key(receive)
        self.counters.ready += 1
        # Rows of the tail are counted in blocks of ours, whatever the peer's are.
        info = replace(action.final.info(), tail_valid_tokens=receive.placement.tail_valid)
        assert receive.kv_form is not None, "nothing comes without a connection"
        attached = self._attachments.begin(receive)
        self._emit(SinkReady(receive.key, info, receive.stats(), receive.kv_form, attached))

    def _fail(self, receive: Receive, action: receiver.Fail) -> None:
        self._end_key(receive)
        stats = receive.stats()
        self._refuse(receive.key, action.code, action.message, action.can_recompute, stats)

    def _end_key(self, receive: Receive) -> None:
        self._receives.end_key(receive)
        self._intake.drop(receive)
        self._groups.drop(receive)

    def _refuse(
        self,
        key: str,
        code: str,
        message: str,
        can_recompute: bool = True,
        stats: TransferStats | None = None,
    ) -> None:
        self.counters.note_released(code)
        self._emit(SinkReleased(key, code, message, can_recompute, stats or NO_STATS))

    def _emit(self, event: SinkEvent) -> None:
        if not isinstance(event, SinkMoveWanted):  # all others end a receive
            with self._lock:
                self._open_keys.discard(event.key)
        try:
            self._on_event(event)
        except Exception:  # a listener's fault is not the transfer's
            log.exception("transfer.sink_listener_failed")
