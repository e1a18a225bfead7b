"""What a receive says of its numbers, and that blocks of two forms are never put together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.kv.form import EXACT, UNKNOWN
from services.transfer.api import Offer, SinkReady, SinkReleased
from tests.support.transfer_ends import (
    CALM,
    LAYOUT,
    DecodeEnd,
    PrefillEnd,
    hashes,
    make_decode,
    make_prefill,
    with_planes,
)

pytestmark = pytest.mark.integration

NUM_TOKENS = 6 * 16 + 5
INT8_WIRE = "float32>int8>float32"


def _receive(
    decode: DecodeEnd, key: str, ticket: bytes, offer: Offer, *, num_had: int = 0, form: str = EXACT
) -> SinkReady | SinkReleased:
    num_full = len(offer.block_hashes)
    have = tuple(index < num_had for index in range(num_full))
    decode.sink.open(key, ticket, 1, have, offer.block_hashes, "", form)
    decode.reserve(key, offer, have)
    event = decode.events.wait(key)
    assert isinstance(event, SinkReady | SinkReleased)
    return event


def _offer_inexact(prefill: PrefillEnd, key: str) -> tuple[bytes, Offer]:
    """Offer KV that came rounded itself, as a migrating request may have it."""
    num_full = NUM_TOKENS // 16
    offer = Offer(key, key, NUM_TOKENS, hashes(num_full), "tenant", is_exact=False)
    ticket = prefill.source.offer(offer)
    prefill.seal(key, 0, num_full)
    prefill.finish(key, NUM_TOKENS)
    return ticket, offer


def test_a_rounding_link_is_named_and_foretold(tmp_path: Path) -> None:
    config = replace(with_planes(CALM, "zmq"), wire_dtype="int8")
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer_all("a", NUM_TOKENS)
        assert decode.sink.form_of(ticket) == UNKNOWN, "the plane is not agreed yet"
        ready = _receive(decode, "a", ticket, offer)
        assert isinstance(ready, SinkReady)
        assert ready.kv_form == INT8_WIRE
        ticket, offer = prefill.offer_all("b", NUM_TOKENS, 1)
        assert decode.sink.form_of(ticket) == INT8_WIRE
        ready = _receive(decode, "b", ticket, offer, num_had=4, form=INT8_WIRE)
        assert isinstance(ready, SinkReady)
        assert (ready.kv_form, ready.stats.blocks_deduped) == (INT8_WIRE, 4)
    finally:
        decode.stop()
        prefill.stop()


def test_exact_blocks_are_not_completed_with_rounded_ones(tmp_path: Path) -> None:
    config = replace(with_planes(CALM, "zmq"), wire_dtype="int8")
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer_all("a", NUM_TOKENS)
        refused = _receive(decode, "a", ticket, offer, num_had=4, form=EXACT)
        assert isinstance(refused, SinkReleased)
        assert (refused.code, refused.can_recompute) == ("handoff_failed", True)
        assert "another form" in refused.message
        assert decode.sink.num_open() == 0
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize("plane", ["memfd", "zmq"])
@pytest.mark.parametrize(
    ("own", "form"),
    [("float32", EXACT), ("bfloat16", "float32>bfloat16"), ("int8", "float32>int8")],
)
def test_the_form_follows_the_pools(plane: str, own: str, form: str, tmp_path: Path) -> None:
    """Equal pools without a wire dtype are exact on every plane, and known at once."""
    config = with_planes(CALM, plane)
    prefill = make_prefill(tmp_path, config)
    decode = make_decode(config, layout=replace(LAYOUT, kv_dtype=own))
    try:
        ticket, offer = prefill.offer_all("a", NUM_TOKENS)
        assert decode.sink.form_of(ticket) == form
        ready = _receive(decode, "a", ticket, offer)
        assert isinstance(ready, SinkReady)
        assert ready.kv_form == form
    finally:
        decode.stop()
        prefill.stop()


def test_kv_that_was_rounded_before_stays_unknown(tmp_path: Path) -> None:
    prefill, decode = make_prefill(tmp_path), make_decode()
    try:
        ticket, offer = _offer_inexact(prefill, "a")
        assert decode.sink.form_of(ticket) == UNKNOWN
        assert decode.sink.form_of(b"no ticket") == UNKNOWN
        ready = _receive(decode, "a", ticket, offer)
        assert isinstance(ready, SinkReady)
        assert ready.kv_form == UNKNOWN
    finally:
        decode.stop()
        prefill.stop()
