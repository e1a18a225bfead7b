"""How long answers have been lately, by what their requests allowed. Pure."""

from __future__ import annotations

from services.common.decayed import DecayedSums

_TAU_S = 600.0
_PRIOR_ANSWERS = 8.0  # so many answers weigh as much as what is usual
_MAX_OCTAVES = 32


class OutputLengths:
    """Mean answers of one router, apart for limits that differ by a factor of two.

    An answer that a limit cut says little of requests with a greater one.
    """

    def __init__(self, usual_tokens: int) -> None:
        self._usual = usual_tokens
        self._sums: dict[int, DecayedSums] = {}  # by octave of max_tokens: answers, tokens

    def note(self, max_tokens: int, num_tokens: int, now: float) -> None:
        """Learn of a whole answer."""
        octave = _octave(max_tokens)
        sums = self._sums.get(octave)
        if sums is None:
            sums = self._sums[octave] = DecayedSums(2, _TAU_S)
        sums.add(now, 1.0, num_tokens)

    def expected(self, max_tokens: int) -> int:
        """Guess the tokens of an answer; what is usual counts for less with each one seen."""
        sums = self._sums.get(_octave(max_tokens))
        answers, tokens = sums.values if sums is not None else (0.0, 0.0)
        usual = min(self._usual, max_tokens)
        mean = (tokens + _PRIOR_ANSWERS * usual) / (answers + _PRIOR_ANSWERS)
        return max(1, min(max_tokens, round(mean)))


def _octave(max_tokens: int) -> int:
    return min(_MAX_OCTAVES, max_tokens.bit_length())
