"""Sampling parameters as values, shared by front doors, router and engine."""

from __future__ import annotations

from services.common.light_value import light_value


@light_value
class SamplingParams:
    """How the next token is drawn. Defaults follow the OpenAI API.

    `seed` is always set by the time a work item leaves the router: a request without one
    gets a random seed, so that every retry and every worker draws the same tokens.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 1  # per choice
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        """True when no randomness is used."""
        return self.temperature == 0.0
