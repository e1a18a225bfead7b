"""A source that has learned what announcing costs holds short prompts back until their end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from services.transfer.announce import MIN_SAMPLES
from services.transfer.api import SinkReady
from services.transfer.config import TransferConfig
from services.transfer.sender import SenderTransfer
from tests.support.transfer_ends import (
    CALM,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
    with_planes,
)

pytestmark = pytest.mark.integration

NUM_BLOCKS = 5
NUM_TOKENS = NUM_BLOCKS * 16 + 3


def _hand_off(prefill: PrefillEnd, decode: DecodeEnd, key: str) -> SinkReady:
    """Hand a prompt off block by block, each sealed once the one before has arrived or is held."""
    ticket, offer = prefill.offer(key, NUM_TOKENS)
    blocks = decode.receive(key, ticket, offer)
    wait_until(lambda: _opened(prefill, key) is not None)
    machine = _opened(prefill, key)
    assert machine is not None
    for number in range(NUM_BLOCKS):
        prefill.seal(key, number, 1)
        wait_until(partial(_is_told, machine, number))
    prefill.finish(key, NUM_TOKENS)
    ready = decode.events.wait(key)
    assert isinstance(ready, SinkReady), ready
    assert same_content(prefill, key, decode, blocks, 3)
    released = prefill.events.wait(key)
    assert outcome(released) == "done"
    assert released.stats.single_shot == ready.stats.single_shot
    for block in blocks:
        assert block is not None
        decode.free.append(block)
    prefill.free += prefill.lent.pop(key)
    return ready


def _opened(prefill: PrefillEnd, key: str) -> SenderTransfer | None:
    offered = prefill.source._offers.by_key(key)
    return None if offered is None or offered.machine.owner is None else offered.machine


def _is_told(machine: SenderTransfer, index: int) -> bool:
    """Whether a block is held back, or has arrived."""
    if len(machine.block_ids) <= index or machine.plan is None:
        return False
    return machine.plan.is_single_shot or index in machine._pulled


def _pair(tmp_path: Path, config: TransferConfig) -> tuple[PrefillEnd, DecodeEnd]:
    return make_prefill(tmp_path, config), make_decode(config)


@pytest.mark.parametrize("plane", ["memfd", "zmq"])
def test_costs_are_learned_from_what_is_streamed(plane: str, tmp_path: Path) -> None:
    prefill, decode = _pair(tmp_path, with_planes(CALM, plane))
    try:
        for number in range(MIN_SAMPLES):
            ready = _hand_off(prefill, decode, f"learn-{number}")
            assert not ready.stats.single_shot
        wait_until(lambda: prefill.source._meter.costs(plane).announce_s is not None)
        costs = prefill.source._meter.costs(plane)
        assert costs.announce_s is not None
        assert 0 < costs.announce_s < 1.0
        assert costs.copy_s_per_byte is not None
        assert 0 < costs.copy_s_per_byte < 1e-4
        assert costs.chunk_blocks == 1.0
        assert prefill.source.counters.plans == {"costs_unknown": MIN_SAMPLES}
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize("plane", ["memfd", "zmq"])
def test_a_short_prompt_goes_in_one_shot_where_announcing_is_dear(
    plane: str, tmp_path: Path
) -> None:
    prefill, decode = _pair(tmp_path, with_planes(CALM, plane))
    try:
        meter = prefill.source._meter
        for _ in range(MIN_SAMPLES):
            # Whatever this machine measures: an announcement as dear as a second, copies free.
            meter.plane(plane).ready_s.add(1.0)
            meter.plane(plane).pulled_s.add(1.0)
            meter.note_chunk(1)
            meter.note_done(plane, 1, 1 << 30, 1e-6, 1.0)
        ready = _hand_off(prefill, decode, "d")
        assert ready.stats.single_shot
        assert prefill.source.counters.plans == {"costs_more": 1}
    finally:
        decode.stop()
        prefill.stop()


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    prefill, decode = _pair(tmp_path, replace(CALM, single_shot=False))
    try:
        assert not _hand_off(prefill, decode, "d").stats.single_shot
        assert prefill.source.counters.plans == {"off": 1}
    finally:
        decode.stop()
        prefill.stop()
