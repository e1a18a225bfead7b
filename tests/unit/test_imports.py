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


def test_commands_of_the_control_plane_load_where_there_is_no_torch() -> None:
    """Its image has none: an import that is only tried would end the process there."""
    modules = [
        "services.cli.main",
        "services.gateway.main",
        "services.autoscaler.main",
        *modules_of("services.autoscaler"),
        *modules_of("services.operator"),
    ]
    out = run_python(
        "import importlib, sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton'):\n"
        "            raise ModuleNotFoundError(f'no {name} here', name=name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "print('all')\n"
    )
    assert out == "all\n"


def test_a_worker_without_torch_says_what_to_install() -> None:
    out = run_python(
        "import sys\n"
        "from services.cli.main import run\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'no {name} here', name=name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "sys.stderr = sys.stdout\n"
        "print(run(['worker', '--model', 'smollm2']))\n"
    )
    assert "isthmus[worker]" in out
