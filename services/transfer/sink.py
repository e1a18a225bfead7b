"""Decode end: a thread that owns every connection, every receiver session and all writing.

Blocks are lent by `reserve`; they go back by exactly one of SinkReady and SinkReleased, which is
delivered on this thread, the only one that writes them: once it is delivered, nothing writes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.clock import Clock
from services.common.errors import ConfigError
from services.common.ids import BlockHash, BlockId
from services.kv.layout import KvIdentity, KvLayout
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer import codec, receiver
from services.transfer.api import SinkEvent, SinkReady, SinkReleased, TransferStats
from services.transfer.block_writer import BlockWriter
from services.transfer.config import TransferConfig, ordered_planes
from services.transfer.counters import SinkCounters
from services.transfer.credit import CreditRound
from services.transfer.handshake import LocalEnd, host_id
from services.transfer.loop import Inbox, Timers
from services.transfer.peer_link import LinkState, PeerLink
from services.transfer.receiver import ReceiverAction, ReceiverPolicy, ReceiverTransfer
from services.transfer.renewer import LeaseRenewer, Target
from services.transfer.ticket import Ticket, TicketError, read_unverified
from services.transfer.values import OpenArgs
from services.transfer.wire import Message, MessageType, WireError
from services.transfer.zmq_plane import (
    Poller,
    check_host,
    load_curve_keys,
    new_context,
    peer_base,
    split_endpoint,
)

log = get_logger(__name__)

_MESSAGES_A_TURN = 32
_IDLE_WAIT_S = 0.5
_PULL_SLICE_S = 0.002  # then commands and messages are looked at
_PULLS_A_STEP = 8
_LIVENESS = "liveness"


@dataclass(slots=True, eq=False)
class _Receive:
    """One open with what the wire needs; lives until its DONE or ABORT is answered."""

    key: str
    signed_ticket: bytes
    ticket: Ticket
    attempt: int
    traceparent: str
    machine: ReceiverTransfer
    link: PeerLink | None = None
    pool: KvPoolMemory | None = None  # the peer's, on memfd
    plane: str = ""
    published_state: receiver.ReceiverState | None = None

    @property
    def wire_id(self) -> tuple[int, int]:
        """What messages call it."""
        return self.ticket.xfer_id, self.attempt

    @property
    def target(self) -> Target:
        """Who holds its KV."""
        ticket = self.ticket
        return Target(ticket.zmq_endpoint, ticket.worker_id, ticket.incarnation)


class TransferSink:
    """Pulls KV from prefill workers into this worker's pool; implements api.Sink."""

    def __init__(
        self,
        memory: KvPoolMemory,
        layout: KvLayout,
        identity: KvIdentity,
        worker_id: str,
        incarnation: int,
        clock: Clock,
        config: TransferConfig,
    ) -> None:
        self.counters = SinkCounters()
        self._memory = memory
        self._layout = layout
        self._identity = identity
        self._clock = clock
        self._config = config
        self._keys = load_curve_keys(config)
        self._end = LocalEnd(
            worker_id=worker_id,
            incarnation=incarnation,
            host_id=host_id(),
            uid=os.geteuid(),
            identity=identity,
            layout=layout,
            planes=ordered_planes(config),
        )
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
        )
        self._lock = threading.Lock()  # guards _open_keys, _is_stopping and _planes
        self._open_keys: set[str] = set()
        self._is_stopping = False
        self._planes: dict[str, str] = {}
        self._inbox = Inbox()
        self._timers = Timers()
        self._poller = Poller()
        self._poller.add(self._inbox.fileno())
        self._context = new_context()
        self._by_key: dict[str, _Receive] = {}
        self._receives: dict[Target, OrderedDict[tuple[int, int], _Receive]] = {}
        self._links: OrderedDict[Target, PeerLink] = OrderedDict()
        self._waiting: dict[Target, list[_Receive]] = {}  # for a connection
        self._hungry: OrderedDict[_Receive, None] = OrderedDict()
        self._pulling: OrderedDict[_Receive, None] = OrderedDict()
        self._writer = BlockWriter(memory, layout, config.digest_sampling)
        self._stop_deadline: float | None = None
        self._thread: threading.Thread | None = None
        self._renewer = LeaseRenewer(
            self._context,
            peer_base(worker_id, incarnation),
            clock,
            config,
            self._keys,
            self._on_heard,
            self._on_renewed,
        )

    # ---- api.Sink, any thread -----------------------------------------------------------------

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Start the threads."""
        self._on_event = on_event
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
    ) -> None:
        """Send OPEN (credit 0); pulling begins with `reserve`."""
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
        hashes, had = tuple(block_hashes), tuple(have)

        def command() -> None:
            if refusal is not None:
                self._refuse(key, *refusal)
            else:
                self._open(key, ticket, attempt, had, hashes, traceparent)

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

    def num_open(self) -> int:
        """Transfers not yet ended."""
        with self._lock:
            return len(self._open_keys)

    def planes(self) -> dict[str, str]:
        """Peer worker id -> plane in use."""
        with self._lock:
            return dict(self._planes)

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
        readable = self._poller.wait(self._wait_s())
        self._renewer.beat(self._clock.now())
        for command in self._inbox.take():
            self._guarded(command)
        for link in list(self._links.values()):
            if link.is_readable(readable):
                self._read_link(link)
            if link.is_client_readable(readable) and link.on_client_readable(self._clock.now()):
                self._drop_link(link, is_dead=True)
            self._settle_link(link)
        self._run_timers()
        self._grant_credit()
        self._pull_some()

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # a command that fails must not take the others with it
            log.exception("transfer.sink_command_failed")

    def _wait_s(self) -> float:
        if self._pulling:
            return 0.0
        now = self._clock.now()
        wait = _IDLE_WAIT_S
        due = self._timers.next_due()
        if due is not None:
            wait = min(wait, due - now)
        if self._stop_deadline is not None:
            wait = min(wait, self._stop_deadline - now)
        return max(0.0, wait)

    # ---- commands -----------------------------------------------------------------------------

    def _open(
        self,
        key: str,
        signed: bytes,
        attempt: int,
        have: tuple[bool, ...],
        hashes: tuple[BlockHash, ...],
        traceparent: str,
    ) -> None:
        try:
            ticket = read_unverified(signed)
        except TicketError as error:
            self._refuse(key, "handoff_failed", f"the ticket cannot be read: {error}")
            return
        refusal = self._judge_ticket(ticket, attempt, have, hashes)
        if refusal is not None:
            self._refuse(key, *refusal)
            return
        now = self._clock.now()
        machine = ReceiverTransfer(ticket.num_tokens, have, self._policy, now)
        receive = _Receive(key, signed, ticket, attempt, traceparent, machine)
        self._by_key[key] = receive
        self._receives.setdefault(receive.target, OrderedDict())[receive.wire_id] = receive
        self._apply(receive, machine.start())

    def _judge_ticket(
        self,
        ticket: Ticket,
        attempt: int,
        have: tuple[bool, ...],
        hashes: tuple[BlockHash, ...],
    ) -> tuple[str, str] | None:
        """Return (code, message) if this ticket is not for us, not now, or not for this prompt."""
        if ticket.block_hashes != hashes:
            return "hash_mismatch", "the ticket names other blocks than the work item"
        num_blocks = ticket.num_tokens // self._layout.block_size
        if not len(have) == len(hashes) == num_blocks:
            return "hash_mismatch", "the ticket's length and its blocks do not fit"
        if ticket.kv_identity_fp != self._identity.fingerprint:
            return "incompatible", "the ticket is for another model or weights"
        target = Target(ticket.zmq_endpoint, ticket.worker_id, ticket.incarnation)
        if (ticket.xfer_id, attempt) in self._receives.get(target, ()):
            return "handoff_failed", "the same attempt of this ticket is being received"
        try:
            check_host(split_endpoint(ticket.zmq_endpoint)[0], self._config)
        except (ConfigError, ValueError) as error:
            return "handoff_failed", f"the ticket's address is refused: {error}"
        return None

    def _reserve(
        self, key: str, ids: tuple[BlockId | None, ...], tail_block: BlockId | None
    ) -> None:
        receive = self._by_key.get(key)
        if receive is None:
            return  # ended meanwhile; SinkReleased was sent
        blocks = [block for block in (*ids, tail_block) if block is not None]
        if any(not 0 <= block < self._memory.num_blocks for block in blocks):
            log.error("transfer.engine_fault", request_id=receive.ticket.request_id)
            ids, tail_block = (), None  # does not fit the prompt: the receive fails by that
        now = self._clock.now()
        self._apply(receive, receive.machine.reserve(ids, tail_block, now))

    def _cancel(self, key: str, reason: str) -> None:
        receive = self._by_key.get(key)
        if receive is not None:
            self._apply(receive, receive.machine.cancel(reason, self._clock.now()))

    def _begin_stop(self, grace_s: float) -> None:
        self._stop_deadline = self._clock.now() + grace_s
        for key in list(self._by_key):
            self._cancel(key, "worker stops")

    def _shut_down(self) -> None:
        for receive in [r for table in self._receives.values() for r in table.values()]:
            self._forget(receive)
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        for command in self._inbox.close():
            self._guarded(command)
        for key in list(self._by_key):
            self._cancel(key, "worker stops")
        self._renewer.stop(1.0)
        self._context.term()

    # ---- timers and liveness ------------------------------------------------------------------

    def _run_timers(self) -> None:
        now = self._clock.now()
        for item in self._timers.pop_due(now):
            if isinstance(item, _Receive):
                link_progress_at = item.link.last_data if item.link is not None else 0.0
                self._apply(item, item.machine.on_time(now, link_progress_at))
            elif isinstance(item, PeerLink):
                self._check_link(item, now)

    def _check_link(self, link: PeerLink, now: float) -> None:
        if self._links.get(link.target) is not link:
            return
        link.on_time(now)
        self._settle_link(link)
        if link.state is not LinkState.UP:
            return
        if self._receives.get(link.target):
            if now - link.last_heard > self._config.peer_timeout_s:
                log.warning("transfer.peer_silent", peer=link.target.worker_id)
                self._drop_link(link, is_dead=False)
                return
        else:
            link.last_heard = now  # nobody pings an idle peer
        self._timers.at_latest(link, now + self._config.ping_interval_s)

    def _on_heard(self, target: Target, now: float) -> None:
        """Note a sign of life (called on the renew thread)."""
        self._inbox.put(lambda: self._heard(target, now))

    def _heard(self, target: Target, now: float) -> None:
        link = self._links.get(target)
        if link is not None:
            link.last_heard = max(link.last_heard, now)

    def _on_renewed(self, target: Target, asked: frozenset[int], known: frozenset[int]) -> None:
        """Take what the peer says about our leases (called on the renew thread)."""
        if asked != known:
            self._inbox.put(lambda: self._leases_lost(target, asked - known))

    def _leases_lost(self, target: Target, xfer_ids: frozenset[int]) -> None:
        now = self._clock.now()
        for receive in self._table(target):
            if receive.ticket.xfer_id in xfer_ids:
                self._apply(receive, receive.machine.on_renewed(False, now))

    # ---- connections --------------------------------------------------------------------------

    def _connect(self, receive: _Receive) -> None:
        now = self._clock.now()
        link = self._links.get(receive.target)
        if link is None:
            self._drop_idle_links()
            link = PeerLink(
                self._context,
                receive.target,
                self._end,
                self._config,
                self._keys,
                self._poller,
                now,
            )
            self._links[receive.target] = link
            self._timers.at_latest(link, link.deadline)
        receive.link = link
        if link.state is LinkState.UP:
            self._connected(receive, link)
        else:
            self._waiting.setdefault(receive.target, []).append(receive)

    def _connected(self, receive: _Receive, link: PeerLink) -> None:
        receive.link, receive.pool, receive.plane = link, link.pool, link.plane
        self._links.move_to_end(link.target)
        actions = receive.machine.on_connected(link.plane, self._clock.now())
        self._apply(receive, actions)

    def _settle_link(self, link: PeerLink) -> None:
        """Tell the receives that wait for a connection how it went."""
        if self._links.get(link.target) is not link:
            return
        if link.failure is not None:
            self._remove_link(link)
            self._fail_waiting(link, link.failure.code, link.failure.message)
        elif link.state is LinkState.UP and link.target in self._waiting:
            self._publish_planes()
            self._timers.at_latest(link, self._clock.now() + self._config.ping_interval_s)
            for receive in self._waiting.pop(link.target):
                self._connected(receive, link)

    def _fail_waiting(self, link: PeerLink, code: str, message: str) -> None:
        for receive in self._waiting.pop(link.target, []):
            self._apply(receive, receive.machine.on_connect_failed(code, message))

    def _drop_link(self, link: PeerLink, *, is_dead: bool) -> None:
        if self._links.get(link.target) is not link:
            return
        self._remove_link(link)
        why = "the connection to the prefill worker broke"
        self._fail_waiting(link, "handoff_failed", why)
        now = self._clock.now()
        for receive in self._table(link.target):
            self._apply(receive, receive.machine.on_peer_lost(is_dead, now))

    def _remove_link(self, link: PeerLink) -> None:
        del self._links[link.target]
        self._timers.discard(link)
        link.close()
        self._publish_planes()

    def _drop_idle_links(self) -> None:
        """Keep the number of connections bounded; one in use is never closed."""
        for target, link in list(self._links.items()):
            if len(self._links) < self._config.max_peers:
                return
            if not self._receives.get(target):
                self._remove_link(link)

    def _table(self, target: Target) -> list[_Receive]:
        table = self._receives.get(target)
        return list(table.values()) if table is not None else []

    def _publish_planes(self) -> None:
        planes = {
            link.target.worker_id: link.plane
            for link in self._links.values()
            if link.state is LinkState.UP
        }
        with self._lock:
            self._planes = planes

    def _publish_leases(self, target: Target) -> None:
        opened = (receiver.ReceiverState.WAITING_BLOCKS, receiver.ReceiverState.PULLING)
        table = self._table(target)
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
            if link.state is LinkState.DOWN:
                return
        else:
            self._inbox.wake()  # more may be waiting, but commands and timers come first
            return
        why = link.dealer.broken()
        if why is not None:
            log.info("transfer.link_broken", peer=link.target.worker_id, reason=why)
            self._drop_link(link, is_dead=False)

    def _handle(self, link: PeerLink, message: Message) -> None:
        header = message.header
        if link.state is LinkState.GREETING:
            link.on_greeting(message, self._clock.now())
            return
        if header.incarnation != link.target.incarnation:
            raise WireError("incarnation")
        link.last_heard = self._clock.now()
        if link.has_gap(header.seq):
            self._on_gap(link)
        table = self._receives.get(link.target)
        receive = table.get((header.xfer_id, header.attempt)) if table is not None else None
        if receive is None:
            self.counters.discarded_frames += link.dealer.discard_rest()
            if header.type is MessageType.ABORT:
                link.dealer.send(MessageType.ABORTED, b"", header.xfer_id, header.attempt)
            return
        if header.type is MessageType.DATA:
            self._on_data(link, receive, message)
        else:
            self._apply(receive, self._session_event(receive.machine, message))

    def _on_gap(self, link: PeerLink) -> None:
        self.counters.gaps += 1
        log.warning("transfer.gap", peer=link.target.worker_id)
        now = self._clock.now()
        for receive in self._table(link.target):
            self._apply(receive, receive.machine.on_gap(now))

    def _session_event(self, machine: ReceiverTransfer, message: Message) -> list[ReceiverAction]:
        kind, now = message.header.type, self._clock.now()
        if kind is MessageType.OPENED:
            codec.parse(pb.Opened, message.body)
            self.counters.opened += machine.state is receiver.ReceiverState.OPENING
            return machine.on_opened(now)
        if kind is MessageType.READY:
            count = self._layout.digests_per_block
            return machine.on_ready(codec.ready_args(message.body, machine.num_blocks, count), now)
        if kind is MessageType.FINAL:
            return machine.on_final(codec.final_args(message.body), now)
        if kind is MessageType.REJECT:
            return machine.on_reject(*codec.reject_args(message.body))
        if kind is MessageType.ABORT:
            reason = codec.clip(codec.parse(pb.Abort, message.body).reason)
            return machine.on_abort(reason)
        if kind in (MessageType.CLOSED, MessageType.ABORTED):
            return machine.on_closed()
        raise WireError("direction")

    def _on_data(self, link: PeerLink, receive: _Receive, message: Message) -> None:
        machine = receive.machine
        n_payload = message.header.n_payload
        indexes = codec.data_indexes(message.body, n_payload, machine.num_blocks)
        machine.account(n_payload)
        link.last_data = self._clock.now()
        for index in indexes:
            dest = machine.dest_of(index)
            if dest is None:
                # Late, duplicate, or the transfer is over: never into a block of the pool.
                link.dealer.skip_block()
                self.counters.discarded_frames += 1
                continue
            wrong = self._writer.receive(machine, index, dest, link.dealer.recv_block)
            self._on_verdict(receive, index, wrong)
        if machine.credit_wanted():
            self._hungry[receive] = None

    # ---- blocks -------------------------------------------------------------------------------

    def _on_verdict(self, receive: _Receive, index: int, wrong: str | None) -> None:
        if wrong is None:
            self.counters.blocks += 1
        else:
            self.counters.integrity_errors += 1
            log.warning(
                "transfer.integrity_error",
                peer=receive.ticket.worker_id,
                reason=wrong,
                plane=receive.plane,
            )
        actions = receive.machine.on_block(index, wrong is None, self._clock.now(), wrong or "")
        self._apply(receive, actions)

    def _pull_some(self) -> None:
        end = self._clock.now() + _PULL_SLICE_S
        while self._pulling:
            receive, _ = self._pulling.popitem(last=False)
            self._pull_step(receive)
            if receive.machine.has_pulls():
                self._pulling[receive] = None  # to the back: receives take turns
            if self._clock.now() >= end:
                return

    def _pull_step(self, receive: _Receive) -> None:
        pool, machine = receive.pool, receive.machine
        if pool is None:
            return
        done: list[int] = []
        for pull in machine.take_pulls(_PULLS_A_STEP):
            if machine.dest_of(pull.index) is None:
                return  # the block before this one ended the receive
            done.append(pull.index)
            self._on_verdict(receive, pull.index, self._writer.pull(machine, pool, pull))
        if machine.state is receiver.ReceiverState.PULLING:
            self._send_pulled(receive, done)

    def _send_pulled(self, receive: _Receive, indexes: list[int]) -> None:
        for lo, hi in _ranges(indexes):
            self._send(receive, MessageType.PULLED, pb.Pulled(lo=lo, hi=hi).SerializeToString())

    def _grant_credit(self) -> None:
        if not self._hungry:
            return
        config = self._config
        round_ = CreditRound(
            block_bytes=self._layout.block_bytes,
            window_bytes=config.window_bytes,
            budget_bytes=config.receive_budget_bytes,
            chunk_bytes=config.data_message_bytes,
            used={target: _outstanding(table) for target, table in self._receives.items()},
        )
        for receive in list(self._hungry):
            wanted = receive.machine.credit_wanted()
            if wanted == 0:
                del self._hungry[receive]
                continue
            size = round_.grant(receive.target, wanted)
            if size:
                self._apply(receive, receive.machine.grant(size, self._clock.now()))

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, receive: _Receive, actions: Sequence[ReceiverAction]) -> None:
        machine = receive.machine
        for action in actions:
            if isinstance(action, receiver.Deliver):
                self._deliver(receive, action)
            elif isinstance(action, receiver.Fail):
                self._fail(receive, action)
            elif isinstance(action, receiver.Forget):
                self._forget(receive)
            elif isinstance(action, receiver.Connect):
                self._connect(receive)
            elif isinstance(action, receiver.WorkReady):
                self._queue_work(receive)
            else:
                self._send_action(receive, action)
        if receive.published_state is not machine.state:
            receive.published_state = machine.state
            self._publish_leases(receive.target)
        if machine.state is not receiver.ReceiverState.RELEASED:
            self._timers.at_latest(receive, machine.next_deadline())

    def _queue_work(self, receive: _Receive) -> None:
        if receive.machine.has_pulls():
            self._pulling[receive] = None
        if receive.machine.credit_wanted():
            self._hungry[receive] = None

    def _send_action(
        self,
        receive: _Receive,
        action: receiver.SendOpen
        | receiver.SendCredit
        | receiver.SendNack
        | receiver.SendDone
        | receiver.SendAbort
        | receiver.SendAborted,
    ) -> None:
        if isinstance(action, receiver.SendOpen):
            args = OpenArgs(receive.attempt, action.have, receive.plane, 0, receive.traceparent)
            body = codec.open_body(receive.signed_ticket, args)
            self._send(receive, MessageType.OPEN, body)
        elif isinstance(action, receiver.SendCredit):
            body = pb.Credit(size_bytes=action.total_bytes).SerializeToString()
            self._send(receive, MessageType.CREDIT, body)
        elif isinstance(action, receiver.SendNack):
            body = codec.nack_body(action.indexes, action.tail, action.reason)
            self._send(receive, MessageType.NACK, body)
        elif isinstance(action, receiver.SendDone):
            body = pb.DoneTransfer(
                digest_of_digests=action.digest_of_digests, size_bytes=action.size_bytes
            ).SerializeToString()
            self._send(receive, MessageType.DONE, body)
        elif isinstance(action, receiver.SendAbort):
            body = pb.Abort(reason=codec.clip(action.reason)).SerializeToString()
            self._send(receive, MessageType.ABORT, body)
        else:
            self._send(receive, MessageType.ABORTED, b"")

    def _send(self, receive: _Receive, kind: MessageType, body: bytes) -> None:
        link = receive.link
        if link is None or link.state is LinkState.DOWN:
            return  # every message is repeated or covered by the lease
        link.dealer.send(kind, body, receive.ticket.xfer_id, receive.attempt)

    def _deliver(self, receive: _Receive, action: receiver.Deliver) -> None:
        self._end_key(receive)
        self.counters.ready += 1
        self._emit(SinkReady(receive.key, action.final.info(), self._stats(receive)))

    def _fail(self, receive: _Receive, action: receiver.Fail) -> None:
        self._end_key(receive)
        self._refuse(
            receive.key, action.code, action.message, action.can_recompute, self._stats(receive)
        )

    def _end_key(self, receive: _Receive) -> None:
        self._by_key.pop(receive.key, None)
        self._hungry.pop(receive, None)
        self._pulling.pop(receive, None)

    def _refuse(
        self,
        key: str,
        code: str,
        message: str,
        can_recompute: bool = True,
        stats: TransferStats | None = None,
    ) -> None:
        self.counters.note_released(code)
        self._emit(SinkReleased(key, code, message, can_recompute, stats or _NO_STATS))

    def _emit(self, event: SinkEvent) -> None:
        with self._lock:
            self._open_keys.discard(event.key)
        try:
            self._on_event(event)
        except Exception:  # a listener's fault is not the transfer's
            log.exception("transfer.sink_listener_failed")

    def _forget(self, receive: _Receive) -> None:
        table = self._receives.get(receive.target)
        if table is not None:
            table.pop(receive.wire_id, None)
            if not table:
                del self._receives[receive.target]
        self._timers.discard(receive)

    def _stats(self, receive: _Receive) -> TransferStats:
        machine = receive.machine
        return TransferStats(
            plane=receive.plane,
            peer=receive.ticket.worker_id,
            size_bytes=machine.blocks_moved * self._layout.block_bytes,
            blocks_moved=machine.blocks_moved,
            blocks_deduped=machine.blocks_deduped,
            open_us=_elapsed_us(machine.open_sent_at, machine.opened_at),
            pull_us=_elapsed_us(machine.first_ready_at, machine.finished_at),
            nacks=machine.num_nacks,
        )


_NO_STATS = TransferStats(plane="", peer="")


def _outstanding(table: OrderedDict[tuple[int, int], _Receive]) -> int:
    return sum(receive.machine.outstanding_bytes for receive in table.values())


def _elapsed_us(start: float | None, end: float | None) -> int:
    return 0 if start is None or end is None else round((end - start) * 1e6)


def _ranges(indexes: list[int]) -> list[tuple[int, int]]:
    """Return the ascending runs [lo, hi) that `indexes` are made of."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
