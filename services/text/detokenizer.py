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

    def whole_text(self, token_id: int) -> str | None:
        """Give the same as text; None where they begin or end within a character."""
        ...


def whole_text(raw: bytes) -> str | None:
    """Give the text of bytes that are UTF-8 by themselves, else None."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """Turns one choice's ids into text. Only bytes that can never be UTF-8 become U+FFFD."""

    def __init__(self, text_model: SupportsTextBytes) -> None:
        self._text_model = text_model
        self._decoder = _Utf8Decoder(errors="replace")
        self.is_within = False  # the bytes so far end within a character

    def push(self, token_id: int) -> str:
        """Add a token; give the characters it completes."""
        if not self.is_within:
            text = self._text_model.whole_text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._text_model.text_bytes(token_id))
        self.is_within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Give what is left: one U+FFFD if the last character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)
