"""Text of one choice: ids in, text out that may be shown, with stop strings watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.text.detokenizer import Detokenizer, SupportsTextBytes
from services.text.stop_strings import StopStrings


class TextDelta(NamedTuple):
    """Text that may go out now, and what happened to the tokens that were pushed.

    `num_tokens` counts those that belong to the answer: all, or up to and including the one
    that completed the stop string; what a worker made beyond it is neither sent nor billed.
    """

    text: str
    stop: str | None = None
    num_tokens: int = 0


class ChoiceText:
    """Text state of one choice; lives with the logical request."""

    def __init__(
        self, text_model: SupportsTextBytes, stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        """`min_tokens`: stop strings are not looked for before that many tokens."""
        self._detokenizer = Detokenizer(text_model)
        self._stop_strings = StopStrings(stop)
        self._has_stop = bool(stop)
        self._num_free = min_tokens
        self._is_stopped = False

    @property
    def is_plain(self) -> bool:
        """Whether the text of the next token goes out as it is, if it has one of its own."""
        return not self._has_stop and not self._detokenizer.is_within

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add generated ids in order."""
        if not self._has_stop:
            push = self._detokenizer.push
            text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
            return TextDelta(text, None, len(token_ids))
        pieces: list[str] = []
        for position, token_id in enumerate(token_ids):
            if self._is_stopped:
                return TextDelta("".join(pieces), None, position)
            text = self._detokenizer.push(token_id)
            if self._num_free > 0:
                self._num_free -= 1
                pieces.append(text)
                continue
            if not text:
                continue
            scan = self._stop_strings.push(text)
            pieces.append(scan.text)
            if scan.stop is not None:
                self._is_stopped = True
                return TextDelta("".join(pieces), scan.stop, position + 1)
        return TextDelta("".join(pieces), None, len(token_ids))

    def finish(self) -> TextDelta:
        """Release what is held back; call it once, when no more ids will come."""
        if self._is_stopped:
            return TextDelta("")
        scan = self._stop_strings.push(self._detokenizer.finish())
        self._is_stopped = scan.stop is not None
        return TextDelta(scan.text + self._stop_strings.finish(), scan.stop)
