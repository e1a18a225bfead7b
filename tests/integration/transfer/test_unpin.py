"""Blocks that were pulled go back before the transfer ends, over real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.transfer.api import SinkReady, SourceReleased, SourceUnpinned
from tests.support.transfer_ends import (
    CALM,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    wait_until,
    with_planes,
)

pytestmark = pytest.mark.integration

NUM_TOKENS = 20 * 16 + 5
MAX_TRIES = 10  # on a busy machine all may have crossed before ZMQ lets go of the last message


def _has_all(decode: DecodeEnd, blocks: Sequence[int], wanted: list[bytes]) -> bool:
    return [decode.memory.blocks[block].tobytes() for block in blocks] == wanted


def _pulled(prefill: PrefillEnd, key: str) -> set[int]:
    offered = prefill.source._offers.by_key(key)
    return set() if offered is None else offered.machine._pulled


def _reuse(prefill: PrefillEnd, event: SourceUnpinned) -> None:
    """Another request gets the blocks at once."""
    for block in event.block_ids:
        prefill.write_block(block)


def _unpinned_early(prefill: PrefillEnd, decode: DecodeEnd, key: str) -> list[int]:
    """Hand a prompt over; return the blocks that came back before its end, written anew at once."""
    ticket, offer = prefill.offer(key, NUM_TOKENS)
    reserved = decode.receive(key, ticket, offer)
    blocks = [block for block in reserved if block is not None]
    lent = prefill.seal(key, 0, 12)
    wanted = prefill.content(key)
    wait_until(lambda: _has_all(decode, blocks[:12], wanted))
    # PULLED is said a moment after the copy; FINAL must not overtake it here.
    wait_until(lambda: len(_pulled(prefill, key)) == 12)
    prefill.source.unpin(key)
    lent += prefill.seal(key, 12, 8)
    wanted = prefill.content(key)
    prefill.finish(key, NUM_TOKENS)
    first = prefill.events.wait(key)
    if isinstance(first, SourceUnpinned):
        _reuse(prefill, first)
    ready = decode.events.wait(key)
    assert isinstance(ready, SinkReady), ready
    assert _has_all(decode, blocks[:20], wanted)
    wait_until(lambda: isinstance(prefill.events.of(key)[-1], SourceReleased))
    *unpinned, released = prefill.events.of(key)
    assert released.outcome == "done"
    given = [block for event in unpinned for block in event.block_ids]
    assert len(given) == len(set(given))
    assert set(given) <= set(lent)
    decode.free += blocks
    prefill.free += prefill.lent.pop(key)
    return given


@pytest.mark.parametrize("plane", ["memfd", "nccl", "zmq"])
def test_pulled_blocks_are_reused_while_the_rest_crosses(plane: str, tmp_path: Path) -> None:
    config = with_planes(CALM, plane)
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        given: list[int] = []
        for number in range(MAX_TRIES):
            given += _unpinned_early(prefill, decode, f"p{number}")
            if given:
                break
        assert len(given) >= 12
        assert prefill.source.counters.unpinned == len(given)
    finally:
        decode.stop()
        prefill.stop()
