"""Bytes of prompts: of the said length, shared where keys are, different where they are not."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.prompt_bytes import IdBytes, WordBytes
from loadtest.records import Piece

IDS = IdBytes(49_152)
BINARY, JSON, WORDS = IDS.binary(), IDS.json(), WordBytes()
TINY = IdBytes(260).binary()
KEYS = st.integers(0, (1 << 48) - 1)
PIECES = st.lists(st.builds(Piece, KEYS, st.integers(1, 700)), min_size=1, max_size=4)


def ids_of(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


@given(PIECES)
def test_all_forms_have_the_length_and_both_id_forms_are_equal(pieces: list[Piece]) -> None:
    num_tokens = sum(piece.num_tokens for piece in pieces)
    ids = ids_of(BINARY(pieces))

    assert len(ids) == num_tokens
    assert 100 <= min(ids) <= max(ids) < 49_152
    assert json.loads(JSON(pieces)) == ids
    assert len(WORDS.text(pieces).split()) == num_tokens


@given(KEYS, KEYS)
def test_keys_differ_within_a_block_of_tokens(a: int, b: int) -> None:
    for write in (BINARY, WORDS.text, TINY):
        assert (write([Piece(a, 16)]) == write([Piece(b, 16)])) == (a == b)


@given(KEYS, st.integers(1, 300), st.integers(1, 300))
def test_the_shorter_of_two_pieces_of_a_key_begins_the_longer(key: int, a: int, b: int) -> None:
    short, long = sorted((a, b))

    for write in (BINARY, WORDS.text):
        assert write([Piece(key, long)]).startswith(write([Piece(key, short)]))


def test_a_piece_may_be_longer_than_the_stream() -> None:
    ids = ids_of(BINARY([Piece(7, 300_000)]))

    assert len(ids) == 300_000
    assert len(set(ids[:1000])) > 900


def test_a_vocabulary_that_cannot_tell_prompts_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 1 tokens"):
        IdBytes(1)
