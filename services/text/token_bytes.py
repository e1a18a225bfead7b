"""The bytes behind token ids, for byte-level BPE and for SentencePiece-style vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from services.common.errors import ModelFileError

Spelling = Literal["byte_level", "sentencepiece"]

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Map the printable stand-ins of byte-level BPE back to the bytes they stand for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, got the code
    points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """Exact bytes of every token, worked out once per token and kept (size: the vocabulary)."""

    def __init__(
        self,
        spelling: Spelling,
        token_of: Callable[[int], str | None],
        added: dict[int, str],
        special_ids: frozenset[int],
        strips_start: bool = False,
    ) -> None:
        self._spelling = spelling
        self._token_of = token_of
        self._added = added
        self._special_ids = special_ids
        self._strips_start = strips_start
        self._alphabet = byte_level_alphabet()
        self._known: dict[int, bytes] = {}

    @staticmethod
    def from_description(
        description: dict[str, Any],  # parsed tokenizer.json
        token_of: Callable[[int], str | None],
    ) -> TokenBytes:
        """Find out from the file's `decoder` how its tokens are spelled."""
        kinds = _decoder_kinds(description.get("decoder"))
        spelling: Spelling
        if "ByteLevel" in kinds:
            spelling = "byte_level"
        elif kinds & {"ByteFallback", "Metaspace"} or _SPACE_MARK in kinds:
            spelling = "sentencepiece"
        else:
            raise ModelFileError(
                f"tokenizer decoder {sorted(kinds) or 'none'} is not supported; "
                "ByteLevel, ByteFallback and Metaspace are"
            )
        entries = description.get("added_tokens") or []
        added = {int(entry["id"]): str(entry["content"]) for entry in entries}
        special = frozenset(int(entry["id"]) for entry in entries if entry.get("special"))
        strips = spelling == "sentencepiece" and bool(kinds & {"Strip", "Metaspace"})
        return TokenBytes(spelling, token_of, added, special, strips)

    def bytes_of(self, token_id: int) -> bytes:
        """Give the token's bytes; an id no token has (padding rows) stands for nothing."""
        known = self._known.get(token_id)
        if known is None:
            known = self._spell(token_id)
            if known is None:
                return b""  # not kept: clients choose ids, the table must stay bounded
            self._known[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the token is marked special in the file."""
        return token_id in self._special_ids

    def special_texts(self) -> list[str]:
        """Return how the special tokens are written in text."""
        return [self._added[token_id] for token_id in sorted(self._special_ids)]

    def strip_start(self, raw: bytes) -> bytes:
        """Drop the one space SentencePiece puts before a whole text."""
        return raw[1:] if self._strips_start and raw.startswith(b" ") else raw

    def _spell(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._token_of(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return None
        if self._spelling == "sentencepiece":
            return _spell_sentencepiece(token)
        values = [self._alphabet.get(char) for char in token]
        if None in values:  # not written in the alphabet: a literal token
            return token.encode()
        return bytes(value for value in values if value is not None)


def _spell_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _decoder_kinds(decoder: Any) -> set[str]:  # JSON of a foreign file
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    if decoder.get("type") == "Replace" and _SPACE_MARK in _literal_pattern(decoder):
        kinds.add(_SPACE_MARK)
    for child in decoder.get("decoders") or []:
        kinds |= _decoder_kinds(child)
    return kinds


def _literal_pattern(decoder: dict[str, Any]) -> str:
    """Give the literal text a Replace decoder looks for, or nothing."""
    pattern = decoder.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
