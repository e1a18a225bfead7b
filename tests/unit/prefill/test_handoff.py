"""With one token left nothing is handed off (RB-071)."""

from __future__ import annotations

from services.common.sampling import SamplingParams
from services.engine.api import WorkKind
from services.prefill.handoff import plan_prefill


def test_single_token_requests_stay() -> None:
    assert plan_prefill(SamplingParams(max_tokens=1)).kind is WorkKind.WHOLE


def test_longer_requests_are_handed_off() -> None:
    assert plan_prefill(SamplingParams(max_tokens=2)).kind is WorkKind.PREFILL
