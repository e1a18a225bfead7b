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


def _has_all(decode: DecodeEnd, blocks: Sequence[int], wanted: list[bytes]) -> bool:
    return [decode.memory.blocks[block].tobytes() for block in blocks] == wanted


def _pulled(prefill: PrefillEnd) -> set[int]:
    offered = prefill.source._offers.by_key("p")
    return set() if offered is None else offered.machine._pulled


def _reuse(prefill: PrefillEnd, event: SourceUnpinned) -> None:
    """Another request gets the blocks at once."""
    for block in event.block_ids:
        prefill.write_block(block)


@pytest.mark.parametrize("plane", ["memfd", "nccl", "zmq"])
def test_pulled_blocks_are_reused_while_the_rest_crosses(plane: str, tmp_path: Path) -> None:
    config = with_planes(CALM, plane)
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer("p", NUM_TOKENS)
        reserved = decode.receive("d", ticket, offer)
        blocks = [block for block in reserved if block is not None]
        lent = prefill.seal("p", 0, 12)
        wanted = prefill.content("p")
        wait_until(lambda: _has_all(decode, blocks[:12], wanted))
        # PULLED is said a moment after the copy; FINAL must not overtake it here.
        wait_until(lambda: len(_pulled(prefill)) == 12)
        prefill.source.unpin("p")
        lent += prefill.seal("p", 12, 8)
        wanted = prefill.content("p")
        prefill.finish("p", NUM_TOKENS)
        first = prefill.events.wait("p")
        assert isinstance(first, SourceUnpinned)
        _reuse(prefill, first)
        ready = decode.events.wait("d")
        assert isinstance(ready, SinkReady), ready
        assert _has_all(decode, blocks[:20], wanted)
        wait_until(lambda: isinstance(prefill.events.of("p")[-1], SourceReleased))
        *unpinned, released = prefill.events.of("p")
        assert released.outcome == "done"
        given = [block for event in unpinned for block in event.block_ids]
        assert len(given) == len(set(given)) >= 12
        assert set(given) <= set(lent)
        assert prefill.source.counters.unpinned == len(given)
    finally:
        decode.stop()
        prefill.stop()
