"""What a process says of itself for a diagnostics bundle: no secrets, no prompts, no locals."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import metadata
from types import FrameType

from services.common.version import installed_version
from services.telemetry.metrics import Metrics

MAX_FILE_BYTES = 1 << 20
_MAX_TASKS = 500
_PACKAGES = (
    "grpcio", "protobuf", "pydantic", "numpy", "redis", "pyzmq", "torch", "triton", "uvicorn",
    "starlette", "tokenizers", "opentelemetry-sdk",
)  # fmt: skip


def process_files(public_config: Mapping[str, object], metrics: Metrics) -> dict[str, bytes]:
    """Describe this process; to be called on its event loop.

    Args:
        public_config: dotted key -> value, secrets replaced already.
    """
    return {
        "config.json": json_file(public_config),
        "versions.json": json_file(versions()),
        "metrics.txt": bounded(metrics.render()),
        "stacks.txt": bounded(stacks().encode()),
    }


def json_file(value: object) -> bytes:
    """Write a value as a file of the bundle."""
    return bounded(json.dumps(value, indent=2, default=str).encode() + b"\n")


def bounded(content: bytes) -> bytes:
    """Cut what is too long for a bundle, and say so."""
    if len(content) <= MAX_FILE_BYTES:
        return content
    return content[:MAX_FILE_BYTES] + b"\n[cut here: %d bytes more]\n" % (
        len(content) - MAX_FILE_BYTES
    )


def versions() -> dict[str, str]:
    """Return what this process is made of."""
    found = {
        "isthmus": installed_version(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def stacks() -> str:
    """Say where every thread and every task of the loop stands: functions and lines only."""
    frames = sys._current_frames()
    parts = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread.name):
        frame = frames.get(thread.ident or 0)
        parts.append(f"thread {thread.name}\n{_places(frame)}")
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:_MAX_TASKS]:
        stack = task.get_stack(limit=8)
        parts.append(f"task {task.get_name()}\n" + "".join(map(_place, stack)))
    if len(tasks) > _MAX_TASKS:
        parts.append(f"and {len(tasks) - _MAX_TASKS} tasks more")
    return "\n".join(parts) + "\n"


def _places(frame: FrameType | None) -> str:
    """Innermost first."""
    if frame is None:
        return "  (just ended)\n"
    return "".join(_place(inner) for inner, _ in traceback.walk_stack(frame))


def _place(frame: FrameType) -> str:
    code = frame.f_code
    module = frame.f_globals.get("__name__", "?")
    return f"  {module}.{code.co_qualname}:{frame.f_lineno}\n"
