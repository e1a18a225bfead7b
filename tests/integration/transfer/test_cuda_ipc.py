"""The logic of plane cuda_ipc on a device that is not one; tests/gpu runs it on one that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.ids import BlockId
from services.kv.convert import convert_part, whole
from services.kv.digest import block_digests
from services.kv.layout import KvLayout
from services.transfer.api import Offer, SinkReady
from services.transfer.device import DeviceError
from tests.support.fake_cuda import FakeCuda
from tests.support.transfer_ends import (
    CALM,
    LAYOUT,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    with_planes,
)

pytestmark = pytest.mark.integration

CONFIG = with_planes(CALM, "memfd", "cuda_ipc", "zmq")
NUM_TOKENS = 200  # twelve blocks and a tail


class Pair:
    """Two ends on fake devices. What prefill has on its device its mirror has no more."""

    def __init__(
        self, tmp_path: Path, layout: KvLayout = LAYOUT, ours: FakeCuda | None = None
    ) -> None:
        self.theirs, self.ours = FakeCuda(), ours or FakeCuda(b"pool-1")
        self.theirs.own(64, LAYOUT.block_bytes)
        self.prefill = make_prefill(tmp_path, CONFIG, device=self.theirs)
        self.decode = make_decode(CONFIG, layout=layout, device=self.ours)

    def seal_all(self, key: str) -> tuple[bytes, Offer]:
        """Offer a prompt that is computed; only the tail is in the mirror too."""
        ticket, offer = self.prefill.offer(key, NUM_TOKENS)
        full = self.prefill.seal(key, 0, 12)
        self.prefill.finish(key, NUM_TOKENS)
        lent = self.prefill.lent[key]
        self.theirs.blocks[lent] = self.prefill.memory.blocks[lent]
        self.prefill.memory.blocks[full] = 0xEE
        return ticket, offer

    def stop(self) -> None:
        self.decode.stop()
        self.prefill.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.stop()


def test_blocks_come_from_the_device_and_are_verified(pair: Pair) -> None:
    ticket, offer = pair.seal_all("k")
    blocks = pair.decode.receive("k", ticket, offer)
    ready = pair.decode.events.wait("k")
    assert isinstance(ready, SinkReady), ready
    assert ready.stats.plane == "cuda_ipc"
    assert pair.decode.sink.planes() == {"prefill-0": "cuda_ipc"}
    for sent, got in zip(pair.prefill.lent["k"], blocks, strict=True):
        assert got is not None
        assert np.array_equal(pair.decode.memory.blocks[got], pair.theirs.blocks[sent])
    for sent, got in zip(pair.prefill.lent["k"][:12], blocks[:12], strict=True):
        assert got is not None
        digests = block_digests(LAYOUT, pair.theirs.blocks[sent])
        assert np.array_equal(pair.decode.memory.digests[got], digests)
    assert outcome(pair.prefill.events.wait("k")) == "done"
    assert pair.decode.sink.counters.plane_fallbacks == 0


def test_a_pool_of_another_dtype_is_converted(tmp_path: Path) -> None:
    layout = replace(LAYOUT, kv_dtype="bfloat16")
    pair = Pair(tmp_path, layout)
    try:
        rng = np.random.default_rng(3)
        _numbers(pair, rng)
        ticket, offer = pair.seal_all("k")
        blocks = pair.decode.receive("k", ticket, offer)
        ready = pair.decode.events.wait("k")
        assert isinstance(ready, SinkReady), ready
        assert ready.stats.plane == "cuda_ipc"
        expected = np.zeros(layout.block_bytes, np.uint8)
        for sent, got in zip(pair.prefill.lent["k"][:12], blocks[:12], strict=True):
            assert got is not None
            stored = pair.theirs.blocks[sent]
            convert_part(LAYOUT, stored, whole(LAYOUT), layout, expected, whole(layout))
            assert np.array_equal(pair.decode.memory.blocks[got], expected)
    finally:
        pair.stop()


def _numbers(pair: Pair, rng: np.random.Generator) -> None:
    """Let blocks hold numbers: random bytes may be NaN."""

    def write(block: BlockId) -> None:
        memory = pair.prefill.memory
        memory.gens[block] += 1
        memory.blocks[block] = rng.random(LAYOUT.block_bytes // 4, np.float32).view(np.uint8)
        memory.digests[block] = block_digests(LAYOUT, memory.blocks[block])
        memory.gens[block] += 1

    pair.prefill.write_block = write  # type: ignore[method-assign]


def test_a_block_that_is_written_while_it_is_copied_is_not_accepted(pair: Pair) -> None:
    """The generation on the host speaks for memory on the device."""
    ticket, offer = pair.seal_all("k")
    gens = pair.prefill.memory.gens
    first = pair.prefill.lent["k"][0]

    def reuse() -> None:
        gens[first] += 1  # odd from here on, as when another request gets the block

    pair.ours.before_copy = reuse
    pair.decode.receive("k", ticket, offer)
    failed = pair.decode.events.wait("k")
    assert outcome(failed) == "handoff_failed"
    assert pair.decode.sink.counters.integrity_errors > 0


def test_a_device_that_fails_while_copying_gives_no_block(pair: Pair) -> None:
    ticket, offer = pair.seal_all("k")

    def fail() -> None:
        raise DeviceError("the owner is gone")

    pair.ours.before_copy = fail
    pair.decode.receive("k", ticket, offer)
    assert outcome(pair.decode.events.wait("k")) == "handoff_failed"
    assert pair.decode.sink.counters.blocks == 0
    assert outcome(pair.prefill.events.wait("k")) == "aborted"


def test_a_pool_that_cannot_be_opened_is_pulled_over_zmq_and_not_silently(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ours=FakeCuda(b"pool-1", refusal="no peer access"))
    try:
        ticket, offer = pair.prefill.offer_all("k", NUM_TOKENS)
        blocks = pair.decode.receive("k", ticket, offer)
        ready = pair.decode.events.wait("k")
        assert isinstance(ready, SinkReady), ready
        assert ready.stats.plane == "zmq"
        assert same_content(pair.prefill, "k", pair.decode, blocks, NUM_TOKENS % 16)
        assert pair.decode.sink.counters.plane_fallbacks == 1
    finally:
        pair.stop()
