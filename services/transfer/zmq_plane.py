"""The only module with ZMQ sockets: ROUTER at the prefill side, one DEALER a peer at decode.

Traps this guards against: ROUTER drops silently without MANDATORY; a reused identity is ignored
without HANDOVER; blocking sends; unlimited message size; recv_into truncates silently.
"""

from __future__ import annotations

import ipaddress
import secrets
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from services.common.errors import ConfigError
from services.telemetry.logs import get_logger
from services.transfer.config import MIB, TransferConfig
from services.transfer.key_ring import CurveKeys, KeyWatch, LinkKeys
from services.transfer.values import Peer
from services.transfer.wire import Header, Message, MessageType, WireError, decode, encode

log = get_logger(__name__)

MAIN, RENEW = b"m", b"r"  # channels of one peer
_SUFFIX_BYTES = 1 + 4  # channel, connection number
_HWM_MESSAGES = 256
_SOCKETS_A_PEER = 6  # link and renewals: a socket each, and the two ends of its monitor
_SPARE_SOCKETS = 256  # closed ones count until ZMQ's own thread has reaped them
_MAX_BACKLOG = 1024
# Plain numbers: joining the library's flags costs more than sending a short frame.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_SNDBUF_BYTES = MIB  # what the kernel holds cannot be taken back by an abort

Block = npt.NDArray[np.uint8]
SinkContext = zmq.Context[zmq.Socket[bytes]]


class PeerGone(Exception):
    """The connection is broken, or the peer reads too slowly to be one."""


class NoSocket(Exception):
    """There is no descriptor, or no address, to make a connection with."""


class DataSent:
    """A DATA message inside ZMQ; its blocks are read until it is done."""

    def __init__(self, frames: Sequence[Block]) -> None:
        # What ZMQ reads it holds an array of, and drops that when it no longer does: one weak
        # reference tells what a MessageTracker does, for a fifth of its cost.
        self._frames = [weakref.ref(frame) for frame in frames]

    def is_done(self) -> bool:
        """Tell whether ZMQ has let go of every block."""
        return all(frame() is None for frame in self._frames)


def check_host(host: str, config: TransferConfig) -> None:
    """Refuse an address on which KV would cross a network in plaintext, unless allowed."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise ConfigError(f"transfer: {host!r} is not an IP address") from None
    if address.is_unspecified:
        raise ConfigError("transfer: bind to one address, not to all interfaces")
    if address.is_loopback or config.curve_key_file or config.allow_plaintext_kv:
        return
    raise ConfigError(
        "transfer: KV would leave this host in plaintext; "
        "set transfer.curve_key_file or transfer.allow_plaintext_kv"
    )


def is_loopback(host: str) -> bool:
    """Tell whether what is sent to this address stays on this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split "tcp://host:port"; raise ValueError on anything else."""
    scheme, sep, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not sep or not colon or not port.isdigit():
        raise ValueError("not a tcp endpoint")
    return host, int(port)


def peer_base(worker_id: str, incarnation: int) -> bytes:
    """Name one life of a worker."""
    return worker_id.encode() + b"\0" + incarnation.to_bytes(8, "little")


def parse_route(route: bytes) -> Peer:
    """Read a ZMQ identity of ours."""
    base = route[:-_SUFFIX_BYTES]
    if len(base) < 10 or base[-9:-8] != b"\0":
        raise WireError("identity")
    return Peer(base, route)


def worker_id_of(base: bytes) -> str:
    """Return the worker id in a base; for logs and statistics."""
    return base[:-9].decode(errors="replace")


class Poller:
    """Waits for sockets and descriptors of one thread."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: RouterPort | DealerLink | int) -> None:
        """Watch for reading."""
        for handle in _handles(source):
            self._poller.register(handle, zmq.POLLIN)

    def remove(self, source: RouterPort | DealerLink | int) -> None:
        """Stop watching; call it before closing."""
        for handle in _handles(source):
            self._poller.unregister(handle)

    def wait(self, timeout_s: float) -> set[object]:
        """Return the descriptors and sockets that are readable."""
        timeout_ms = max(0, -int(-timeout_s * 1000 // 1))  # rounded up: no spinning at the end
        return {handle for handle, _ in self._poller.poll(timeout_ms)}


def _bind(socket: zmq.Socket[bytes], address: str, port: int) -> int:
    if port == 0:
        return socket.bind_to_random_port(address)
    try:
        socket.bind(f"{address}:{port}")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {address}:{port} (transfer.zmq_port)") from error
    return port


def _handles(source: RouterPort | DealerLink | int) -> tuple[zmq.Socket[bytes] | int, ...]:
    if isinstance(source, int):
        return (source,)
    return source.sockets


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Tell whether a message is there; asking costs a tenth of the exception of a vain read."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class RouterPort:
    """The bound socket of a source."""

    def __init__(
        self,
        host: str,
        incarnation: int,
        config: TransferConfig,
        keys: KeyWatch | None,
        port: int = 0,
    ) -> None:
        """Bind; port 0 is any free one. ConfigError if a port asked for by number is taken."""
        self._incarnation = incarnation
        self._context = zmq.Context()
        self._auth = _start_authenticator(self._context, keys)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._seq: OrderedDict[bytes, int] = OrderedDict()
        self._max_seq = 4 * config.max_peers
        self._backlog: dict[bytes, deque[tuple[bytes, bytes]]] = {}
        _set_common(self._socket, config)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MIB)  # only control comes this way
        self._socket.setsockopt(zmq.SNDBUF, _SNDBUF_BYTES)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._keys = keys
        self._monitor: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
            self._prove(keys.ring.current)
        wrapped = f"[{host.strip('[]')}]" if ":" in host else host
        self._address = f"tcp://{wrapped}"
        self.port = _bind(self._socket, self._address, port)
        self._is_bound = True

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll."""
        return (self._socket,) if self._monitor is None else (self._socket, self._monitor)

    @property
    def is_bound(self) -> bool:
        """Tell whether peers can connect; for some milliseconds of a `rebind` they cannot."""
        return self._is_bound

    def rebind(self) -> None:
        """Cut every connection, and listen again with the key in use now; see `bind_again`.

        ZMQ cannot tell one peer to leave, and those of a retired key have to.
        """
        if self._keys is None:
            return
        if self._is_bound:
            self._socket.unbind(f"{self._address}:{self.port}")
            self._is_bound = False
        self._prove(self._keys.ring.current)
        self.bind_again()

    def bind_again(self) -> bool:
        """Try to listen at the same port; False while ZMQ's own thread has not closed it yet."""
        if not self._is_bound:
            try:
                self._socket.bind(f"{self._address}:{self.port}")
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                return False
            self._is_bound = True
        return True

    def take_refusals(self) -> dict[str, int]:
        """Return how many peers were turned away by their keys since the last call, by reason."""
        if self._keys is None or self._monitor is None:
            return {}
        for _ in range(_MAX_EVENTS_A_TURN):
            if not self._monitor.poll(0):
                break
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._keys.refuse("handshake")  # it does not know our key, or speaks without any
        return self._keys.take_refusals()

    def recv(self) -> tuple[bytes, list[bytes]] | None:
        """Return one message as (route, frames), at most three frames kept; None when empty."""
        if not _has_message(self._socket):
            return None
        route = self._socket.recv(_NOBLOCK)
        frames: list[bytes] = []
        while self._socket.getsockopt(_RCVMORE):
            if len(frames) < 3:
                frames.append(self._socket.recv(_NOBLOCK))
            else:
                self._socket.recv_into(bytearray(), flags=_NOBLOCK)
        return route, frames

    def send(
        self, route: bytes, kind: MessageType, body: bytes = b"", xfer_id: int = 0, attempt: int = 0
    ) -> None:
        """Send, or queue while the peer's pipe is full; raise PeerGone when that is hopeless."""
        header = Header(kind, self._incarnation, xfer_id, attempt, self._next_seq(route))
        frames = encode(header, body)
        backlog = self._backlog.get(route)
        if backlog is None and self._try_send(route, frames):
            return
        queue = self._backlog.setdefault(route, deque())
        if len(queue) >= _MAX_BACKLOG:
            self.forget(route)
            raise PeerGone("reads too slowly")
        queue.append(frames)

    def send_data(
        self, peer: Peer, xfer_id: int, attempt: int, body: bytes, blocks: Sequence[Block]
    ) -> DataSent:
        """Send blocks without copying; they are read until the result is done."""
        if peer.route in self._backlog:
            raise BlockingIOError
        seq = self._next_seq(peer.route)
        header = Header(
            MessageType.DATA, self._incarnation, xfer_id, attempt, seq, n_payload=len(blocks)
        )
        head, body = encode(header, body)
        self._send_first(peer.route, head, body, more=True)
        frames = [block[:] for block in blocks]  # arrays that only ZMQ keeps
        sent = DataSent(frames)
        while frames:
            flags = _NOBLOCK_MORE if len(frames) > 1 else _NOBLOCK
            self._socket.send(zmq.Frame(frames.pop(0), copy=False), flags, copy=False)
        return sent

    def can_send_data(self, route: bytes) -> bool:
        """Tell whether control messages are still waiting before any data."""
        return route not in self._backlog

    def flush(self) -> list[bytes]:
        """Send what waits; return the routes that turned out to be gone."""
        gone: list[bytes] = []
        for route, queue in list(self._backlog.items()):
            try:
                while queue and self._try_send(route, queue[0]):
                    queue.popleft()
            except PeerGone:
                gone.append(route)
                continue
            if not queue:
                del self._backlog[route]
        return gone

    @property
    def has_backlog(self) -> bool:
        """Tell whether `flush` has something to do."""
        return bool(self._backlog)

    def forget(self, route: bytes) -> None:
        """Drop what is queued for a route."""
        self._backlog.pop(route, None)
        self._seq.pop(route, None)

    def close(self) -> None:
        """Close; ZMQ reads no block afterwards."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)
        if self._auth is not None:
            self._auth.stop()
        self._context.term()

    def _prove(self, keys: CurveKeys) -> None:
        self._socket.curve_secretkey = keys.secret
        self._socket.curve_publickey = keys.public
        self._socket.curve_server = True

    def _try_send(self, route: bytes, frames: tuple[bytes, bytes]) -> bool:
        try:
            self._send_first(route, frames[0], frames[1], more=False)
        except BlockingIOError:
            return False
        return True

    def _send_first(self, route: bytes, head: bytes, body: bytes, more: bool) -> None:
        try:
            self._socket.send(route, _NOBLOCK_MORE)
        except zmq.Again:
            raise BlockingIOError from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.forget(route)
            raise PeerGone("not connected") from None
        self._socket.send(head, _NOBLOCK_MORE)
        self._socket.send(body, _NOBLOCK_MORE if more else _NOBLOCK)

    def _next_seq(self, route: bytes) -> int:
        seq = self._seq.pop(route, 0) + 1
        self._seq[route] = seq
        if len(self._seq) > self._max_seq:
            self._seq.popitem(last=False)
        return seq


class DealerLink:
    """One connection of a sink (or of its renew thread) to a source."""

    def __init__(
        self,
        context: SinkContext,
        endpoint: str,
        base: bytes,
        channel: bytes,
        config: TransferConfig,
        keys: LinkKeys | None,
        max_frame_bytes: int = 0,
    ) -> None:
        self._incarnation = int.from_bytes(base[-8:], "little")
        self._seq = 0
        self._rest = False
        self._max_frame_bytes = max_frame_bytes
        try:
            self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise NoSocket(error.strerror) from error
        try:
            self._connect(endpoint, base + channel + secrets.token_bytes(4), config, keys)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise NoSocket(error.strerror) from error

    def _connect(
        self, endpoint: str, identity: bytes, config: TransferConfig, keys: LinkKeys | None
    ) -> None:
        self._socket.setsockopt(zmq.IDENTITY, identity)
        _set_common(self._socket, config)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(self._max_frame_bytes, 2 * MIB))
        # A broken connection stays broken: whoever owns the link decides about another one.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, round(config.connect_timeout_s * 1000))
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            self._socket.curve_secretkey = keys.own.secret
            self._socket.curve_publickey = keys.own.public
            self._socket.curve_serverkey = keys.server
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_MONITORED)
        self._socket.connect(endpoint)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes] | int, ...]:
        """What to poll."""
        return (self._socket, self._monitor)

    def send(
        self, kind: MessageType, body: bytes = b"", xfer_id: int = 0, attempt: int = 0
    ) -> bool:
        """Send; False when the pipe is full (everything a sink sends is repeated if need be)."""
        self._seq += 1
        header = Header(kind, self._incarnation, xfer_id, attempt, self._seq)
        return self._push(*encode(header, body))

    def recv(self) -> Message | None:
        """Return the next header and body; payload frames are read by `recv_block`."""
        self.discard_rest()
        if not _has_message(self._socket):
            return None
        frames = [self._socket.recv(_NOBLOCK)]
        if self._more():
            frames.append(self._socket.recv(_NOBLOCK))
        message = decode(frames)
        self._rest = self._more()
        if message.header.n_payload == 0 and self._rest:
            raise WireError("frame_count")
        return message

    def recv_block(self, block: Block) -> bool:
        """Receive one payload frame into a block; False if it has another length."""
        if not self._more():
            return False
        return self._socket.recv_into(block.data, flags=_NOBLOCK) == block.nbytes

    def skip_block(self) -> None:
        """Throw one payload frame away."""
        if self._more():
            self._socket.recv_into(bytearray(), flags=_NOBLOCK)

    def discard_rest(self) -> int:
        """Throw away what is left of the current message."""
        num_frames = 0
        while self._more():
            self._socket.recv_into(bytearray(), flags=_NOBLOCK)
            num_frames += 1
        return num_frames

    def broken(self) -> str | None:
        """Return why the connection is broken, or None."""
        reason = None
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            reason = reason or _BROKEN.get(zmq.Event(event["event"]))
        return reason

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _push(self, head: bytes, body: bytes) -> bool:
        try:
            self._socket.send(head, _NOBLOCK_MORE)
            # The connection may end between the two; ZMQ takes the first part back then.
            self._socket.send(body, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _more(self) -> bool:
        return bool(self._socket.getsockopt(_RCVMORE))


NOT_REACHED = "refused"  # nobody listens there
_BROKEN = {
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_CLOSED: NOT_REACHED,
    zmq.EVENT_CONNECT_RETRIED: NOT_REACHED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "not a ZMQ peer",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not authorised",
}
# Reasons that come of keys, or of their lack, on one side.
KEY_TROUBLE = ("handshake failed", "not a ZMQ peer", "not authorised")
_MONITORED = 0
for _event in _BROKEN:
    _MONITORED |= int(_event)


def new_context(config: TransferConfig) -> SinkContext:
    """Make the context of one sink, with room for the connections to all its peers."""
    context: SinkContext = zmq.Context()
    wanted = _SOCKETS_A_PEER * config.max_peers + _SPARE_SOCKETS
    context.set(zmq.MAX_SOCKETS, min(wanted, context.get(zmq.SOCKET_LIMIT)))
    # ZMQ starts its threads with the first socket, and aborts the process when one of them gets
    # no descriptor: better now than in the middle of service.
    context.socket(zmq.DEALER).close(linger=0)
    return context


def _set_common(socket: zmq.Socket[bytes], config: TransferConfig) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HWM_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _HWM_MESSAGES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(config.connect_timeout_s * 1000))
    # A frozen peer never closes its connection; this does, and with it go the blocks it holds.
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(config.ping_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(config.peer_timeout_s * 1000))


_HANDSHAKE_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_MAX_EVENTS_A_TURN = 256


class _Admission:
    """Admits the peers that hold a key of the ring; asked on the authenticator's thread."""

    def __init__(self, keys: KeyWatch) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether a client key (Z85 text, as in key files) is ours."""
        refusal = self._keys.judge(key)
        if refusal:
            self._keys.refuse(refusal)
        return not refusal


def _start_authenticator(context: SinkContext, keys: KeyWatch | None) -> ThreadAuthenticator | None:
    if keys is None:
        return None
    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback(domain="*", credentials_provider=_Admission(keys))
    return auth
