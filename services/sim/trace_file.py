"""Opens recorded loads, plain or gzipped; whatever is wrong with a file's form is one error."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast


class BadTrace(ValueError):
    """A file that is no such trace; the message names the line."""


@contextmanager
def trace_lines(path: Path) -> Iterator[TextIO]:
    """Open a trace as text.

    Raises:
        BadTrace: it is cut off, damaged, or no text; while it is read, too.
        OSError: it cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            yield cast(TextIO, lines)
    except BadTrace:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, csv.Error, UnicodeDecodeError) as error:
        raise BadTrace(f"{path.name} cannot be read: {error}") from error
