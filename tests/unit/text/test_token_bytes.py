"""Bytes of tokens for both kinds of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import ModelFileError
from services.text.token_bytes import TokenBytes, byte_level_alphabet

SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
ADDED = [
    {"id": 3, "content": "<|end|>", "special": True},
    {"id": 4, "content": "tool é", "special": False},
]


def make(decoder: Any, *tokens: str) -> TokenBytes:
    vocabulary = dict(enumerate(tokens))
    return TokenBytes.from_description({"decoder": decoder, "added_tokens": ADDED}, vocabulary.get)


def test_byte_level_alphabet_covers_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_byte_level_tokens_are_their_bytes() -> None:
    table = make({"type": "ByteLevel"}, "Ġhi", "Ã©", "ðŁĺ")
    assert [table.bytes_of(i) for i in range(3)] == [b" hi", "é".encode(), b"\xf0\x9f\x98"]


def test_added_tokens_are_literal_and_special_is_known() -> None:
    table = make({"type": "ByteLevel"}, "a")
    assert table.bytes_of(3) == b"<|end|>"
    assert table.bytes_of(4) == "tool é".encode()
    assert (table.is_special(3), table.is_special(4)) == (True, False)


def test_sentencepiece_tokens_with_byte_fallback() -> None:
    table = make(SENTENCEPIECE, "▁the", "<0xF0>", "日")
    assert [table.bytes_of(i) for i in range(3)] == [b" the", b"\xf0", "日".encode()]
    assert table.strip_start(b" the cat") == b"the cat"


@pytest.mark.parametrize("token_id", [-1, 99, 2**31 - 1, 2**32, 2**70])
def test_ids_without_a_token_have_no_bytes(token_id: int) -> None:
    assert make({"type": "ByteLevel"}, "a").bytes_of(token_id) == b""


def test_unknown_decoders_are_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="WordPiece"):
        make({"type": "WordPiece"})
