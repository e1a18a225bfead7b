"""Incremental detokenizing on bytes: a character is given out when its last byte has come."""

from __future__ import annotations

import codecs
from typing import Protocol

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class SupportsTextBytes(Protocol):
    """What detokenizing needs of a TextModel."""

    def text_bytes(self, token_id: int) -> bytes:
        """Give the bytes a token adds to an answer; none for special tokens."""
        ...


class Detokenizer:
    """Turns one choice's ids into text. Only bytes that can never be UTF-8 become U+FFFD."""

    def __init__(self, text_model: SupportsTextBytes) -> None:
        self._text_model = text_model
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """Add a token; give the characters it completes."""
        return self._decoder.decode(self._text_model.text_bytes(token_id))

    def finish(self) -> str:
        """Give what is left: one U+FFFD if the last character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)
