"""The CURVE keys of one cluster: the first of the file is used, every key of it is accepted.

A worker rereads its file when it changes. So keys are rotated in three steps, each of which has
to reach every worker before the next: the new key is added, then promoted, then the old one is
retired. No step ends a transfer.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth

from services.common.errors import ConfigError
from services.common.private_file import replace_private
from services.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_KEYS = 2  # the one in use, and the one before or after it
CHECK_S = 1.0  # between two looks at the file
# A file reaches the machines of a cluster at different times, a mounted secret within a minute
# or two: that long a peer may still answer with the key we have retired already.
GRACE_S = 120.0
KEY_REFUSALS = ("retired", "unknown", "handshake")  # handshake: it does not even know our key
_MAX_FILE_BYTES = 64 << 10
_MAX_RETIRED = 8
_MAX_REMEMBERED = 1024
_Z85_KEY = 40


class CurveKeys(NamedTuple):
    """One key pair, Z85."""

    public: bytes
    secret: bytes


class LinkKeys(NamedTuple):
    """What one connection is made with: our pair, and the key the peer has to prove."""

    own: CurveKeys
    server: bytes


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of a file."""

    keys: tuple[CurveKeys, ...]

    @property
    def current(self) -> CurveKeys:
        """The pair to use."""
        return self.keys[0]

    def accepts(self, public: bytes) -> bool:
        """Tell whether a public key is one of ours."""
        # All are compared: how long it takes says nothing about which one it was.
        return sum(secrets.compare_digest(public, key.public) for key in self.keys) > 0

    def added(self, key: CurveKeys) -> KeyRing:
        """Return the ring with one more key, accepted from now on."""
        if len(self.keys) >= MAX_KEYS:
            raise ConfigError("the ring is full: retire a key before adding one")
        return KeyRing((*self.keys, key))

    def promoted(self) -> KeyRing:
        """Return the ring with its other key in use."""
        if len(self.keys) < MAX_KEYS:
            raise ConfigError("the ring has one key: add the next before promoting it")
        return KeyRing((*self.keys[1:], self.keys[0]))

    def retired(self) -> KeyRing:
        """Return the ring without the keys that are not in use."""
        if len(self.keys) < MAX_KEYS:
            raise ConfigError("the ring has one key, which is in use: nothing can be retired")
        return KeyRing(self.keys[:1])


def make_keys() -> CurveKeys:
    """Make a new pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, secret)


def read_ring(path: Path) -> KeyRing:
    """Read a key file, a ring or one ZMQ certificate; ConfigError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key file cannot be read ({error.strerror})") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the key file is larger than {_MAX_FILE_BYTES} bytes")
    keys = _parse_ring(data) if data.lstrip().startswith(b"{") else _read_certificate(path)
    for key in keys:
        _check(key)
    if len({key.public for key in keys}) != len(keys):
        raise ConfigError("the key file holds the same key twice")
    return KeyRing(keys)


def check_key_file(path: Path) -> KeyRing:
    """Read the key file that is configured; ConfigError names the setting."""
    try:
        return read_ring(path)
    except ConfigError as error:
        raise ConfigError(f"transfer.curve_key_file: {error}") from None


def write_ring(path: Path, ring: KeyRing) -> None:
    """Replace the file by this ring at once, readable by its owner only."""
    pairs = [{"public": k.public.decode(), "secret": k.secret.decode()} for k in ring.keys]
    replace_private(path, json.dumps({"format": 1, "keys": pairs}, indent=2) + "\n")


def key_id(public: bytes) -> str:
    """Name a public key shortly, for people and logs."""
    return public[:8].decode("ascii", "replace")


def _parse_ring(data: bytes) -> tuple[CurveKeys, ...]:
    try:
        content = json.loads(data)
        is_known = content["format"] == 1
        pairs = [(entry["public"].encode(), entry["secret"].encode()) for entry in content["keys"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError("the key file is damaged") from None
    if not is_known:
        raise ConfigError("the key file has a format this version does not know")
    if not 1 <= len(pairs) <= MAX_KEYS:
        raise ConfigError(f"the key file holds {len(pairs)} keys; 1 or {MAX_KEYS} are right")
    return tuple(CurveKeys(public, secret) for public, secret in pairs)


def _read_certificate(path: Path) -> tuple[CurveKeys, ...]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError("the key file is neither a key ring nor a ZMQ certificate") from None
    if secret is None:
        raise ConfigError("the key file holds no secret key")
    return (CurveKeys(public, secret),)


def _check(key: CurveKeys) -> None:
    try:
        is_pair = len(key.secret) == _Z85_KEY and zmq.curve_public(key.secret) == key.public
    except (ValueError, zmq.ZMQError):
        is_pair = False
    if not is_pair:
        raise ConfigError("the key file holds a public key that is not that of its secret key")


@dataclass(frozen=True, slots=True)
class RingChange:
    """What a look at the file has found: keys, by their public part."""

    added: tuple[bytes, ...] = ()
    retired: tuple[bytes, ...] = ()  # no longer accepted of anyone who connects to us
    ended: tuple[bytes, ...] = ()  # retired a while ago; from now on not even of a peer we dial
    is_promoted: bool = False


class KeyWatch:
    """The key ring of one transfer end. `poll` belongs to its thread, the rest to any."""

    def __init__(self, path: Path, ring: KeyRing, now: float, *, is_quiet: bool = False) -> None:
        self._path = path
        self._is_quiet = is_quiet
        self._ring = ring
        self._next_look = now + CHECK_S
        self._signature = _signature(path)
        self._retired: dict[bytes, float] = {}  # until when the grace lasts; replaced, not changed
        self._lock = threading.Lock()  # guards _worked and _refused
        self._worked: OrderedDict[str, bytes] = OrderedDict()
        self._refused: dict[str, int] = {}
        self.file_errors = 0  # changes of the file that could not be read

    @classmethod
    def open(cls, path: str | None, now: float, *, is_quiet: bool = False) -> KeyWatch | None:
        """Read the configured file; None if there is none to read.

        Args:
            is_quiet: whether another end of this process tells what becomes of the file.
        """
        if path is None:
            return None
        return cls(Path(path), check_key_file(Path(path)), now, is_quiet=is_quiet)

    @property
    def ring(self) -> KeyRing:
        """The keys as they were read last."""
        return self._ring

    @property
    def is_rotating(self) -> bool:
        """Whether peers may still prove another key than ours; a refusal then is in order."""
        return len(self._ring.keys) > 1 or bool(self._retired)

    def poll(self, now: float) -> RingChange | None:
        """Look at the file now and then; return what is different.

        A file that cannot be read changes nothing: the worker goes on with the keys it has.
        """
        if now < self._next_look:
            return None
        self._next_look = now + CHECK_S
        ended = tuple(key for key, until in self._retired.items() if until <= now)
        before, self._ring = self._ring, self._reread()
        change = self._compare(before, ended, now)
        return None if change == RingChange() else change

    def judge(self, public: bytes) -> str:
        """Return "" for a key we accept of a peer that connects, else why not."""
        if self._ring.accepts(public):
            return ""
        return "retired" if public in self._retired else "unknown"

    def refuse(self, reason: str) -> None:
        """Note that a peer was turned away."""
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def take_refusals(self) -> dict[str, int]:
        """Return how many were turned away since the last call, by reason."""
        with self._lock:
            refused, self._refused = self._refused, {}
            return refused

    def candidates(self, endpoint: str) -> list[LinkKeys]:
        """Return what to try with a peer, best first: files do not change everywhere at once."""
        ring = self._ring
        with self._lock:
            worked = self._worked.get(endpoint)
        servers = [key.public for key in ring.keys] + list(self._retired)
        servers.sort(key=lambda public: public != worked)  # stable
        return [LinkKeys(own, server) for server in servers for own in ring.keys]

    def note_worked(self, endpoint: str, server: bytes) -> None:
        """Remember which key a peer has proved."""
        with self._lock:
            self._worked[endpoint] = server
            self._worked.move_to_end(endpoint)
            if len(self._worked) > _MAX_REMEMBERED:
                self._worked.popitem(last=False)

    def _reread(self) -> KeyRing:
        signature = _signature(self._path)
        if signature == self._signature:
            return self._ring
        self._signature = signature
        try:
            return read_ring(self._path)
        except ConfigError as error:
            self.file_errors += 1
            if not self._is_quiet:
                log.error("transfer.key_file_unusable", reason=str(error))
            return self._ring

    def _compare(self, before: KeyRing, ended: tuple[bytes, ...], now: float) -> RingChange:
        old, new = ([key.public for key in ring.keys] for ring in (before, self._ring))
        change = RingChange(
            added=tuple(key for key in new if key not in old),
            retired=tuple(key for key in old if key not in new),
            ended=ended,
            is_promoted=old[0] != new[0],
        )
        kept = {k: until for k, until in self._retired.items() if k not in (*ended, *new)}
        kept |= dict.fromkeys(change.retired, now + GRACE_S)
        self._retired = dict(list(kept.items())[-_MAX_RETIRED:])
        if old != new and not self._is_quiet:
            log.info(
                "transfer.keys_changed",
                in_use=key_id(new[0]),
                added=[key_id(key) for key in change.added],
                retired=[key_id(key) for key in change.retired],
            )
        return change


class Dialler:
    """The tries of one connection: every pair of keys, then again after ever longer whiles.

    A peer that rebinds its socket, because a key was retired, refuses for some milliseconds, or
    for as long as its machine is too busy to run it.
    """

    def __init__(self, candidates: Callable[[], list[LinkKeys]]) -> None:
        self._candidates = candidates
        self._left = candidates()
        self._rounds_left = len(_ROUND_WAITS_S)

    def next(self) -> tuple[LinkKeys | None, float]:
        """Return what to try and after how long; no keys when all has been tried."""
        wait_s = 0.0
        if not self._left:
            if self._rounds_left == 0:
                return None, 0.0
            wait_s = _ROUND_WAITS_S[-self._rounds_left]
            self._rounds_left -= 1
            self._left = self._candidates()
        return self._left.pop(0), wait_s

    def again(self) -> tuple[LinkKeys | None, float]:
        """Begin the next round: nobody listened, so no key was at fault."""
        self._left = []
        return self.next()


_ROUND_WAITS_S = (0.03, 0.1, 0.3, 0.6)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
