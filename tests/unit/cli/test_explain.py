"""The lines of `isthmus explain`."""

from __future__ import annotations

from services.cli.explain import explain_lines
from services.pb import admin_pb2


def test_every_candidate_is_shown_with_what_it_would_have_cost_more() -> None:
    report = admin_pb2.ExplainRequestResponse(
        request_id="r1", router_id="router-0", outcome="ok", model="toy", tenant="acme",
        prompt_tokens=100, cached_tokens=64, completion_tokens=8, ttft_us=5_000, e2e_us=9_000,
        choices=[
            admin_pb2.Choice(
                mode="REMOTE", worker_id="p0", reason="cheapest",
                candidates=[
                    admin_pb2.Candidate(
                        worker_id="p0", cost_s=0.010,
                        terms={"uncached_tokens": 36, "queue_s": 0.002},
                    ),
                    admin_pb2.Candidate(worker_id="p1", cost_s=0.025, facts={"fits": "false"}),
                ],
            )
        ],
        ttft_stages=[admin_pb2.Stage(name="router", us=1_000),
                     admin_pb2.Stage(name="prefill", us=4_000)],
        stages=[admin_pb2.Stage(name="decode", us=9_000)],
    )  # fmt: skip
    lines = list(explain_lines(report))
    assert lines[0] == "r1: ok, model toy, tenant acme, router-0"
    assert "100 prompt tokens (64 cached), 8 tokens out" in lines[1]
    at = lines.index("1. p0, mode REMOTE: cheapest")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["worker", "cost", "more", "made", "of"],
        ["p0", "10.000", "ms", "chosen", "queue", "2.000", "ms,", "uncached_tokens", "36"],
        ["p1", "25.000", "ms", "+15.000", "ms", "fits", "false"],
    ]
    first = lines.index("time to first token: 5.000 ms")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["router", "1.000", "ms", "20.0%"],
        ["prefill", "4.000", "ms", "80.0%"],
        ["sum", "5.000", "ms", "100.0%"],
    ]
    assert "whole request: 9.000 ms" in lines


def test_request_that_failed_before_a_choice_says_why() -> None:
    report = admin_pb2.ExplainRequestResponse(
        request_id="r1", outcome="overloaded", message="4096 requests are open in this router"
    )
    lines = list(explain_lines(report))
    assert lines[1] == "4096 requests are open in this router"
    assert len(lines) == 3
