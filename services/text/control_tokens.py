"""Keeps control tokens that a client wrote into its messages from being read as the model's own.

The text `<|im_end|>` in a message would end the message for the model, and what follows could
pose as another role. A marker character put inside such text keeps the tokenizer from seeing the
control token; the tokens of the marker are taken out again, so that the model reads the same
characters as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Code points that Unicode reserves for use inside a program: never part of real text.
_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ControlTokenGuard:
    """Breaks the control tokens of one model in texts that are not the template's. Pure."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        # One character cannot be broken; longest first, for one token may begin like another.
        breakable = sorted({t for t in control_tokens if len(t) > 1}, key=len, reverse=True)
        pattern = "|".join(map(re.escape, breakable))
        self._pattern = re.compile(pattern) if pattern else None

    def is_any_in(self, texts: Iterable[str]) -> bool:
        """Say whether a control token stands in one of the texts."""
        return self._pattern is not None and any(map(self._pattern.search, texts))

    def guard(self, texts: Sequence[str]) -> tuple[list[str], str]:
        """Return the texts with a marker inside each control token, and the marker ("" if none).

        Raises:
            ValueError: the texts hold every marker there is.
        """
        pattern = self._pattern
        if pattern is None or not self.is_any_in(texts):
            return list(texts), ""
        marker = next((m for m in _MARKERS if not any(m in text for text in texts)), None)
        if marker is None:
            raise ValueError("the texts hold every reserved character")
        return [pattern.sub(lambda found: _broken(found[0], marker), t) for t in texts], marker


def _broken(token: str, marker: str) -> str:
    # Between all characters: whatever lies within a control token may be one as well.
    return marker.join(token)


def without_marker(
    text: str, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]], marker: str
) -> list[int]:
    """Take out the tokens that stand for the marker.

    Args:
        offsets: per token, the characters of `text` it stands for.

    Raises:
        ValueError: a token stands for the marker and for other text.
    """
    kept: list[int] = []
    for token_id, (start, end) in zip(token_ids, offsets, strict=True):
        part = text[start:end]
        if marker not in part:
            kept.append(token_id)
        elif part.strip(marker):
            raise ValueError("a token spans the marker")
    return kept
