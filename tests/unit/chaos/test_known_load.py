"""The judge of a campaign: what it counts as wrong, hung or answered."""

from __future__ import annotations

import pytest

from services.chaos.client import Heard
from services.chaos.known_load import GRACE_S, Body, Findings, wrong_tokens

EXPECTED = {0: [1, 2, 3], 1: [4, 5, 6]}
BODY = Body(max_tokens=3, n=2, timeout_ms=1000)


def judged(heard: Heard, *, was_cancelled: bool = False) -> Findings:
    findings = Findings()
    is_whole = not was_cancelled and not heard.code
    wrong = wrong_tokens(EXPECTED, heard.token_ids, is_whole=is_whole)
    findings.judge(BODY, wrong, heard, was_cancelled=was_cancelled)
    return findings


def test_counts_a_right_answer() -> None:
    findings = judged(Heard(token_ids={0: [1, 2, 3], 1: [4, 5, 6]}, took_s=0.5))
    assert (findings.num_answered, findings.num_wrong, findings.num_hung) == (1, 0, 0)


@pytest.mark.parametrize(
    "tokens", [{0: [1, 2, 9], 1: [4, 5, 6]}, {0: [1, 2], 1: [4, 5, 6]}, {0: [1, 2, 3]}, {}]
)
def test_an_answer_must_be_whole_and_right(tokens: dict[int, list[int]]) -> None:
    assert judged(Heard(token_ids=tokens)).num_wrong == 1


@pytest.mark.parametrize(("tokens", "num_wrong"), [({0: [1]}, 0), ({}, 0), ({1: [4, 9]}, 1)])
def test_what_came_before_an_error_or_a_cancel_must_be_right(
    tokens: dict[int, list[int]], num_wrong: int
) -> None:
    for findings in (
        judged(Heard(token_ids=tokens, code="worker_lost")),
        judged(Heard(token_ids=tokens), was_cancelled=True),
    ):
        assert findings.num_wrong == num_wrong
        assert findings.num_answered == 0


def test_a_call_past_its_deadline_has_hung_whatever_it_ended_with() -> None:
    late_s = 1.0 + GRACE_S / 2 + 0.1
    for heard in (Heard(token_ids=EXPECTED, took_s=late_s), Heard(code="deadline_exceeded")):
        heard.took_s = late_s
        assert judged(heard).num_hung == 1
