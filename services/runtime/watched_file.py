"""A file that is read again soon after it has changed; a damaged one changes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from services.common.clock import Clock
from services.common.errors import ConfigError
from services.common.log_record import write_event

T = TypeVar("T")
log = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int, int], ...]  # name, inode, size, mtime


class WatchedFile(Generic[T]):
    """What files say, as of the last look that found them whole. May be asked from any thread.

    A half-written edit must not lock everyone out, so faults are logged and the content stays. A
    file that has gone is another matter: `absent`, if given, then takes the content's place.
    """

    def __init__(
        self,
        name: str,
        paths: tuple[Path, ...],
        load: Callable[[], T],
        clock: Clock,
        poll_s: float = 1.0,
        absent: T | None = None,
    ) -> None:
        """Read the files for the first time.

        Args:
            name: the setting that names them, for the log.
            paths: files, or directories of files such as a mounted Secret.
            load: reads them; raises ConfigError or OSError.
            clock: says when to look again.
            poll_s: time between two looks.
            absent: content while a file is missing; None = keep the last one.

        Raises ConfigError or OSError when there is no content to begin with.
        """
        self._name = name
        self._paths = paths
        self._load = load
        self._clock = clock
        self._poll_s = poll_s
        self._absent = absent
        self._lock = threading.Lock()
        self._seen: Signature | None = None
        self._refused: Signature | None = None  # told of already
        self._next_look = clock.now() + poll_s
        self.version = 0  # rises with every content
        self.refusal = ""  # why the files as they are now are not in use
        self._content = self._first()

    def get(self) -> T:
        """Give the content, looking first whether the files have changed."""
        now = self._clock.now()
        if now >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._next_look = now + self._poll_s
                self._look()
            finally:
                self._lock.release()
        return self._content

    def _first(self) -> T:
        seen = signature_of(self._paths)
        if seen is None and self._absent is not None:
            self._tell(logging.ERROR, "file.missing")
            return self._absent
        content = self._load()
        self._seen = seen
        return content

    def _look(self) -> None:
        seen = signature_of(self._paths)
        if seen == self._seen:
            self.refusal = ""  # an edit was taken back
            return
        if seen is None:
            self._seen = None
            self.refusal = "missing"
            self._tell(logging.ERROR, "file.missing")
            if self._absent is not None:
                self._set(self._absent)
            return
        try:
            content = self._load()
        except (ConfigError, OSError) as error:
            # Tried again at every look, a part of it may be on its way; told once.
            self.refusal = str(error)
            if seen != self._refused:
                self._tell(logging.ERROR, "file.unusable", reason=self.refusal)
            self._refused = seen
            return
        self._seen = seen
        self._set(content)
        self._tell(logging.INFO, "file.reloaded")

    def _set(self, content: T) -> None:
        self._content = content
        self.version += 1
        self.refusal = ""

    def _tell(self, level: int, event: str, **fields: object) -> None:
        write_event(log, level, event, {"setting": self._name, **fields})


def signature_of(paths: tuple[Path, ...]) -> Signature | None:
    """Give what differs when files have changed; None if one of them is missing."""
    entries: list[tuple[str, int, int, int]] = []
    try:
        for path in paths:
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                stat = file.stat()
                entries.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except OSError:
        return None
    return tuple(entries)
