"""The nccl plane on gloo: ordering, abort, fallback and bounds; NCCL itself was never run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed

from services.transfer.api import Offer, SinkReady
from services.transfer.config import KIB, TransferConfig
from services.transfer.device import GroupError, GroupSpec
from services.transfer.pair_store import PairStore
from services.worker.torch_groups import TorchDevice
from tests.support.groups import GatedDevice
from tests.support.transfer_ends import (
    CALM,
    DecodeEnd,
    PrefillEnd,
    hashes,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
    with_planes,
)
from tests.support.transfer_process import EndProcess

pytestmark = pytest.mark.integration

BOTH = with_planes(CALM, "nccl", "zmq")
ONLY = with_planes(CALM, "nccl")
# Batches of two blocks, so that a prompt is several.
SMALL = replace(BOTH, data_message_bytes=64 * KIB, window_bytes=256 * KIB)
DEADLINE_S = 0.6
Make = Callable[..., tuple[PrefillEnd, DecodeEnd]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    ends: list[PrefillEnd | DecodeEnd] = []
    devices: list[GatedDevice] = []

    def pair(
        config: TransferConfig,
        prefill_device: GatedDevice | None = None,
        decode_device: GatedDevice | None = None,
    ) -> tuple[PrefillEnd, DecodeEnd]:
        prefill = make_prefill(tmp_path, config, device=prefill_device)
        decode = make_decode(config, device=decode_device)
        ends.extend((decode, prefill))
        devices.extend(device for device in (prefill_device, decode_device) if device)
        return prefill, decode

    yield pair
    for device in devices:
        device.gate.is_open.set()
    for end in ends:
        end.stop()


def hand_off(prefill: PrefillEnd, decode: DecodeEnd, key: str, num_tokens: int = 200) -> str:
    """Run one handoff to its end, check it, and return its plane."""
    ticket, offer = prefill.offer_all(key, num_tokens)
    blocks = decode.receive(key, ticket, offer)
    ready = decode.events.wait(key)
    assert isinstance(ready, SinkReady), ready
    assert outcome(prefill.events.wait(key)) == "done"
    assert same_content(prefill, key, decode, blocks, num_tokens % 16)
    prefill.free.extend(prefill.lent.pop(key))
    decode.free.extend(block for block in blocks if block is not None)
    return ready.stats.plane


def held(config: TransferConfig, make: Make) -> tuple[PrefillEnd, DecodeEnd, GatedDevice]:
    """Make a pair whose decode is inside the group while prefill is held before it."""
    device = GatedDevice()
    prefill, decode = make(config, device)
    ticket, offer = prefill.offer_all("held", 200)
    decode.receive("held", ticket, offer)
    wait_until(lambda: device.gate.num_sends == 1)
    return prefill, decode, device


def test_many_batches_arrive_in_order_and_no_global_group_is_used(make: Make) -> None:
    prefill, decode = make(SMALL)
    assert {hand_off(prefill, decode, f"k{i}") for i in range(5)} == {"nccl"}
    assert decode.sink.counters.plane_fallbacks == 0
    assert not torch.distributed.is_initialized()


def test_groups_listen_on_the_given_address_only(make: Make) -> None:
    before = listening()  # servers of earlier tests, until they are collected
    prefill, decode = make(ONLY)
    hand_off(prefill, decode, "k")
    ours = {socket: address for socket, address in listening().items() if socket not in before}
    assert len(ours) >= 3  # the ROUTER and a device at each end
    assert set(ours.values()) == {"0100007F"}


def listening() -> dict[str, str]:
    """Return the sockets of this process that listen, and the address each does on."""
    files = Path("/proc/self/fd")
    own = {os.readlink(files / fd) for fd in os.listdir(files) if (files / fd).is_symlink()}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            socket = f"socket:[{fields[9]}]"
            if fields[3] == "0A" and socket in own:
                found[socket] = fields[1].partition(":")[0]
    return found


# ---- abort --------------------------------------------------------------------------------------


def test_a_batch_past_its_deadline_is_aborted_and_the_rest_comes_by_zmq(make: Make) -> None:
    """A rank that waits for a frozen one is ended by its own guard."""
    config = replace(SMALL, group_batch_timeout_s=DEADLINE_S)
    started = time.monotonic()
    prefill, decode, _ = held(config, make)
    ready = decode.events.wait("held", DEADLINE_S + 3.0)
    assert isinstance(ready, SinkReady), ready
    assert time.monotonic() - started >= DEADLINE_S
    assert ready.stats.plane == "zmq"  # and not silently:
    assert decode.sink.counters.plane_fallbacks == 1
    assert decode.sink.planes() == {"prefill-0": "zmq"}
    assert hand_off(prefill, decode, "next") == "zmq"


def test_a_late_batch_of_a_cancelled_transfer_never_reaches_the_pool(make: Make) -> None:
    prefill, decode, device = held(SMALL, make)
    decode.sink.cancel("held", "client left")
    # Neither side waits for the group: the blocks are free while the batch is still inside.
    assert outcome(decode.events.wait("held", 1.0)) == "cancelled"
    assert outcome(prefill.events.wait("held", 1.0)) == "aborted"
    decode.memory.blocks[:] = 0xA5
    for block in prefill.lent["held"]:
        prefill.write_block(block)
    discarded = decode.sink.counters.discarded_frames
    device.gate.is_open.set()
    wait_until(lambda: decode.sink.counters.discarded_frames > discarded)
    assert (decode.memory.blocks == 0xA5).all()
    assert decode.sink.counters.plane_fallbacks == 0
    assert hand_off(prefill, decode, "next") == "nccl"  # the order of the group has held


def test_a_cancelled_prefill_gives_its_blocks_back_at_once(make: Make) -> None:
    prefill, decode, device = held(SMALL, make)
    prefill.source.cancel("held", "client left")
    assert outcome(prefill.events.wait("held", 1.0)) == "aborted"
    assert outcome(decode.events.wait("held", 1.0)) == "handoff_failed"
    device.gate.is_open.set()
    assert hand_off(prefill, decode, "next") == "nccl"


def test_a_group_that_breaks_costs_only_what_was_inside(make: Make) -> None:
    device = GatedDevice()
    device.gate.is_open.set()
    device.gate.broken_from = 2
    prefill, decode = make(SMALL, device)
    ticket, offer = prefill.offer_all("k", 200)
    blocks = decode.receive("k", ticket, offer)
    ready = decode.events.wait("k")
    assert isinstance(ready, SinkReady), ready
    assert ready.stats.plane == "zmq"
    assert same_content(prefill, "k", decode, blocks, 200 % 16)
    assert ready.stats.blocks_moved == 13  # the four that came before the break did not come again
    assert decode.sink.counters.blocks == 13


def test_a_dead_pair_tries_again_later_with_another_number(make: Make) -> None:
    device = GatedDevice()
    device.gate.is_open.set()
    device.gate.broken_from = 1
    prefill, decode = make(replace(SMALL, group_retry_s=2.0), device)
    hand_off(prefill, decode, "broken")
    device.gate.broken_from = None
    assert hand_off(prefill, decode, "at-once") == "zmq"
    threading.Event().wait(2.0)
    assert hand_off(prefill, decode, "later") == "nccl"
    numbers = [int(spec.name.rpartition("/")[2]) for spec in device.made]
    assert len(numbers) == 2
    assert numbers[0] < numbers[1]
    assert decode.sink.planes() == {"prefill-0": "nccl"}


def test_without_another_plane_a_receive_goes_on_in_another_group(make: Make) -> None:
    device = GatedDevice()
    device.gate.is_open.set()
    device.gate.breaks = frozenset({2})
    prefill, decode = make(replace(SMALL, planes=("nccl",)), device)
    started = time.monotonic()
    ticket, offer = prefill.offer_all("k", 200)
    blocks = decode.receive("k", ticket, offer)
    ready = decode.events.wait("k")
    assert isinstance(ready, SinkReady), ready
    assert time.monotonic() - started < SMALL.progress_timeout_s  # nothing had to be missed
    assert (ready.stats.plane, ready.stats.nacks, len(device.made)) == ("nccl", 0, 2)
    assert same_content(prefill, "k", decode, blocks, 200 % 16)


def test_without_another_plane_the_failure_names_the_group(make: Make) -> None:
    prefill, decode = make(ONLY, GatedDevice(refusal="no transport"), None)
    ticket, offer = prefill.offer_all("k", 40)
    decode.receive("k", ticket, offer)
    failed = decode.events.wait("k")
    assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
    assert "no transport" in failed.message


def test_a_prefill_that_cannot_build_is_used_over_zmq(make: Make) -> None:
    prefill, decode = make(BOTH, GatedDevice(refusal="no transport"), None)
    assert hand_off(prefill, decode, "k") == "zmq"
    assert decode.sink.counters.plane_fallbacks == 1


def test_a_decode_that_cannot_build_uses_zmq(make: Make) -> None:
    prefill, decode = make(BOTH, None, GatedDevice(refusal="no transport"))
    assert hand_off(prefill, decode, "k") == "zmq"
    assert decode.sink.counters.plane_fallbacks == 1


def test_stop_ends_a_group_that_hangs(make: Make) -> None:
    prefill, decode, device = held(SMALL, make)
    started = time.monotonic()
    decode.stop()
    assert outcome(decode.events.wait("held")) == "cancelled"
    device.gate.is_open.set()
    prefill.stop()
    assert time.monotonic() - started < 8.0
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("transfer-g")])


# ---- other lives, other pairs --------------------------------------------------------------------


def test_another_life_of_a_peer_cannot_join_an_old_group() -> None:
    """The name holds both incarnations: even with the same entries the two never meet."""
    stores: list[PairStore] = []
    stores.append(PairStore(lambda key, value: stores[1].on_entry(key, value)))
    stores.append(PairStore(lambda key, value: stores[0].on_entry(key, value)))
    device, errors = TorchDevice(torch.device("cpu")), []

    def build(rank: int, name: str) -> None:
        try:
            device.make_group(GroupSpec(name, rank, "127.0.0.1", 16, 1, 0.5), stores[rank])
        except GroupError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=build, args=(rank, f"kv/{rank + 1:016x}/{9:016x}/1"))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 2


def test_the_least_recently_used_group_makes_room(tmp_path: Path) -> None:
    config = replace(ONLY, max_groups=2)
    device = GatedDevice()
    device.gate.is_open.set()
    prefill = make_prefill(tmp_path, config, device=device)
    decodes = [make_decode(config, worker_id=f"decode-{i}") for i in range(3)]
    try:
        for i in (0, 1, 0, 2):
            assert hand_off(prefill, decodes[i], f"k{i}-{len(device.made)}") == "nccl"
        assert len(device.made) == 3
        wait_until(lambda: len(device.aborts) == 1)
        assert device.aborts == [device.made[1].name]  # not that of decode-0, which was used last
        assert hand_off(prefill, decodes[0], "again") == "nccl"
        assert hand_off(prefill, decodes[1], "back") == "nccl"
        assert len(device.made) == 4
        assert sum(decode.sink.counters.plane_fallbacks for decode in decodes) == 0
    finally:
        for decode in decodes:
            decode.stop()
        prefill.stop()


# ---- processes -----------------------------------------------------------------------------------


def _inside_the_second_batch(process: EndProcess, decode: DecodeEnd) -> None:
    """Leave decode in the group, waiting for a batch that its peer is about to send."""
    ticket = bytes.fromhex(process.ask("offer", key="k", num_tokens=160)["ticket"])
    decode.receive("k", ticket, Offer("k", "", 160, hashes(10), ""))
    process.ask("seal", key="k", lo=0, count=4)
    wait_until(lambda: decode.sink.counters.blocks == 4)
    process.ask("seal", key="k", lo=4, count=6)
    wait_until(lambda: process.ask("sends")["sends"] == 2)


def test_a_peer_killed_in_a_batch_surfaces_within_a_second(tmp_path: Path) -> None:
    """What a dead peer has told of is not waited for until the deadline of a batch."""
    process = EndProcess("prefill", "calm", "nccl,zmq", tmp_path, free_sends=1)
    decode = make_decode(BOTH)
    try:
        _inside_the_second_batch(process, decode)
        killed = time.monotonic()
        process.kill()
        failed = decode.events.wait("k", 5.0)
        assert time.monotonic() - killed < 1.0
        assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
        assert decode.sink.num_open() == 0
    finally:
        decode.stop()
        process.kill()


def test_a_peer_frozen_in_a_batch_is_aborted_by_our_deadline(tmp_path: Path) -> None:
    """Nothing in the group itself would ever notice."""
    process = EndProcess("prefill", "calm", "nccl,zmq", tmp_path, free_sends=1)
    decode = make_decode(replace(BOTH, group_batch_timeout_s=DEADLINE_S))
    try:
        _inside_the_second_batch(process, decode)
        process.signal(signal.SIGSTOP)
        wait_until(lambda: decode.sink.counters.plane_fallbacks == 1, DEADLINE_S + 1.5)
        process.signal(signal.SIGCONT)
        process.ask("finish", key="k", num_tokens=160)
        ready = decode.events.wait("k", 15.0)
        assert isinstance(ready, SinkReady), ready
        assert ready.stats.plane == "zmq"
        assert process.ask("wait", key="k")["outcome"] == "done"
    finally:
        decode.stop()
        process.kill()
