"""Stop strings: find the first match however the text is cut, leak no part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """What a piece of text made of the state: text free to go, and the stop string, if met."""

    text: str
    stop: str | None = None


class StopStrings:
    """Searches several stop strings at once, one Knuth-Morris-Pratt automaton each.

    The match that is complete first wins; of those that end together, the longest. So the
    result does not depend on how the text is split. Held-back text is never longer than the
    longest stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Longest first: of two matches that end together the scan then meets the longer first.
        self._patterns = [
            (text, _failure_table(text)) for text in sorted(set(stop), key=lambda s: (-len(s), s))
        ]
        self._first_chars = frozenset(text[0] for text, _ in self._patterns)
        self._matched = [0] * len(self._patterns)  # length of the prefix that fits, per pattern
        self._held = ""
        self._is_done = False

    def push(self, text: str) -> StopScan:
        """Take new text; give what can no longer be part of a stop string."""
        if self._is_done:
            return StopScan("")
        if not self._held and self._first_chars.isdisjoint(text):
            return StopScan(text)
        start = len(self._held)
        pending = self._held + text
        for index in range(start, len(pending)):
            stop = self._advance(pending[index])
            if stop is not None:
                self._is_done = True
                self._held = ""
                return StopScan(pending[: index + 1 - len(stop)], stop)
        num_held = max(self._matched, default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return StopScan(pending[:cut])

    def finish(self) -> str:
        """Give the text held back; nothing more will come to complete a match."""
        held, self._held = self._held, ""
        self._is_done = True
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; give the stop string that is now complete."""
        complete = None
        for position, (text, failure) in enumerate(self._patterns):
            length = self._matched[position]
            while length and text[length] != char:
                length = failure[length - 1]
            if text[length] == char:
                length += 1
            if length == len(text):
                complete = complete or text
                length = failure[length - 1]
            self._matched[position] = length
        return complete


def _failure_table(text: str) -> list[int]:
    """For each prefix: length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
