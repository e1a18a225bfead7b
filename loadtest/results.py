"""The directory of a result: written whole or not at all, and never over an older one."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from loadtest.result import CompareResult, RunResult, SearchResult
from services.common.errors import ConfigError

RESULT_FILE = "result.json"
RAW_FILE = "requests.jsonl.gz"

Result = Annotated[RunResult | SearchResult | CompareResult, Field(discriminator="kind")]
_RESULT: TypeAdapter[RunResult | SearchResult | CompareResult] = TypeAdapter(Result)
_MAX_SLUG = 60


class ResultUnreadable(Exception):
    """There is no result, or not one this program reads; the message says which and why."""


def directory_name(name: str, started_at: datetime) -> str:
    """Name the directory of a result: letters and digits of its name, and the time in UTC."""
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:_MAX_SLUG] or "run"
    return f"{slug}-{started_at.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def write_directory(root: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write all files into a new directory `root/name`, or `name-2` and so on if that exists.

    Raises:
        ConfigError: they cannot be written; nothing is left of them.
    """
    try:
        return _write_directory(root, name, files)
    except OSError as error:
        raise _unwritable(root, error) from error


def check_writable(root: Path) -> None:
    """Make the directory of results, or say by a ConfigError that none can be kept there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=root, prefix=".new-"))
    except OSError as error:
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {root}: a result cannot be written there: {error.strerror}")


def _write_directory(root: Path, name: str, files: Mapping[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
    try:
        for file_name, content in files.items():
            _write_synced(building / file_name, content)
        building.chmod(0o755)  # mkdtemp makes it its owner's only
        return _rename_to_free_name(building, root, name)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _rename_to_free_name(building: Path, root: Path, name: str) -> Path:
    for number in itertools.count(1):
        target = root / (name if number == 1 else f"{name}-{number}")
        try:
            # Fails on a directory that holds anything: two writers cannot get the same name.
            building.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return target
    raise AssertionError("counting ended")


def digest(content: bytes) -> str:
    """SHA-256 as `raw_sha256` holds it."""
    return hashlib.sha256(content).hexdigest()


def result_path(path: Path) -> Path:
    """Find the result file of a directory; a file is its own."""
    return path / RESULT_FILE if path.is_dir() else path


def load_result(path: Path) -> RunResult | SearchResult | CompareResult:
    """Read a result by its directory or file, whichever of the three it is."""
    file = result_path(path)
    try:
        return _RESULT.validate_json(file.read_bytes())
    except OSError as error:
        raise ResultUnreadable(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ResultUnreadable(f"{file}: {where or 'the file'}: {first['msg']}") from error


def check_raw_file(result: RunResult, directory: Path) -> str | None:
    """Say what is wrong with a run's raw file: None if it is the one its figures came from."""
    if not result.raw_file:
        return "the result names no raw file"
    path = directory / Path(result.raw_file).name
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if digest(content) != result.raw_sha256:
        return f"{path} is not the file the figures were computed from: its SHA-256 differs"
    return None
