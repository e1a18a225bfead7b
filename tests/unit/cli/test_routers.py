"""Commands reach every process behind a router's address, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from services.cli import routers as module
from services.cli.routers import Peer, Routers


def behind(monkeypatch: pytest.MonkeyPatch, connections: Sequence[str], processes: int) -> Routers:
    """One address whose next connections meet these processes; channels are not opened."""
    meets = iter(connections)
    current = [""]

    @contextmanager
    def connect(*_arguments: object) -> Iterator[object]:
        current[0] = next(meets)
        yield None

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr("services.pb.admin_pb2_grpc.AdminStub", lambda _channel: current[0])
    return Routers(("a",), identify=lambda stub, _metadata, _timeout: Peer(str(stub), processes))


def test_every_process_of_a_shared_port_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = behind(monkeypatch, ["r0", "r0", "r2", "r0", "r1"], 3)
    replies = found.ask_all(lambda stub, _metadata, _timeout: f"of {stub}")
    assert [reply.answer for reply in replies] == ["of r0", "of r2", "of r1"]
    assert [reply.server for reply in replies] == ["a r0", "a r2", "a r1"]


def test_process_that_is_never_met_does_not_hold_the_command_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = behind(monkeypatch, ["r0"] * 100, 2)
    assert len(found.ask_all(lambda stub, _metadata, _timeout: str(stub))) == 1


def test_router_of_one_process_is_asked_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    found = behind(monkeypatch, ["r0"], 1)
    assert [reply.server for reply in found.ask_all(lambda stub, _m, _t: str(stub))] == ["a"]
