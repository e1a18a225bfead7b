"""Same-host plane: the pool's memfd is handed over a Unix socket, and read under a seqlock.

The prefill side serves the descriptor, the decode side maps it read-only. A mapping outlives its
owner, so a pull goes on even after the owner was killed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.cpu import kv_blocks
from services.common.errors import ConfigError
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory

_REQUEST = struct.Struct("<8sQH")  # magic, incarnation, length of the worker id that follows
_REPLY = struct.Struct("<8sQQQ")  # magic, incarnation, number of blocks, bytes of a block
_MAGIC = b"isthmfd1"
_MAX_PACKET = 512
_MAX_PATH_BYTES = 100  # sun_path holds 108
_UCRED = struct.Struct("3i")


class HandoverError(Exception):
    """The pool could not be handed over; the zmq plane still can be used."""


def pull_blocks(
    source: KvPoolMemory,
    source_blocks: Sequence[int],
    gens: Sequence[int],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
) -> list[bool]:
    """Copy blocks; True for those whose generation was the one in `gens`, even, before and after.

    The generations are read around the copies: a writer makes one odd before it touches the block.

    Args:
        dest: `[num_blocks, block_bytes]`, a pool; `dest_blocks` are rows of it.
    """
    rows = np.array(source_blocks, dtype=np.int64)
    wanted = np.array(gens, dtype=np.uint64)
    library, _ = kv_blocks.available()
    if library is not None:
        pool = (source.blocks, source.gens)
        to = np.array(dest_blocks, dtype=np.int64)
        good: list[bool] = library.pull(pool, rows, wanted, dest, to).tolist()
        return good
    return _pull_with_numpy(source, rows, wanted, dest, dest_blocks)


def _pull_with_numpy(
    source: KvPoolMemory,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.uint64],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
) -> list[bool]:
    """Do the same without a compiler.

    On x86-64 loads are not reordered with loads; elsewhere the library has to order them.
    """
    source_blocks = rows.tolist()
    before = (source.gens[rows] == wanted) & (wanted % 2 == 0)
    for start, stop in _runs(before.tolist(), source_blocks, dest_blocks):
        at, to, count = source_blocks[start], dest_blocks[start], stop - start
        np.copyto(dest[to : to + count], source.blocks[at : at + count])
    good: list[bool] = (before & (source.gens[rows] == wanted)).tolist()
    return good


def _runs(
    wanted: Sequence[bool], source_blocks: Sequence[int], dest_blocks: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of wanted blocks that lie one after the other on both sides."""
    start = None
    for i, is_wanted in enumerate(wanted):
        if start is not None:
            offset = i - start
            follows = (
                source_blocks[i] == source_blocks[start] + offset
                and dest_blocks[i] == dest_blocks[start] + offset
            )
            if is_wanted and follows:
                continue
            yield start, i
        start = i if is_wanted else None
    if start is not None:
        yield start, len(wanted)


# ---- prefill side -----------------------------------------------------------------------------


class PoolServer:
    """Hands the pool's descriptor to peers of the same user."""

    def __init__(
        self, runtime_dir: Path, memory: KvPoolMemory, incarnation: int, max_peers: int
    ) -> None:
        if memory.fd is None:
            raise HandoverError("this pool has no memfd")
        self.path = str(runtime_dir / f"kv-{incarnation:016x}.sock")
        if len(self.path.encode()) > _MAX_PATH_BYTES:
            raise ConfigError("runtime_dir: its path is too long for a Unix socket")
        self._memory = memory
        self._incarnation = incarnation
        self._max_peers = max_peers
        self._peers: dict[int, tuple[socket.socket, bytes]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(self.path)
            os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
            self._listener.listen(64)
        except BaseException:
            self._listener.close()
            raise

    def fileno(self) -> int:
        """Return the listener's descriptor."""
        return self._listener.fileno()

    def accept(self) -> int | None:
        """Accept one peer of our own user; return its descriptor, or None."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        if len(self._peers) >= self._max_peers or _peer_uid(connection) != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        self._peers[connection.fileno()] = (connection, b"")
        return connection.fileno()

    def serve(self, fd: int) -> bytes | None:
        """Answer a peer that is readable; return its base when it hung up, else None.

        A peer that says anything but one right request is cut off (and returned as b"").
        """
        connection, base = self._peers[fd]
        try:
            packet = connection.recv(_MAX_PACKET)
        except BlockingIOError:
            return None
        except ConnectionError:
            packet = b""
        asked = _parse_request(packet)
        if base or asked is None:
            del self._peers[fd]
            connection.close()
            return base
        self._peers[fd] = (connection, asked)
        return None if self._hand_over(connection) else self.serve(fd)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for connection, _ in self._peers.values():
            connection.close()
        self._peers.clear()
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)

    def _hand_over(self, connection: socket.socket) -> bool:
        fd = self._memory.fd
        if fd is None:
            return False
        layout = self._memory.layout
        reply = _REPLY.pack(_MAGIC, self._incarnation, self._memory.num_blocks, layout.block_bytes)
        try:
            socket.send_fds(connection, [reply], [fd])
        except OSError:
            return False  # it hung up: the next read says so
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


class PoolClient:
    """Asks for a peer's pool and keeps the connection as a sign of the peer's life."""

    def __init__(self, path: str, base: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(path)
            if _peer_uid(self._socket) != os.geteuid():
                raise HandoverError("the socket belongs to another user")
            worker_id, incarnation = base[:-9], int.from_bytes(base[-8:], "little")
            request = _REQUEST.pack(_MAGIC, incarnation, len(worker_id))
            self._socket.send(request + worker_id)
        except (OSError, HandoverError) as error:
            self._socket.close()
            if isinstance(error, HandoverError):
                raise
            raise HandoverError(f"no connection ({type(error).__name__})") from error

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def receive(self, expected: ExpectedPool) -> KvPoolMemory | None:
        """Take the pool if it has come, and check that it is the one of the ZMQ peer."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._socket, _MAX_PACKET, 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise HandoverError("hung up") from error
        try:
            return _attach(packet, fds, expected)
        finally:
            for fd in fds:
                os.close(fd)

    def is_hung_up(self) -> bool:
        """Tell, when readable, whether the peer is gone; it has nothing more to say."""
        try:
            return self._socket.recv(_MAX_PACKET) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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
