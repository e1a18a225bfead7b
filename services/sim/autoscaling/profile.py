"""What one replica carries within an SLO, looked up in a performance model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.sim.performance import PerformanceModel


@dataclass(frozen=True, slots=True)
class Profile:
    """What one replica does, looked up in a performance model as in measured curves."""

    model: PerformanceModel

    def ttft_s(self, isl: float) -> float:
        """Return the time of one prompt alone."""
        return self.model.prefill_s(max(1, round(isl)), 0)

    def prefill_tokens_s(self, isl: float) -> float:
        """Return how many tokens of such prompts are computed a second."""
        return max(1, round(isl)) / self.ttft_s(isl)

    def itl_s(self, num_answers: float, context: float) -> float:
        """Return the gap between tokens with so many answers at once."""
        return self.model.decode_s(max(1, round(num_answers)), num_answers * context)

    def decode_tokens_s(self, itl_s: float, context: float) -> float:
        """Return the most tokens a second with gaps up to `itl_s`; with one answer, if none can."""
        pace = self.model.decode
        each_s = pace.request_s + pace.token_s * context
        most = min(pace.max_batch, int(self.model.kv_tokens / max(1.0, context)))
        fit = most if each_s <= 0 else int((itl_s - pace.fixed_s) / each_s)
        num_answers = max(1, min(most, fit))
        return num_answers / self.itl_s(num_answers, context)
