"""The pool's socket under callers that take without asking, and in a process short of handles."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.kv.memory import KvPoolMemory
from services.transfer.memfd_plane import HandoverError, PoolClient, PoolServer
from services.transfer.zmq_plane import peer_base
from tests.support.transfer_ends import (
    CALM,
    LAYOUT,
    make_decode,
    make_prefill,
    outcome,
    with_planes,
)

pytestmark = pytest.mark.integration


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _call(path: str) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(10.0)
    caller.connect(path)
    return caller


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PoolServer]:
    with KvPoolMemory.create(LAYOUT, 4) as memory:
        found = PoolServer(tmp_path, memory, 7, max_peers=2)
        yield found
        found.close()


def test_a_caller_is_turned_away_when_no_descriptor_is_left(server: PoolServer) -> None:
    """One left in the queue would wake the thread for ever, and its timers would never run."""
    with _call(server.path) as first, _call(server.path) as second, _call(server.path) as third:
        with _no_descriptor_left():
            assert server.accept(0.0) is None
            assert server.accept(0.0) is None  # what the first was turned away with is kept
        assert (first.recv(1), second.recv(1)) == (b"", b"")
        assert server.accept(0.0) is not None
        third.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            third.recv(1)


def test_no_descriptor_for_a_client_is_a_failed_handover(server: PoolServer) -> None:
    with _no_descriptor_left(), pytest.raises(HandoverError, match="no socket"):
        PoolClient(server.path, peer_base("decode-0", 5))


def test_only_callers_that_asked_for_nothing_are_cut_off(server: PoolServer) -> None:
    with _call(server.path) as silent:
        assert server.accept(1.0) is not None
        client = PoolClient(server.path, peer_base("decode-0", 5))
        fd = server.accept(1.0)
        assert fd is not None
        assert server.read(fd, 1) == []  # it has its pool
        assert server.drop_silent(1.0) == []  # not yet
        assert len(server.drop_silent(1.5)) == 1
        assert silent.recv(1) == b""
        assert server.drop_silent(9.0) == []
        assert server.read(fd, 1) == []
        client.close()


def test_silent_callers_do_not_keep_the_pool_from_others(tmp_path: Path) -> None:
    """Places at the pool's socket are few: who takes one and asks nothing loses it."""
    config = replace(with_planes(CALM, "memfd"), max_peers=3, connect_timeout_s=1.0)
    prefill = make_prefill(tmp_path, config)
    (path,) = tmp_path.rglob("*.sock")
    callers = [_call(str(path)) for _ in range(config.max_peers)]
    decode = make_decode(config)
    try:
        for caller in callers:
            assert caller.recv(1) == b""
        ticket, offer = prefill.offer_all("k", 50)
        decode.receive("k", ticket, offer)
        assert outcome(decode.events.wait("k")) == "ready"
        assert decode.sink.planes() == {"prefill-0": "memfd"}
    finally:
        for caller in callers:
            caller.close()
        decode.stop()
        prefill.stop()
