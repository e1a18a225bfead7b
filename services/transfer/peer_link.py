"""Decode side of one connection: HELLO, choice of plane, and whether the peer still lives."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial

from services.kv.block_copy import CopyBlocks
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.telemetry.logs import get_logger
from services.transfer import codec
from services.transfer.config import TransferConfig
from services.transfer.cuda_ipc_plane import device_copier
from services.transfer.device import Device, DeviceError
from services.transfer.doorbell import Doorbell, HungUp, fits
from services.transfer.fault_plane import open_bell, open_dealer
from services.transfer.handshake import (
    Incompatible,
    LocalEnd,
    Welcome,
    hello_body,
    read_incompatible,
    read_welcome,
)
from services.transfer.key_ring import Dialler, KeyWatch, LinkKeys
from services.transfer.memfd_plane import ExpectedPool, HandoverError, PoolClient
from services.transfer.pairing import AS_STORED, max_frame_bytes, wire_layout
from services.transfer.planes import HANDED_PLANES, SENT_PLANES
from services.transfer.renewer import Target
from services.transfer.values import RejectCode
from services.transfer.wire import Message, MessageType, WireError
from services.transfer.zmq_plane import (
    KEY_TROUBLE,
    MAIN,
    NOT_REACHED,
    NoSocket,
    Poller,
    SinkContext,
    peer_base,
)

log = get_logger(__name__)


class LinkState(Enum):
    """How far a connection has come."""

    GREETING = "greeting"
    ATTACHING = "attaching"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """Why a connection did not come up, in terms of the error table."""

    code: str
    message: str


class PeerLink:
    """A connection to one life of one prefill worker."""

    def __init__(
        self,
        context: SinkContext,
        target: Target,
        end: LocalEnd,
        config: TransferConfig,
        keys: KeyWatch | None,
        poller: Poller,
        now: float,
    ) -> None:
        self.target = target
        self.state = LinkState.GREETING
        self.plane = ""
        self.agreed_plane = ""  # the best one of this connection; `plane` is the one in use
        self.pool: KvPoolMemory | None = None
        self.copy: CopyBlocks | None = None  # on cuda_ipc: the blocks of `pool` are on a device
        self.device: Device | None = None
        self.layout: KvLayout = end.layout  # of the peer's pool, known once the link is up
        self.failure: LinkFailure | None = None
        self.is_refused = False  # for our keys
        self.last_heard = now
        self.last_data = 0.0
        self.deadline = now + config.connect_timeout_s
        self.next_seq: int | None = None
        self.next_bell_seq = 1
        self._end = end
        self._poller = poller
        self._client: PoolClient | None = None
        self._welcome: Welcome | None = None
        self._context = context
        self._config = config
        self._keys = keys
        self._dialler: Dialler | None = None
        self.link_keys: LinkKeys | None = None
        self._dial_at: float | None = None
        if keys is not None:
            self._dialler = Dialler(partial(keys.candidates, target.endpoint))
            self.link_keys, _ = self._dialler.next()
        self._dial()

    def _dial(self) -> None:
        base = peer_base(self._end.worker_id, self._end.incarnation)
        limit = max_frame_bytes(self._end.layout)
        endpoint, keys = self.target.endpoint, self.link_keys
        self._is_dialled, self._dial_at = False, None
        try:
            dealer = open_dealer(self._context, endpoint, base, MAIN, self._config, keys, limit)
        except NoSocket as error:
            self._fail("handoff_failed", f"no socket for a connection ({error})")
            return
        self.dealer, self._is_dialled = dealer, True
        self._poller.add(self.dealer)
        self.dealer.send(MessageType.HELLO, hello_body(self._end))

    def redial(self, why: str, now: float) -> bool:
        """Try again after a connection that never came up; False when all has been tried.

        Other keys are tried only of a peer that listened: one that is binding its socket anew would
        be shown an older key for no reason by the time it is there.
        """
        if self._dialler is None or self.state is not LinkState.GREETING:
            return False
        self._hang_up()
        dialler = self._dialler
        self.link_keys, wait_s = dialler.again() if why == NOT_REACHED else dialler.next()
        if self.link_keys is None or now + wait_s >= self.deadline:
            self.is_refused = why in KEY_TROUBLE
            message = "the prefill worker admits no key of ours" if self.is_refused else why
            self._fail("handoff_failed", message)
            return False
        self._dial_at = now + wait_s
        if wait_s == 0:
            self._dial()
        return True

    def next_due(self) -> float:
        """When `on_time` has something to do before the link is up."""
        return self.deadline if self._dial_at is None else min(self._dial_at, self.deadline)

    def uses(self, publics: Collection[bytes]) -> bool:
        """Tell whether the connection was made with one of these keys."""
        keys = self.link_keys
        return keys is not None and (keys.own.public in publics or keys.server in publics)

    def send(self, kind: MessageType, body: bytes, xfer_id: int, attempt: int) -> None:
        """Send a message of a transfer while the connection stands."""
        if self.state is LinkState.DOWN or not self._is_dialled:
            return
        bell = self.bell
        if bell is None or not fits(body):
            self.dealer.send(kind, body, xfer_id, attempt)
            return
        # A peer that has gone shows when its end is read; all this is repeated if need be.
        with contextlib.suppress(HungUp):
            bell.send(kind, body, xfer_id, attempt)

    def flush(self) -> bool:
        """Let messages on the pool's socket leave; True while some have to wait."""
        bell = self.bell
        if bell is None:
            return False
        with contextlib.suppress(HungUp):  # it shows when its end is read
            bell.flush()
            return bell.has_backlog
        return False

    @property
    def can_fall_back(self) -> bool:
        """Tell whether both ends allow KV to come over zmq, where what was agreed has failed."""
        theirs = self._welcome.planes if self._welcome is not None else frozenset[str]()
        return "zmq" in self._end.planes and "zmq" in theirs

    @property
    def bell(self) -> Doorbell | None:
        """The pool's socket while it carries messages; ZMQ does else."""
        is_up = self.state is LinkState.UP and self._client is not None
        return self._client.bell if is_up and self._client is not None else None

    def is_readable(self, readable: set[object]) -> bool:
        """Tell whether this connection has something to read; one just dropped has not."""
        return self.state is not LinkState.DOWN and any(
            socket in readable for socket in self.dealer.sockets
        )

    def is_client_readable(self, readable: set[object]) -> bool:
        """Tell whether the pool's socket has something to say."""
        client = self._client
        return client is not None and (client.fileno() in readable or client.bell.is_due())

    def has_gap(self, seq: int) -> bool:
        """Note a sequence number of ZMQ's; True if one or more before it are missing."""
        expected, self.next_seq = self.next_seq, (seq + 1) & 0xFFFFFFFF
        return expected is not None and seq != expected

    def has_bell_gap(self, seq: int) -> bool:
        """Do the same for the pool's socket: a packet that made no sense is missing too."""
        expected, self.next_bell_seq = self.next_bell_seq, (seq + 1) & 0xFFFFFFFF
        return seq != expected

    def on_greeting(self, message: Message, now: float) -> None:
        """Take the answer to HELLO."""
        if self.state is not LinkState.GREETING:
            return
        kind = message.header.type
        try:
            if kind is MessageType.WELCOME:
                self._on_welcome(message, now)
            elif kind is MessageType.INCOMPATIBLE:
                raise read_incompatible(message.body)
            elif kind is MessageType.REJECT:
                self._on_reject(message.body)
        except Incompatible as error:
            self._fail("incompatible", f"the prefill worker does not fit: {error}")
        except WireError as error:
            self._fail("handoff_failed", f"no sense in the answer to HELLO ({error.reason})")

    def on_client_readable(self) -> None:
        """Take the pool from its socket."""
        client = self._client
        if client is None or self.state is not LinkState.ATTACHING:
            return
        assert self._welcome is not None
        expected = ExpectedPool(
            self.target.incarnation,
            self._welcome.num_blocks,
            self._welcome.nonce,
            self.layout,
            is_on_device=self._welcome.plane == "cuda_ipc",
        )
        try:
            pool = client.receive(expected)
            if pool is None:
                return
            if expected.is_on_device:
                self.copy = self._open_device(client.device_handle, pool)
        except (HandoverError, DeviceError) as error:
            self._fall_back(str(error))
            return
        self.pool = pool
        self._up(self._welcome.plane)

    def _open_device(self, handle: bytes, pool: KvPoolMemory) -> CopyBlocks:
        if self.device is None:
            raise DeviceError("this worker has no device")
        blocks = self.device.open_pool(handle, pool.num_blocks, pool.layout.block_bytes)
        return device_copier(blocks)

    def on_time(self, now: float) -> None:
        """Dial again when it is time, and give up on a handshake that takes too long."""
        if self._dial_at is not None and self._dial_at <= now < self.deadline:
            self._dial()
        if self.state is LinkState.ATTACHING and now >= self.deadline:
            self._fall_back("no answer on the pool's socket")
        elif self.state is LinkState.GREETING and now >= self.deadline:
            self._fail("handoff_failed", "the prefill worker did not answer HELLO")

    def close(self) -> None:
        """Close both sockets; a mapping lives as long as someone still reads it."""
        self.state = LinkState.DOWN
        self._close_client()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._is_dialled:  # else there is no connection between two tries
            self._is_dialled = False
            self._poller.remove(self.dealer)
            self.dealer.close()

    def _on_welcome(self, message: Message, now: float) -> None:
        if message.header.incarnation != self.target.incarnation:
            self._fail("handoff_failed", "the prefill worker has restarted since the ticket")
            return
        if self._keys is not None and self.link_keys is not None:
            self._keys.note_worked(self.target.endpoint, self.link_keys.server)
        welcome = read_welcome(self._end, message.body)
        self._welcome = welcome
        self.layout, self.agreed_plane = welcome.layout, welcome.plane
        if welcome.plane not in HANDED_PLANES:
            self._up(welcome.plane)
            return
        base = peer_base(self._end.worker_id, self._end.incarnation)
        try:
            self._client = PoolClient(welcome.uds_path, base)
            self._client.bell = open_bell(self._client.bell, self.dealer)
        except HandoverError as error:
            self._fall_back(str(error))
            return
        self.state = LinkState.ATTACHING
        self._poller.add(self._client.fileno())

    def _on_reject(self, body: bytes) -> None:
        code, _, detail = codec.reject_args(body)
        name = "incompatible" if code is RejectCode.LAYOUT else "handoff_failed"
        self._fail(name, f"the prefill worker refused us ({code.name}): {detail}")

    def _up(self, plane: str) -> None:
        self.plane = plane
        self.state = LinkState.UP
        log.info(
            "transfer.plane",
            peer=self.target.worker_id,
            plane=plane,
            peer_layout=str(self.layout),
            converts=not self.layout.is_same(self._end.layout),
            wire_dtype=wire_layout(
                self.layout,
                self._end.layout,
                self._end.wire_dtype if plane in SENT_PLANES else AS_STORED,
            ).kv_dtype,
        )

    def _fall_back(self, reason: str) -> None:
        """Use zmq after mapping failed: never silently, and only if it is allowed."""
        self._close_client()
        log.warning(
            "transfer.plane_fallback",
            peer=self.target.worker_id,
            reason=reason,
            plane="zmq" if self.can_fall_back else "none",
        )
        if self.can_fall_back:
            self._up("zmq")
        else:
            self._fail("handoff_failed", f"the pool could not be mapped: {reason}")

    def _fail(self, code: str, message: str) -> None:
        self.failure = LinkFailure(code, message)
        log.warning(
            "transfer.link_failed",
            peer=self.target.worker_id,
            code=code,
            error=message,
        )

    def _close_client(self) -> None:
        if self._client is not None:
            if self.state is not LinkState.GREETING:
                self._poller.remove(self._client.fileno())
            self._client.close()
            self._client = None
