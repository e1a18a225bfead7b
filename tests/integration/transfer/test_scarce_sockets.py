"""Sockets under callers that take without asking, and in a process that has none left."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.common.errors import ConfigError
from services.kv.memory import KvPoolMemory
from services.transfer.memfd_plane import HandoverError, PoolClient, PoolServer
from services.transfer.zmq_plane import RENEW, DealerLink, NoSocket, new_context, peer_base
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    LAYOUT,
    make_decode,
    make_prefill,
    outcome,
    wait_until,
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


def test_a_path_no_socket_can_have_is_named_with_a_way_out(tmp_path: Path) -> None:
    with (
        KvPoolMemory.create(LAYOUT, 1) as memory,
        pytest.raises(ConfigError, match=r"xxx.* is too long .*XDG_RUNTIME_DIR"),
    ):
        PoolServer(tmp_path / ("x" * 100), memory, 7, max_peers=2)


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


def test_a_receive_without_a_socket_fails_at_once_and_the_next_one_is_served(
    tmp_path: Path,
) -> None:
    """Nothing was reserved, so nobody else would ever look at it again."""
    prefill, decode = make_prefill(tmp_path), make_decode()
    try:
        ticket, offer = prefill.offer_all("k", 50)
        with _no_descriptor_left():
            decode.open("k", ticket, offer)
            failed = decode.events.wait("k")
        assert outcome(failed) == "handoff_failed"
        assert "no socket" in failed.message
        assert decode.sink.num_open() == 0
        decode.receive("again", ticket, offer)
        assert outcome(decode.events.wait("again")) == "ready"
    finally:
        decode.stop()
        prefill.stop()


def test_leases_are_renewed_though_one_peer_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in the table has no socket; those behind it must not pay with their leases."""
    dial, refused = DealerLink.__init__, set[str]()

    def dial_but_one(link: DealerLink, context: Any, endpoint: str, *rest: Any) -> None:
        if rest[1] == RENEW and endpoint in refused:
            raise NoSocket("Too many open files")
        dial(link, context, endpoint, *rest)

    monkeypatch.setattr(DealerLink, "__init__", dial_but_one)
    ends = [make_prefill(tmp_path / f"p{i}", BRISK, worker_id=f"prefill-{i}") for i in range(2)]
    refused.add(ends[0].source.endpoint)
    decode = make_decode(BRISK)
    try:
        offers = [end.offer(f"k{i}", 50) for i, end in enumerate(ends)]
        for i, (ticket, offer) in enumerate(offers):
            decode.open(f"k{i}", ticket, offer)  # no blocks yet: only its lease is a sign of life
        assert ends[0].events.wait("k0").outcome == "peer_lost"
        sleep_past = time.monotonic() + BRISK.lease_s
        wait_until(lambda: time.monotonic() > sleep_past)
        assert ends[1].events.of("k1") == []
        decode.reserve("k1", offers[1][1])
        ends[1].seal("k1", 0, 3)
        ends[1].finish("k1", 50)
        assert outcome(decode.events.wait("k1")) == "ready"
    finally:
        decode.stop()
        for end in ends:
            end.stop()


def test_a_sink_has_room_for_sockets_to_all_its_peers() -> None:
    """ZMQ's own limit is 1,023; it was used up at 190 peers, and then no lease was renewed."""
    context = new_context(CALM)
    try:
        assert context.get(zmq.MAX_SOCKETS) >= 6 * CALM.max_peers
    finally:
        context.term()


_CONNECT_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
import zmq
from services.transfer.config import TransferConfig
from services.transfer.zmq_plane import new_context
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for num_left in range(10):
    context = new_context(TransferConfig())
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + num_left, hard))
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect("tcp://127.0.0.1:9")
    except zmq.ZMQError:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    context.destroy(linger=0)
print("alive")
"""


def test_no_number_of_descriptors_left_ends_the_process() -> None:
    """ZMQ aborts it when its own threads cannot start; they have to run before there is service."""
    child = subprocess.run(
        [sys.executable, "-c", _CONNECT_WITH_FEW_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr
