"""Makes the bytes of prompts: token ids, the same as JSON, or words. Pure.

A piece is a cut of one long random stream, chosen by its key and led by the key itself, so that
no two keys give equal tokens. A cut costs a copy where drawing tokens would cost a client the
milliseconds it is to measure.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from loadtest.records import Piece

_STREAM_TOKENS = 1 << 17
_KEY_BITS = 48
_LOWEST_ID = 100  # below are the special tokens of most vocabularies
_STREAM_SEED = 20_26

# Four letters each, so that cuts need no search; one token each in most vocabularies.
_FOUR_LETTERS = """
    able army away baby back ball bank base bear beat been best bill bird blue boat
    body book born both call came camp card care case cast city club coat cold come
    cook cool copy cost crew dark data date days dead deal deep desk dish does done
    door down draw drop each east easy even ever face fact fall farm fast feel file
"""


class _Cuts:
    """Cuts of a stream of symbols, each of one width."""

    def __init__(self, symbols: Sequence[bytes], size: int = _STREAM_TOKENS) -> None:
        self._symbols = symbols
        self._width = len(symbols[0])
        self._size = size
        self._bits = len(symbols).bit_length() - 1  # of a key that one symbol can tell
        self._head = -(-_KEY_BITS // self._bits)
        rng = random.Random(_STREAM_SEED)
        self._stream = b"".join(rng.choices(symbols, k=size))

    def piece(self, piece: Piece) -> bytes:
        """Return the bytes of one piece."""
        key, num_tokens = piece.key, piece.num_tokens
        mask = (1 << self._bits) - 1
        head = [
            self._symbols[key >> self._bits * i & mask] for i in range(min(self._head, num_tokens))
        ]
        return b"".join(head) + self._cut(key % self._size, num_tokens - len(head))

    def _cut(self, start: int, num_tokens: int) -> bytes:
        parts = []
        while num_tokens > 0:
            taken = min(num_tokens, self._size - start)
            parts.append(self._stream[start * self._width : (start + taken) * self._width])
            num_tokens -= taken
            start = 0
        return b"".join(parts)


class IdBytes:
    """Prompts as token ids of a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        lowest = min(_LOWEST_ID, vocab_size // 4)
        ids = range(lowest, vocab_size)
        if len(ids) < 2:
            raise ValueError(f"a vocabulary of {vocab_size} tokens cannot tell prompts apart")
        self._ids = ids

    def binary(self) -> Callable[[Sequence[Piece]], bytes]:
        """Give a function that writes little-endian uint32."""
        cuts = _Cuts([struct.pack("<I", token) for token in self._ids])
        return lambda pieces: b"".join(map(cuts.piece, pieces))

    def json(self) -> Callable[[Sequence[Piece]], bytes]:
        """Give a function that writes a JSON list; blanks make all numbers one width."""
        width = len(str(self._ids[-1]))
        cuts = _Cuts([b"%*d," % (width, token) for token in self._ids])
        return lambda pieces: b"[%b]" % b"".join(map(cuts.piece, pieces))[:-1]


class WordBytes:
    """Prompts as words: about one token each, which only the server counts exactly."""

    def __init__(self) -> None:
        self._cuts = _Cuts([f"{word} ".encode() for word in _FOUR_LETTERS.split()])

    def text(self, pieces: Sequence[Piece]) -> bytes:
        """Return words and blanks; nothing in it needs escaping in JSON."""
        return b"".join(map(self._cuts.piece, pieces))
