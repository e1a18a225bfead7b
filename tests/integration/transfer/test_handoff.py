"""Whole handoffs between real threads over both planes, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import RequestError
from services.common.ids import BlockHash
from services.transfer.api import SinkReady
from services.transfer.config import TransferConfig
from services.transfer.ticket import TicketSigner, read_unverified
from tests.support.transfer_ends import (
    FAST,
    IDENTITY,
    LAYOUT,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    with_planes,
)

pytestmark = pytest.mark.integration

Maker = Callable[..., DecodeEnd]


@pytest.fixture(params=["memfd", "zmq"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return with_planes(FAST, request.param)


@pytest.fixture
def prefill(config: TransferConfig, tmp_path: Path) -> Iterator[PrefillEnd]:
    end = make_prefill(tmp_path, config)
    yield end
    end.stop()
    assert not end.source.is_alive()


@pytest.fixture
def decode(config: TransferConfig) -> Iterator[DecodeEnd]:
    end = make_decode(config)
    yield end
    end.stop()
    assert not end.sink.is_alive()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160, 400])
def test_delivers_exactly_the_prefills_blocks_and_first_tokens(
    prefill: PrefillEnd, decode: DecodeEnd, config: TransferConfig, num_tokens: int
) -> None:
    ticket, offer = prefill.offer_all("p", num_tokens)
    blocks = decode.receive("d", ticket, offer)
    ready = decode.events.wait("d")
    released = prefill.events.wait("p")

    assert isinstance(ready, SinkReady), ready
    assert released.outcome == "done"
    assert same_content(prefill, "p", decode, blocks, num_tokens % 16)
    first = ready.final.first
    assert [(f.choice, f.token_id, f.logprob) for f in first] == [(0, 42, -0.5), (1, 43, None)]
    assert first[0].top == ((42, -0.5), (7, -1.5))
    assert (ready.final.num_tokens, ready.final.tail_block) == (num_tokens, None)
    assert ready.final.prefill_us == 1234
    assert ready.stats.plane == released.stats.plane == config.planes[0]
    assert ready.stats.peer == "prefill-0"
    assert released.stats.peer == "decode-0"
    assert ready.stats.blocks_moved == released.stats.blocks_moved == len(blocks)
    assert ready.stats.size_bytes == len(blocks) * LAYOUT.block_bytes
    assert ready.stats.open_us > 0
    assert decode.sink.planes() == {"prefill-0": config.planes[0]}
    assert prefill.source.num_open() == decode.sink.num_open() == 0
    full = num_tokens // 16
    sent, got = prefill.lent["p"][:full], blocks[:full]
    assert np.array_equal(prefill.memory.digests[sent], decode.memory.digests[got])
