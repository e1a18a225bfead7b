"""Same-host planes: how the pool's memfd is handed over a Unix socket.

The prefill side serves the descriptor, the decode side maps it read-only. A mapping outlives its
owner, so a pull goes on even after the owner was killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.telemetry.logs import get_logger
from services.transfer.device import DeviceError
from services.transfer.doorbell import Doorbell, HungUp, bell_peer
from services.transfer.values import Peer
from services.transfer.wire import Message, WireError

log = get_logger(__name__)

_REQUEST = struct.Struct("<8sQH")  # magic, incarnation, length of the worker id that follows
_REPLY = struct.Struct("<8sQQQ")  # magic, incarnation, number of blocks, bytes of a block
_MAGIC = b"isthmfd1"
_MAX_PACKET = 512
_MAX_PATH_BYTES = 100  # sun_path holds 108
_UCRED = struct.Struct("3i")


class HandoverError(Exception):
    """The pool could not be handed over; the zmq plane still can be used."""


# ---- prefill side -----------------------------------------------------------------------------


class PoolPeerLost(Exception):
    """A connection to the pool's socket is over; `base` is empty if it never said who it is."""

    def __init__(self, base: bytes) -> None:
        super().__init__("lost")
        self.base = base


@dataclass(slots=True, eq=False)
class _PoolPeer:
    connection: socket.socket
    number: int  # of connections accepted: descriptors are used again
    peer: Peer | None = None  # once it has the pool


class PoolServer:
    """Hands the pool's descriptor to peers of the same user, then carries their messages."""

    def __init__(
        self,
        runtime_dir: Path,
        memory: KvPoolMemory,
        incarnation: int,
        max_peers: int,
        export: Callable[[], bytes] | None = None,
    ) -> None:
        """Listen; `export` makes what opens the pool's other half, on a device, for one peer."""
        if memory.fd is None:
            raise HandoverError("this pool has no memfd")
        self._export = export
        self.path = str(runtime_dir / f"kv-{incarnation:016x}.sock")
        if len(self.path.encode()) > _MAX_PATH_BYTES:
            raise ConfigError(
                f"runtime_dir: {self.path} is too long for a Unix socket, which takes "
                f"{_MAX_PATH_BYTES} bytes: set worker.runtime_dir, XDG_RUNTIME_DIR or TMPDIR"
            )
        self._memory = memory
        self._incarnation = incarnation
        self._max_peers = max_peers
        self._peers: dict[int, _PoolPeer] = {}
        self._bells: dict[bytes, Doorbell] = {}
        self._silent: OrderedDict[int, float] = OrderedDict()  # who asked nothing yet, and since
        self._num_accepted = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # see _turn_away
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(self.path)
            os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
            self._listener.listen(64)
        except BaseException:
            self._listener.close()
            os.close(self._spare)
            raise

    def fileno(self) -> int:
        """Return the listener's descriptor."""
        return self._listener.fileno()

    def accept(self, now: float) -> int | None:
        """Accept one peer of our own user; return its descriptor, or None."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:  # this process has no descriptor left, or the kernel no memory
            log.warning("transfer.pool_peer_turned_away", reason=os.strerror(error.errno or 0))
            self._turn_away()
            return None
        if len(self._peers) >= self._max_peers or _peer_uid(connection) != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        self._num_accepted += 1
        self._peers[connection.fileno()] = _PoolPeer(connection, self._num_accepted)
        self._silent[connection.fileno()] = now
        return connection.fileno()

    def drop_silent(self, before: float) -> list[int]:
        """Cut off who came before a time and has asked nothing; return the closed descriptors."""
        dropped: list[int] = []
        while self._silent:
            fd, since = next(iter(self._silent.items()))
            if since >= before:
                break
            self._close(self._peers[fd])
            dropped.append(fd)
        return dropped

    def read(self, fd: int, limit: int) -> list[tuple[Peer, Message | WireError]]:
        """Read what a connection says: its request, which is answered, then messages.

        Raises:
            PoolPeerLost: it hung up, or asked for something else (then it was cut off).
        """
        entry = self._peers.get(fd)
        if entry is None:  # dropped since it was found readable
            return []
        if entry.peer is None:
            self._answer(entry)
            return []
        bell, heard = self._bells[entry.peer.route], list[tuple[Peer, Message | WireError]]()
        try:
            while len(heard) < limit or bell.has_unread:
                try:
                    message = bell.recv()
                except WireError as error:
                    heard.append((entry.peer, error))
                    continue
                if message is None:
                    break
                heard.append((entry.peer, message))
        except HungUp:
            if not heard:
                raise self._lost(entry) from None
            # What it said before is handled first; the next read tells again.
        return heard

    def bell(self, route: bytes) -> Doorbell | None:
        """Return the connection of that route while it stands."""
        return self._bells.get(route)

    def drop(self, route: bytes) -> int | None:
        """Cut a connection off; return its descriptor, already closed."""
        for fd, entry in list(self._peers.items()):
            if entry.peer is not None and entry.peer.route == route:
                self._close(entry)
                return fd
        return None

    @property
    def has_backlog(self) -> bool:
        """Tell whether some connection has messages that wait."""
        return any(bell.has_backlog for bell in self._bells.values())

    def flush(self) -> list[bytes]:
        """Send what waits; return the routes that turned out to be gone."""
        gone: list[bytes] = []
        for route, bell in self._bells.items():
            try:
                bell.flush()
            except HungUp:
                gone.append(route)
        return gone

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for entry in list(self._peers.values()):
            self._close(entry)
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)
        Path(self.path).unlink(missing_ok=True)

    def _turn_away(self) -> None:
        """Hang up on the next caller: one that is left waiting would wake us without end."""
        if self._spare >= 0:
            os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = -1
        with contextlib.suppress(OSError):  # taken meanwhile: the next call tries again
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _answer(self, entry: _PoolPeer) -> None:
        try:
            packet = entry.connection.recv(_MAX_PACKET)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        base = _parse_request(packet)
        if base is None or not self._hand_over(entry.connection):
            raise self._lost(entry)
        self._silent.pop(entry.connection.fileno(), None)
        entry.peer = bell_peer(base, entry.number)
        self._bells[entry.peer.route] = Doorbell(entry.connection, self._incarnation)

    def _lost(self, entry: _PoolPeer) -> PoolPeerLost:
        base = b"" if entry.peer is None else entry.peer.base
        self._close(entry)
        return PoolPeerLost(base)

    def _close(self, entry: _PoolPeer) -> None:
        del self._peers[entry.connection.fileno()]
        self._silent.pop(entry.connection.fileno(), None)
        if entry.peer is not None:
            del self._bells[entry.peer.route]
        entry.connection.close()

    def _hand_over(self, connection: socket.socket) -> bool:
        fd = self._memory.fd
        if fd is None:
            return False
        layout = self._memory.layout
        reply = _REPLY.pack(_MAGIC, self._incarnation, self._memory.num_blocks, layout.block_bytes)
        try:
            handle = self._export() if self._export is not None else b""
            socket.send_fds(connection, [reply + handle], [fd])
        except DeviceError as error:
            log.warning("transfer.export_failed", reason=str(error))
            return False
        except OSError:
            return False  # it hung up
        return True


def _parse_request(packet: bytes) -> bytes | None:
    """Return the base a request names."""
    if len(packet) < _REQUEST.size:
        return None
    magic, incarnation, length = _REQUEST.unpack_from(packet)
    worker_id = packet[_REQUEST.size :]
    if magic != _MAGIC or len(worker_id) != length or not worker_id:
        return None
    return worker_id + b"\0" + int(incarnation).to_bytes(8, "little")


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(raw)[1]
    return uid


# ---- decode side ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectedPool:
    """What the WELCOME said of the peer's pool."""

    incarnation: int
    num_blocks: int
    nonce: bytes
    layout: KvLayout
    is_on_device: bool = False  # what is handed over has a half that only a device can read


class PoolClient:
    """Asks for a peer's pool; the connection then carries messages, and shows the peer's life."""

    def __init__(self, path: str, base: bytes) -> None:
        self.device_handle = b""
        try:
            kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        except OSError as error:
            raise HandoverError(f"no socket ({error.strerror})") from error
        try:
            self._socket.connect(path)
            if _peer_uid(self._socket) != os.geteuid():
                raise HandoverError("the socket belongs to another user")
            worker_id, incarnation = base[:-9], int.from_bytes(base[-8:], "little")
            request = _REQUEST.pack(_MAGIC, incarnation, len(worker_id))
            self._socket.send(request + worker_id)
            self.bell = Doorbell(self._socket, incarnation)
        except (OSError, HandoverError) as error:
            self._socket.close()
            if isinstance(error, HandoverError):
                raise
            raise HandoverError(f"no connection ({type(error).__name__})") from error

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def receive(self, expected: ExpectedPool) -> KvPoolMemory | None:
        """Take the pool if it has come, and check that it is the one of the ZMQ peer.

        What opens its half on a device is in `device_handle` then.
        """
        try:
            packet, fds, _, _ = socket.recv_fds(self._socket, _MAX_PACKET, 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise HandoverError("hung up") from error
        self.device_handle = packet[_REPLY.size :]
        try:
            if self.device_handle and not expected.is_on_device:
                raise HandoverError("a pool of another kind than was agreed")
            return _attach(packet[: _REPLY.size], fds, expected)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the connection; the mapping stays."""
        self._socket.close()


def _attach(packet: bytes, fds: list[int], expected: ExpectedPool) -> KvPoolMemory:
    if len(packet) != _REPLY.size or len(fds) != 1:
        raise HandoverError("no pool in the answer")
    magic, incarnation, num_blocks, block_bytes = _REPLY.unpack(packet)
    wanted = (_MAGIC, expected.incarnation, expected.num_blocks, expected.layout.block_bytes)
    if (magic, incarnation, num_blocks, block_bytes) != wanted:
        raise HandoverError("the pool is another worker's")
    try:
        pool = KvPoolMemory.attach(fds[0], expected.layout, expected.num_blocks)
    except (OSError, ValueError) as error:
        raise HandoverError(str(error)) from error
    if not expected.nonce or pool.nonce.tobytes() != expected.nonce:
        pool.close()
        raise HandoverError("the nonce in the pool is not the peer's")
    return pool
