"""Structured logs: an event name and fields, one line a record, redacted before it is written."""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from services.common.log_record import FIELDS_ATTRIBUTE, write_event
from services.telemetry.redact import Redactor

LOG_LEVELS = ("debug", "info", "warning", "error")


class Logger:
    """Writes events of one module: `log.info("transfer.committed", blocks=12, ms=3.1)`."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def tells_info(self) -> bool:
        """Whether `info` goes anywhere: facts that take time to gather need not be, else."""
        return self._logger.isEnabledFor(logging.INFO)

    def debug(self, event: str, /, **fields: object) -> None:
        """Record a detail only a developer needs."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Record something an operator may want to know."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Record something that worked, but not the way it should."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Record something that failed."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Record the exception being handled; its message is redacted like any other text."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(
        self, level: int, event: str, fields: Mapping[str, object], exc_info: bool = False
    ) -> None:
        write_event(self._logger, level, event, fields, error=exc_info)


def get_logger(name: str) -> Logger:
    """Make the logger of a module."""
    return Logger(logging.getLogger(name))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, event, logger, then static and event fields."""

    def __init__(self, redactor: Redactor, static: Mapping[str, object]) -> None:
        super().__init__()
        self._redactor = redactor
        self._static = dict(static)

    def format(self, record: logging.LogRecord) -> str:
        """Render one record; never raises for a strange field."""
        head = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "event": self._redactor.text(record.getMessage()),
            "logger": record.name,
        }
        fields = self._redactor.fields(_fields_of(record))
        body = {**self._static, **{k: v for k, v in fields.items() if k not in head}}
        if record.exc_info:
            body["exception"] = self._redactor.text(_exception_text(record))
        return json.dumps({**head, **body}, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """A line for people: time, level, event, key=value."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        """Render one record on one line (an exception adds its own)."""
        fields = self._redactor.fields(_fields_of(record))
        pairs = " ".join(f"{key}={_plain(value)}" for key, value in fields.items())
        time_text = _timestamp(record.created)[11:23]
        event = _one_line(self._redactor.text(record.getMessage()))
        line = f"{time_text} {record.levelname.lower():<7} {event} {pairs}".rstrip()
        if record.exc_info:
            line += "\n" + self._redactor.text(_exception_text(record))
        return line


class _OneWriteHandler(logging.StreamHandler[TextIO]):
    """Writes a record and its newline in one call, so that lines of threads do not mix."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) + "\n"


def setup_logging(
    level: str,
    log_format: str,
    *,
    static: Mapping[str, object] | None = None,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Send every record of this process to `stream` (stderr), in one format, redacted.

    Args:
        level: "debug" | "info" | "warning" | "error".
        log_format: "json" | "console".
        static: fields of every record, such as the worker id.
        secrets: values that must not appear, in whatever text they turn up.
        stream: where to write.
    """
    redactor = Redactor(secrets)
    handler = _OneWriteHandler(stream if stream is not None else sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(redactor, redactor.fields(static or {})))
    else:
        handler.setFormatter(ConsoleFormatter(redactor))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_log_level(level)
    _log_uncaught_exceptions()


def set_log_level(level: str) -> str:
    """Write records of this level and above from now on; return the level before."""
    if level not in LOG_LEVELS:
        raise ValueError(f"the level must be one of {', '.join(LOG_LEVELS)}")
    root = logging.getLogger()
    previous = logging.getLevelName(root.level).lower()
    root.setLevel(level.upper())
    # Chatty libraries say at info what concerns only them.
    for name in ("asyncio", "grpc", "uvicorn.error", "urllib3", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    return previous


def _log_uncaught_exceptions() -> None:
    """Route what Python would print itself through the redacting handler."""
    logger = logging.getLogger(__name__)

    def on_main(kind: type[BaseException], value: BaseException, trace: object) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            write_event(logger, logging.ERROR, "process.uncaught", {}, error=value)

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread is not None else "?"
            fields = {"thread": name}
            write_event(logger, logging.ERROR, "thread.uncaught", fields, error=args.exc_value)

    sys.excepthook = on_main
    threading.excepthook = on_thread


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, FIELDS_ATTRIBUTE, None)
    return fields if isinstance(fields, Mapping) else {}


def _exception_text(record: logging.LogRecord) -> str:
    """Type, message and the innermost frames; no source lines, which a traceback would quote."""
    assert record.exc_info
    kind, value, trace = record.exc_info
    frames = traceback.extract_tb(trace)[-8:]
    where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    name = kind.__name__ if kind is not None else "?"
    return f"{name}: {value} [{where}]"


def _timestamp(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = _one_line(text)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _one_line(text: str) -> str:
    """Line breaks in a value must not forge a second record."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
