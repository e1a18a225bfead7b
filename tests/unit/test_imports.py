"""What loads what: the control plane without torch, the command line without nearly anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = (
    "services.common",
    "services.runtime",
    "services.telemetry",
    "services.resilience",
    "services.pb",
    "services.registry",
    "services.transfer",
    "services.text",
    "services.router",
    "services.gateway",
    "services.prefill",
    "services.decode",
    "services.cli",
)
TORCH_FREE_MODULES = (
    "services.engine.api",
    "services.kv.hashing",
    "services.kv.layout",
    "services.kv.block_pool",
    "services.kv.block_table",
    "services.kv.prefix_cache",
    "services.kv.memory",
    "services.kv.digest",
    "services.models.catalog",
    "services.bench.local_cluster",
    "services.bench.result",
    "services.bench.smoke",
)
# Typer itself loads rich and pydantic when a command is looked at.
SLOW_TO_LOAD = ("torch", "grpc", "numpy", "opentelemetry", "services.models", "services.pb")


def modules_of(package: str) -> list[str]:
    folder = ROOT / Path(*package.split("."))
    names = sorted(folder.rglob("*.py"))
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in names
    ]


def run_python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_control_plane_loads_without_torch() -> None:
    modules = [name for package in TORCH_FREE for name in modules_of(package)]
    assert len(modules) > 50
    out = run_python(
        "import importlib, sys\n"
        f"for name in {[*modules, *TORCH_FREE_MODULES]!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print('torch was loaded by', name)\n"
        "        break\n"
    )
    assert out == ""


@pytest.mark.parametrize("arguments", ["--help", "up --help", "bench --help"])
def test_help_loads_none_of_the_slow_libraries(arguments: str) -> None:
    out = run_python(
        "import io, sys\n"
        "from services.cli.main import run\n"
        "real, sys.stdout = sys.stdout, io.StringIO()\n"
        f"status = run({arguments.split()!r})\n"
        "sys.stdout = real\n"
        f"loaded = [n for n in {SLOW_TO_LOAD!r} if n in sys.modules]\n"
        "print(status, loaded)\n"
    )
    assert out == "0 []\n"
