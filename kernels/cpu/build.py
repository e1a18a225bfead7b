"""Compile the C libraries for this very machine and keep them in the user's cache.

`python -m kernels.cpu.build` builds them ahead of time and says where they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
OPS, KV_BLOCKS = "isthmus_cpu", "isthmus_kv"  # libraries, one C file each
COMPILE_TIMEOUT_S = 180.0
MAX_KEPT_BUILDS = 16  # other checkouts and machines that share the cache keep theirs for a while

_BASE_FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread"),
    *("-fvisibility=hidden", "-ffp-contract=fast"),
)
# Best first; a compiler that refuses one set is asked for the next.
_FLAG_SETS = {
    OPS: (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ()),
    # No OpenMP: processes without torch load it too, and torch brings a runtime of its own.
    KV_BLOCKS: (("-march=native",), ()),
}


class BuildFailed(Exception):
    """The library cannot be built here; the message says why in one line."""


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds built libraries, under `XDG_CACHE_HOME` or `~/.cache`."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "isthmus" / "kernels"


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return the C compiler's command line: `$CC`, else cc, gcc or clang from the path."""
    for name in (environ.get("CC", ""), "cc", "gcc", "clang"):
        command = shlex.split(name)
        if command and shutil.which(command[0], path=environ.get("PATH")):
            return command
    raise BuildFailed("no C compiler found (looked for $CC, cc, gcc and clang)")


def build(environ: Mapping[str, str], name: str = OPS) -> Path:
    """Return the path of a library, compiling it unless the cache has it.

    Safe when several processes build at once: each compiles to a name of its own and renames it
    into place, so a reader sees a whole file or none.
    """
    compiler = find_compiler(environ)
    folder = cache_root(environ) / build_key(compiler)
    target = folder / library_file(name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            _compile(compiler, name, built)
            built.replace(target)
    except OSError as error:
        raise BuildFailed(f"cannot write to {folder}: {error.strerror}") from error
    prune(folder.parent, keep=folder)
    return target


def load(environ: Mapping[str, str], name: str) -> ctypes.CDLL:
    """Build a library if need be and open it; BuildFailed says why it cannot be used."""
    path = build(environ, name)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # A file damaged by a full disk or a crash: build it again, once.
        path.unlink(missing_ok=True)
    path = build(environ, name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"the built library does not load: {error}") from error


def library_file(name: str) -> str:
    """Return what a library is called in its folder."""
    return f"lib{name}.so"


def prune(root: Path, keep: Path) -> None:
    """Remove the oldest builds beyond `MAX_KEPT_BUILDS`; a process that has one loaded keeps it."""
    others = [path for path in root.iterdir() if path != keep]
    others.sort(key=_modified_at, reverse=True)
    for folder in others[MAX_KEPT_BUILDS - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it too


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # removed by another process since it was listed
        return 0.0


def _check_owner(folder: Path) -> None:
    """Refuse a folder in which another user could have put code for us to load."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildFailed(f"{folder} belongs to or is writable by another user")


def build_key(compiler: list[str]) -> str:
    """Name a build by all it depends on: sources, flags, compiler and processor features."""
    digest = hashlib.sha256()
    parts = [path.read_bytes() for path in _sources()]
    parts += [
        repr((_BASE_FLAGS, _FLAG_SETS)).encode(),
        " ".join(compiler).encode(),
        _compiler_version(compiler),
        _processor().encode(),
    ]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".c", ".h"))


def _compiler_version(compiler: list[str]) -> bytes:
    result = _run([*compiler, "--version"])
    if result.returncode:
        raise BuildFailed(f"{compiler[0]} does not run: {_last_line(result.stderr)}")
    return result.stdout


def _processor() -> str:
    """Describe what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join([platform.machine(), *(first[key] for key in wanted if key in first)])


def _compile(compiler: list[str], name: str, target: Path) -> None:
    source = str(SOURCE_DIR / f"{name}.c")
    complaint = ""
    for flags in _FLAG_SETS[name]:
        command = [*compiler, *_BASE_FLAGS, *flags, "-o", str(target), source, "-lm"]
        result = _run(command)
        if result.returncode == 0:
            return
        complaint = complaint or _last_line(result.stderr)
    raise BuildFailed(f"{compiler[0]} cannot compile the CPU library: {complaint}")


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S, cwd=SOURCE_DIR
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took more than {COMPILE_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise BuildFailed(f"{command[0]} does not run: {error.strerror}") from error


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if "error" in line]
    return lines[0].strip() if lines else "no message"


def main() -> int:
    """Build both libraries and report; exit 0 either way, since plain torch can serve instead."""
    try:
        sys.stdout.write(f"CPU kernels: {build(os.environ)}\n")
        sys.stdout.write(f"KV copies: {build(os.environ, KV_BLOCKS)}\n")
    except BuildFailed as error:
        sys.stdout.write(f"not built, plain torch and numpy will serve ({error})\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
