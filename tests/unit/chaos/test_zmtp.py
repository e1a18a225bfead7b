"""Splitting loses no byte, whatever the pieces, and gives up on what is not ZMTP."""

from __future__ import annotations

import random

import pytest

from services.chaos.zmtp import MessageSplitter, Unit

GREETING = bytes([0xFF, *bytes(8), 0x7F, 3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x05READY"
SHORT = b"\x00\x02ab"
MULTI = b"\x01\x01h" + b"\x03" + (300).to_bytes(8, "big") + bytes(300) + b"\x00\x00"
STREAM = GREETING + READY + SHORT + MULTI + SHORT


@pytest.mark.parametrize("seed", range(20))
def test_units_do_not_depend_on_how_the_bytes_arrive(seed: int) -> None:
    rng, splitter, units, at = random.Random(seed), MessageSplitter(), list[Unit](), 0
    while at < len(STREAM):
        size = rng.choice((1, 2, 9, 64, 400))
        units += splitter.feed(STREAM[at : at + size])
        at += size
    greeting = [unit for unit in units if not unit.is_message and unit.data != READY]
    assert b"".join(unit.data for unit in greeting) == GREETING
    assert units[len(greeting) :] == [
        Unit(READY, False),
        Unit(SHORT, True),
        Unit(MULTI, True),
        Unit(SHORT, True),
    ]


def test_passes_on_what_it_does_not_understand() -> None:
    splitter = MessageSplitter()
    splitter.feed(GREETING)
    assert splitter.feed(SHORT + b"\xf0garbage") == [Unit(SHORT, True), Unit(b"\xf0garbage", False)]
    assert splitter.feed(b"more") == [Unit(b"more", False)]
