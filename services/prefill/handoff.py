"""When a prefill worker hands a request off, and when it keeps it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.sampling import SamplingParams
from services.engine.api import WorkKind


@dataclass(frozen=True, slots=True)
class HandoffDecision:
    """What to do with a work item that asks for prefill-then-hand-off."""

    kind: WorkKind
    reason: str


def plan_prefill(sampling: SamplingParams) -> HandoffDecision:
    """Keep requests that want a single token: with one token left nothing is handed off."""
    if sampling.max_tokens <= 1:
        return HandoffDecision(WorkKind.WHOLE, "one_token_left")
    return HandoffDecision(WorkKind.PREFILL, "more_tokens_wanted")
