"""Rows of NIXL in the handoff benchmark, with a stub in its place: what works and what does not."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.bench import handoff as bench
from services.bench import other_systems
from services.bench.handoff import Measured, Series
from services.bench.other_systems import OtherFailed, OtherSystem, Shape, is_installed

pytestmark = pytest.mark.integration
SHAPE = Shape(num_blocks=8, block_bytes=64, dest_ids=(5, 0, 3), source_ids=(1, 7, 2))

# It has the interface the benchmark uses, and moves memory through a file.
STUB = """
import ctypes, os, sys, time

BEHAVIOUR = {behaviour!r}
print("NIXL INFO: a line of its own", end="")


class nixl_agent_config:
    def __init__(self, backends):
        assert backends == ["UCX"]


class nixl_agent:
    def __init__(self, name, config):
        if BEHAVIOUR == "raises":
            raise RuntimeError("no such backend")
        self.is_source = name.startswith("source")
        self.pulls = 0

    def register_memory(self, regions, kind):
        (self.base, self.size, _, _), = regions

    def get_agent_metadata(self):
        path = os.path.join({directory!r}, "memory" if self.is_source else "sink")
        with open(path, "wb") as file:
            file.write(ctypes.string_at(self.base, self.size))
        return f"{{path}}@{{self.base}}".encode()

    def add_remote_agent(self, metadata):
        return metadata.decode()

    def send_notif(self, peer, message):
        path = os.path.join({directory!r}, "notification")
        with open(path + ".part", "wb") as file:
            file.write(message)
        os.rename(path + ".part", path)

    def get_new_notifs(self):
        path = os.path.join({directory!r}, "notification")
        if not os.path.exists(path):
            return {{}}
        message = open(path, "rb").read()
        os.remove(path)
        return {{"source": [message]}}

    def get_xfer_descs(self, regions, kind):
        return regions

    def initialize_xfer(self, operation, ours, theirs, peer, message):
        assert operation == "READ"
        return ours, theirs, peer

    def transfer(self, handle):
        ours, theirs, peer = handle
        path, base = peer.split("@")
        self.pulls += 1
        if BEHAVIOUR == "dies" and self.pulls > 1:
            os.kill(os.getpid(), 11)
        if BEHAVIOUR == "falls silent" and self.pulls > 1:
            os.close(1)
            time.sleep(600)
        memory = open(path, "rb").read()
        for (to, size, _), (come, _, _) in zip(ours, theirs):
            at = come - int(base) + (size if BEHAVIOUR == "wrong" else 0)
            ctypes.memmove(to, memory[at : at + size].ljust(size), size)
        return "PROC"

    def check_xfer_state(self, handle):
        return "ERR" if BEHAVIOUR == "fails" and self.pulls > 1 else "DONE"

    def release_xfer_handle(self, handle):
        pass
"""


@pytest.fixture
def stub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the name, which behaves as the parameter says."""
    package = tmp_path / "nixl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    text = STUB.format(behaviour=request.param, directory=str(tmp_path))
    (package / "_api.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(bench, "is_installed", lambda name: name == "nixl")


@pytest.mark.parametrize("stub", ["works"], indirect=True)
@pytest.mark.usefixtures("stub")
def test_what_is_installed_is_measured() -> None:
    assert is_installed("nixl")
    with OtherSystem("nixl", SHAPE) as system:
        assert system.read_s(3) > 0
        assert system.doorbell_s(3) > 0
        assert system.read_s(1) > 0


@pytest.mark.parametrize(
    ("stub", "why"),
    [
        ("raises", "RuntimeError: no such backend"),
        ("wrong", "what arrived is not what was there"),
        ("fails", "a transfer ended as ERR"),
        ("dies", "its process ended with -11"),
        ("falls silent", "its process ended with -9"),
    ],
    indirect=["stub"],
)
@pytest.mark.usefixtures("stub")
def test_what_fails_is_told_and_ends_nothing_else(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_systems, "STOP_TIMEOUT_S", 1.0)
    with ExitStack() as stack:
        others = bench._Others(stack, SHAPE)
        measured: Measured = {("nixl", 1): Series(), ("memfd", 1): Series()}
        others.round(measured, lambda _name, take: [take()].clear(), 3)
        assert others.said == {"nixl": f"failed: {why}", "mooncake": "skipped: not installed"}
        assert others.running == {}
    result = bench.result_of({}, num_wrong=0, others=others.said)
    assert result.reference["nixl"] == f"failed: {why}"
    assert result.exit_code == 0


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is installed, whatever this machine has."""
    monkeypatch.setattr(bench, "is_installed", lambda _: False)


@pytest.mark.usefixtures("nothing")
def test_what_is_not_installed_is_told() -> None:
    with ExitStack() as stack:
        assert set(bench._Others(stack, SHAPE).said.values()) == {"skipped: not installed"}


@pytest.mark.usefixtures("nothing")
def test_a_system_that_was_given_up_leaves_no_half_row() -> None:
    class Broken(OtherSystem):
        def __init__(self) -> None:
            """Start nothing."""

        def read_s(self, num_blocks: int) -> float:
            """Fail."""
            raise OtherFailed(f"not with {num_blocks}")

    with ExitStack() as stack:
        others = bench._Others(stack, SHAPE)
        others.running["nixl"] = Broken()
        measured: Measured = {("nixl", 1): Series(), ("memfd", 1): Series()}
        others.round(measured, lambda _name, take: [take()].clear(), 16)
    assert list(measured) == [("memfd", 1)]
    assert others.said["nixl"] == "failed: not with 16"
