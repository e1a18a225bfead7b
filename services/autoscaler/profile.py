"""What one replica does by a stored performance model, for requests as they come. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.autoscaler.policy import PolicySpec, Role


class Profile(Protocol):
    """A performance model."""

    def prefill_tokens_s(self, isl: float) -> float:
        """Return how many tokens of prompts of this length are computed a second."""
        ...

    def decode_tokens_s(self, itl_s: float, context: float) -> float:
        """Return the most tokens a second with gaps up to `itl_s`."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of late, on average, in tokens."""

    prompt: float
    computed: float  # of a prompt: less what was cached
    answer: float


def profiled_tokens_s(
    profile: Profile, lengths: Lengths, spec: PolicySpec, role: Role
) -> float | None:
    """Return what a replica does within the SLO; None of decode where there is none."""
    if role is Role.PREFILL:
        return profile.prefill_tokens_s(lengths.computed)
    if spec.slo.itl is None:
        return None
    context = lengths.prompt + lengths.answer / 2
    return profile.decode_tokens_s(spec.slo.itl.target_milliseconds / 1000, context)
