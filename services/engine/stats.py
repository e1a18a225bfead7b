"""What an engine learns of itself: rates, step times, output lengths. Pure."""

from __future__ import annotations

from collections import deque

from services.common.decayed import Ewma

_WARMUP_STEPS = 2  # first steps compile, fault pages in and fill caches: no measure of anything
_ALPHA = 0.2
_FORGET = 0.98  # weight of a step against the one after it, in the line fit
_SAME_CHUNKS = 8  # so many of one size in a row and the next one is longer
_MIN_PREFILL_TOKENS = 8  # smaller chunks measure the step's fixed cost
_LENGTHS_KEPT = 256
_LENGTHS_MIN = 16
_LENGTH_QUANTILE = 0.7
_UNKNOWN_LENGTH = 64


class LineFit:
    """Least squares y = a + b x over recent samples, older ones weigh less; b is never negative."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # w, wx, wy, wxx, wxy

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Take one sample."""
        new = (weight, weight * x, weight * y, weight * x * x, weight * x * y)
        self._sums = [old * _FORGET + value for old, value in zip(self._sums, new, strict=True)]

    def line(self) -> tuple[float, float]:
        """Return (a, b); (0, 0) before the first sample."""
        w, wx, wy, wxx, wxy = self._sums
        if not w:
            return 0.0, 0.0
        spread = w * wxx - wx * wx
        slope = (w * wxy - wx * wy) / spread if spread > 1e-9 * w * wxx else 0.0
        slope = max(slope, 0.0)
        return max((wy - slope * wx) / w, 0.0), slope


class EngineStats:
    """Running estimates from finished steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.preemptions = 0
        self.prefill_tokens = 0  # of the steps that count
        self.decode_tokens = 0
        self.busy_s = 0.0
        self.attach_moved = 0  # blocks
        self.attach_changed = 0  # sequences
        self.unpinned = 0  # blocks a hand-off gave back before its end
        self._prefill_rate = Ewma(_ALPHA)
        self._prefill_s = LineFit()
        self._chunk_sizes: deque[int] = deque(maxlen=_SAME_CHUNKS)
        self._step_s = Ewma(_ALPHA)
        self._decode_us = LineFit()
        self._lengths: deque[int] = deque(maxlen=_LENGTHS_KEPT)
        self._usual_length = _UNKNOWN_LENGTH

    def step_done(
        self, *, elapsed_s: float, num_prefill: int, num_decode: int, resident_tokens: int
    ) -> None:
        """Learn from one step of `num_prefill` prompt tokens and `num_decode` decodes."""
        self.steps += 1
        if self.steps <= _WARMUP_STEPS or elapsed_s <= 0:
            return
        self.prefill_tokens += num_prefill
        self.decode_tokens += num_decode
        self.busy_s += elapsed_s
        self._step_s.add(elapsed_s)
        if not num_prefill:
            self._decode_us.add(float(resident_tokens), elapsed_s * 1e6)
        elif num_prefill >= _MIN_PREFILL_TOKENS:
            # What decodes of the same step cost is known from steps without prefill.
            a, b = self._decode_us.line() if num_decode else (0.0, 0.0)
            own_s = max(elapsed_s - (a + b * resident_tokens) / 1e6, 0.2 * elapsed_s)
            self._prefill_rate.add(num_prefill / own_s)
            # Weighted so that relative errors count: else one large chunk in a slow moment, far
            # from all others, would set the slope for a thousand steps.
            self._prefill_s.add(float(num_prefill), own_s, own_s**-2)
            self._chunk_sizes.append(num_prefill)

    def ended(self, num_generated: int) -> None:
        """Learn one output length."""
        self._lengths.append(num_generated)
        if len(self._lengths) >= _LENGTHS_MIN:
            ordered = sorted(self._lengths)
            self._usual_length = ordered[int(_LENGTH_QUANTILE * (len(ordered) - 1))]

    @property
    def prefill_tok_s(self) -> float | None:
        """Observed prefill rate; None until it is known."""
        return self._prefill_rate.value

    def chunk_tokens(self, target_s: float) -> float | None:
        """Prompt tokens that take about `target_s`; None until a rate is known.

        Where the cost of a step that no token changes is above half the target, chunks by rate
        alone would shrink to nothing: smaller ones have a lower rate. There a chunk may cost as
        much again as the fixed part, approached in steps of four so that a bad fit does little.
        Chunks of one size say nothing about the fixed part, so now and then one is twice as long.
        """
        rate = self._prefill_rate.value
        if rate is None:
            return None
        by_rate = rate * target_s
        sizes = self._chunk_sizes
        if len(sizes) == _SAME_CHUNKS and max(sizes) == min(sizes):
            return 2 * max(by_rate, sizes[0])  # to tell fixed cost from cost per token again
        fixed_s, token_s = self._prefill_s.line()
        if token_s <= 0 or fixed_s <= target_s / 2:
            return by_rate
        return min(max(by_rate, fixed_s / token_s), 4 * by_rate)

    @property
    def step_s(self) -> float | None:
        """Usual time of a step; None until it is known."""
        return self._step_s.value

    def predicted_s(self, num_prefill: int, resident_tokens: int) -> float:
        """Time a step of so many prompt tokens should take; 0 until a rate is known."""
        a, b = self._decode_us.line()
        rate = self._prefill_rate.value
        prefill_s = num_prefill / rate if rate else 0.0
        return prefill_s + (a + b * resident_tokens) / 1e6

    def decode_line_us(self) -> tuple[float, float]:
        """Time of a decode step: a + b x resident tokens, microseconds."""
        return self._decode_us.line()

    def expected_length(self, max_tokens: int) -> int:
        """Output tokens to make room for: a quantile of what was seen, at most max_tokens."""
        return min(max_tokens, self._usual_length)
