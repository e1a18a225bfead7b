"""The audit log: one JSON object a line, each carrying the hash of the one before it.

Lines are only ever appended. Changing, moving or taking out one breaks the chain from there on;
taking off the end does not, so keep the head `isthmus audit verify` prints, somewhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import ConfigError
from services.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST = "0" * 64  # what the first line names as the one before
RETRY_S = 1.0
_MAX_QUEUED = 16_384
_MAX_BATCH = 512
_TAIL_BYTES = 64 << 10
_MAX_TEXT = 256
_HASH = re.compile(rb',"hash":"([0-9a-f]{64})"\}$')
_NUMBERED = re.compile(r"\.(\d{6})\.jsonl$")

Field = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class AuditHead:
    """Where a chain has come to."""

    seq: int = 0
    hash: str = FIRST


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Where the log lies and how large one of its files grows."""

    directory: Path
    name: str  # of the process; its files are NAME.000001.jsonl and so on
    max_file_bytes: int = 256 << 20


class AuditLog:
    """Appends events from a thread of its own. `write` may be called from any.

    A disk that takes no more is tried again every second. Until then lines wait in memory, so many
    of them; `is_blocked` says so, for whoever would rather refuse than go on without a log. What
    finds no room is counted, and the log itself says how many are missing.
    """

    def __init__(
        self,
        config: AuditConfig,
        clock: Clock,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """Open the last file, cutting off half a line; raises ConfigError."""
        self._config = config
        self._clock = clock
        self._os_write = write
        self._queue: deque[tuple[str, int, Mapping[str, Field]]] = deque()
        self._pending = b""  # lines that are numbered and not yet on the disk
        self._pending_head = AuditHead()
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_missing = 0  # since the log said so last
        self.num_dropped = 0
        self.is_blocked = False
        try:
            config.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._head, num_cut = self._open_last()
        except BlockingIOError:
            raise ConfigError(
                f"another process writes the audit log {config.name} in {config.directory}; give "
                "each router its own router.router_id"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the audit log in {config.directory} cannot be written ({error.strerror})"
            ) from None
        self._thread = threading.Thread(target=self._run, name="isthmus-audit", daemon=True)
        if num_cut:
            self.write("audit.tail_cut", num_bytes=num_cut)

    def start(self) -> None:
        """Write from now on."""
        self._thread.start()

    def write(self, event: str, **fields: Field) -> None:
        """Append an event, soon."""
        with self._changed:
            if len(self._queue) >= _MAX_QUEUED:
                self._num_missing += 1
                self.num_dropped += 1
                return
            self._queue.append((event, self._clock.unix_ms(), fields))
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Write what waits and close; False = some of it is lost, the disk did not take it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        is_written = not (self._thread.is_alive() or self._queue or self._pending)
        if not self._thread.is_alive():
            os.close(self._handle)
        return is_written

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception:  # outermost loop of the thread: without it nothing is logged any more
            log.exception("audit.fault")
            self.is_blocked = True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._pending or self._is_closing):
                    self._changed.wait()
                if not self._pending:
                    self._number(self._take())
                if not self._pending:
                    return  # closing, and all is written
                is_last_try = self._is_closing
            if self._append():
                self._set_blocked(False)
                continue
            self._set_blocked(True)
            if is_last_try:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _take(self) -> list[tuple[str, int, Mapping[str, Field]]]:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_BATCH))]
        if self._num_missing and batch:
            lost: Mapping[str, Field] = {"num_events": self._num_missing}
            batch.append(("audit.missing", self._clock.unix_ms(), lost))
            self._num_missing = 0
        return batch

    def _number(self, batch: Iterable[tuple[str, int, Mapping[str, Field]]]) -> None:
        head, lines = self._head, []
        for event, unix_ms, fields in batch:
            line, head = make_line(head, event, unix_ms, fields)
            lines.append(line)
        self._pending, self._pending_head = b"".join(lines), head

    def _append(self) -> bool:
        try:
            if self._size >= self._config.max_file_bytes:
                self._next_file()
            written = self._os_write(self._handle, self._pending)
            if written != len(self._pending):
                raise OSError(0, "only a part was written")
            os.fsync(self._handle)
        except OSError as error:
            self._cut_back()
            if not self.is_blocked:
                log.error("audit.not_written", reason=error.strerror)
            return False
        self._size += len(self._pending)
        self._head, self._pending = self._pending_head, b""
        return True

    def _cut_back(self) -> None:
        """Take off what was written of lines that will be written again."""
        try:
            os.ftruncate(self._handle, self._size)
        except OSError:
            log.error("audit.not_cut_back")

    def _set_blocked(self, is_blocked: bool) -> None:
        if self.is_blocked and not is_blocked:
            log.info("audit.written_again")
        self.is_blocked = is_blocked

    # -- files -------------------------------------------------------------------------------

    def _open_last(self) -> tuple[AuditHead, int]:
        """Open the newest file, or the first; give the chain's head and how much was cut off."""
        name = self._config.name
        files = sorted(self._config.directory.glob(f"{name}.[0-9]*.jsonl"))
        self._number_of_file = 0
        head, num_cut = AuditHead(), 0
        for path in reversed(files):
            found = _NUMBERED.search(path.name)
            if found is None:
                continue
            if not self._number_of_file:
                self._number_of_file = int(found[1])
                num_cut = _cut_half_line(path)
            head = _last_head(path)
            if head != AuditHead():
                break  # an empty file follows one that was full
        self._open(max(1, self._number_of_file))
        return head, num_cut

    def _next_file(self) -> None:
        before = self._handle
        self._open(self._number_of_file + 1)
        os.close(before)

    def _open(self, number: int) -> None:
        path = self._config.directory / f"{self._config.name}.{number:06}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        try:
            # Two writers would break each other's chain.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        self._handle = handle
        self._number_of_file = number
        self._size = os.fstat(self._handle).st_size


def make_line(
    head: AuditHead, event: str, unix_ms: int, fields: Mapping[str, Field]
) -> tuple[bytes, AuditHead]:
    """Write one line of the chain, and give the head after it."""
    time_text = datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
    record: dict[str, Field] = {"seq": head.seq + 1, "time": time_text, "event": event}
    record |= {name: _bounded(value) for name, value in fields.items() if name not in _OWN}
    record["prev"] = head.hash
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f',"hash":"{digest}"}}\n'.encode(), AuditHead(head.seq + 1, digest)


_OWN = frozenset({"seq", "time", "event", "prev", "hash"})


def _bounded(value: Field) -> Field:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Verified:
    """What a chain was found to be; `fault` says where it breaks, empty = it is whole."""

    head: AuditHead
    num_lines: int
    fault: str = ""


def verify_lines(lines: Iterable[bytes], head: AuditHead | None) -> Verified:
    """Check every line against the one before. `head` None = begin wherever the first begins."""
    count = 0
    for count, line in enumerate(lines, 1):
        found = _HASH.search(line.removesuffix(b"\n"))
        if found is None or not line.endswith(b"\n"):
            return Verified(head or AuditHead(), count - 1, f"line {count}: it is no whole line")
        body = line[: found.start()] + b"}"
        try:
            record = json.loads(body)
            seq, prev = record["seq"], record["prev"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return Verified(head or AuditHead(), count - 1, f"line {count}: it is no record")
        if hashlib.sha256(body).hexdigest().encode() != found[1]:
            return Verified(head or AuditHead(), count - 1, f"line {count}: it was changed")
        if head is not None and (seq, prev) != (head.seq + 1, head.hash):
            return Verified(
                head, count - 1, f"line {count}: lines before it are missing or out of order"
            )
        head = AuditHead(seq, found[1].decode())
    return Verified(head or AuditHead(), count)


def _cut_half_line(path: Path) -> int:
    """Cut off a line that a crash has left unfinished; give its size."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        whole = start + file.read().rfind(b"\n") + 1
        file.truncate(whole)
        return size - whole


def _last_head(path: Path) -> AuditHead:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    if not lines:
        return AuditHead()
    found = verify_lines(lines[-1:], None)
    if found.fault:
        raise ConfigError(f"{path}: its last line is damaged; put the file aside to begin anew")
    return found.head
