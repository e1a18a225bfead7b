"""`requests.jsonl.gz`: every request of a run, one a line, read back to the last bit.

The first line is a header with the version. Times are whole nanoseconds since the time before them
in the same line, which is short; one that is no whole number of nanoseconds stands as seconds
since the run began, with a point in it. Fields that have their default are left out.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from loadtest.records import Chunk, RequestRecord

FORMAT = "isthmus-requests"
VERSION = 1
_NS = 1_000_000_000
_COMPRESSION = 6
_TIMES = ("scheduled_s", "sent_s", "chunks", "done_s")  # in the order they are told
_RECORD = TypeAdapter(RequestRecord)
_PLAIN = tuple(f for f in dataclasses.fields(RequestRecord) if f.name not in _TIMES)

Time = int | float  # nanoseconds since the time before, or seconds since the run began


class RawFileUnreadable(Exception):
    """A file that is not what `encode_records` makes; the message names the line."""


class _Clock:
    """The time before the next one, in whole nanoseconds: both sides count it alike."""

    def __init__(self) -> None:
        self._before_ns = 0

    def encode(self, at_s: float) -> Time:
        at_ns = round(at_s * _NS)
        told = at_ns - self._before_ns if at_ns / _NS == at_s else at_s
        self._before_ns = at_ns
        return told

    def decode(self, told: Time) -> float:
        at_s = told if isinstance(told, float) else (self._before_ns + told) / _NS
        self._before_ns = round(at_s * _NS)
        return at_s


def encode_records(records: Iterable[RequestRecord]) -> bytes:
    """Write the file; equal records give equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", _COMPRESSION, buffer, mtime=0) as file:
        _write_line(file, {"format": FORMAT, "version": VERSION})
        for record in records:
            _write_line(file, _encode(record))
    return buffer.getvalue()


def _write_line(file: gzip.GzipFile, line: dict[str, object]) -> None:
    file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode())
    file.write(b"\n")


def _encode(record: RequestRecord) -> dict[str, object]:
    line: dict[str, object] = {}
    for field in _PLAIN:
        value = getattr(record, field.name)
        if not _is_default(field, value):
            line[field.name] = dict(value) if field.name == "stages_ms" else value
    clock = _Clock()
    line["scheduled"] = clock.encode(record.scheduled_s)
    if record.sent_s is not None:
        line["sent"] = clock.encode(record.sent_s)
    if record.chunks:
        line["chunks"] = [clock.encode(chunk.at_s) for chunk in record.chunks]
        line["tokens"] = _encode_tokens([chunk.num_tokens for chunk in record.chunks])
    if record.done_s is not None:
        line["done"] = clock.encode(record.done_s)
    return line


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:  # Any: of any type
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _encode_tokens(tokens: list[int]) -> int | list[int]:
    """One number where all chunks brought equally many, as they mostly do."""
    return tokens[0] if len(set(tokens)) == 1 else tokens


def read_records(path: Path) -> list[RequestRecord]:
    """Read a whole file back."""
    try:
        return decode_records(path.read_bytes())
    except (OSError, RawFileUnreadable) as error:
        raise RawFileUnreadable(f"{path}: {error}") from error


def decode_records(content: bytes) -> list[RequestRecord]:
    """Read back what `encode_records` wrote."""
    try:
        lines = gzip.decompress(content).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise RawFileUnreadable(str(error)) from error
    if not lines:
        raise RawFileUnreadable("line 1: there is no header")
    return list(_decode_lines(lines))


def _decode_lines(lines: Iterable[bytes]) -> Iterator[RequestRecord]:
    for number, line in enumerate(lines, start=1):
        try:
            # Any: JSON of a stranger, checked right after.
            value: Any = pydantic_core.from_json(line, allow_inf_nan=False)
            if number == 1:
                _check_header(value)
            else:
                yield _decode(value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RawFileUnreadable(f"line {number}: {_told(error)}") from error


def _told(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


def _check_header(header: object) -> None:
    if not isinstance(header, dict):
        raise TypeError("not an object")
    if header.get("format") != FORMAT:
        raise ValueError(f"not a file of {FORMAT}")
    if header.get("version") != VERSION:
        raise ValueError(f"version {header.get('version')}, this program reads {VERSION}")


def _decode(line: dict[str, Any]) -> RequestRecord:  # Any: as above
    clock = _Clock()
    line["scheduled_s"] = clock.decode(line.pop("scheduled"))
    if "sent" in line:
        line["sent_s"] = clock.decode(line.pop("sent"))
    if "chunks" in line:
        times = [clock.decode(told) for told in line["chunks"]]
        tokens = line.pop("tokens")
        counts = tokens if isinstance(tokens, list) else [tokens] * len(times)
        line["chunks"] = [Chunk(*pair) for pair in zip(times, counts, strict=True)]
    if "done" in line:
        line["done_s"] = clock.decode(line.pop("done"))
    known = {field.name for field in dataclasses.fields(RequestRecord)}
    if unknown := line.keys() - known:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    return _RECORD.validate_python(line)
