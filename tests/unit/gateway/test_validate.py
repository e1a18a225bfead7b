"""Rules of a request, away from any door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.errors import RequestError
from services.common.ids import RequestId
from services.common.limits import Limits
from services.gateway.spec import GenerateSpec, TextInput, TokenInput
from services.gateway.validate import Arrival, build_call, check_spec, deadline_of
from services.router.api import GenerateCall, ServedModel

MODEL = ServedModel("m", 100, 50, "digest", (2,), 0)
SPEC = GenerateSpec(prompt=TextInput("hello"))
ARRIVAL = Arrival(RequestId("req-1"), received_at=1000.0, tenant="acme")


def build(
    spec: GenerateSpec, length: int, limits: Limits | None = None, **model: Any
) -> GenerateCall:
    token_ids = np.full(length, 7, dtype=np.uint32)
    served = replace(MODEL, **model)
    return build_call(spec, token_ids, ARRIVAL, limits or Limits(), served, lambda: 42)


def code_of(spec: GenerateSpec, length: int, **model: Any) -> str:
    with pytest.raises(RequestError) as caught:
        build(spec, length, **model)
    return caught.value.spec.code


def test_call_carries_what_arrived() -> None:
    call = build(replace(SPEC, max_tokens=5), 10)
    assert (call.request_id, call.tenant, call.model) == ("req-1", "acme", "m")
    assert (call.sampling.max_tokens, call.sampling.seed, call.sampling.n) == (5, 42, 1)
    assert (call.received_at, call.deadline) == (1000.0, 1600.0)


def test_given_seeds_are_kept_and_negative_ones_wrap() -> None:
    assert build(replace(SPEC, seed=7), 1).sampling.seed == 7
    assert build(replace(SPEC, seed=-1), 1).sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("length", "pool", "limit", "expected"),
    [(10, 0, 0, 90), (99, 0, 0, 1), (10, 40, 0, 30), (10, 400, 0, 90), (10, 0, 20, 20)],
)
def test_absent_max_tokens_is_what_is_left(
    length: int, pool: int, limit: int, expected: int
) -> None:
    """RB-071."""
    limits = Limits(max_output_tokens=limit)
    call = build(SPEC, length, limits, max_pool_tokens=pool)
    assert call.sampling.max_tokens == expected


def test_lengths_that_do_not_fit_are_refused() -> None:
    """RB-072."""
    assert code_of(SPEC, 100) == "context_length_exceeded"
    assert code_of(replace(SPEC, max_tokens=91), 10) == "context_length_exceeded"
    assert build(replace(SPEC, max_tokens=90), 10).sampling.max_tokens == 90
    assert code_of(SPEC, 40, max_pool_tokens=40) == "prompt_too_large_for_pool"
    assert code_of(replace(SPEC, max_tokens=31), 10, max_pool_tokens=40) == (
        "prompt_too_large_for_pool"
    )
    assert code_of(SPEC, 0) == "empty_prompt"
    assert code_of(replace(SPEC, min_tokens=95), 10) == "invalid_argument"


@pytest.mark.parametrize(
    ("timeout_ms", "time_left_s", "expected_s"),
    [(0, None, 600.0), (250, None, 0.25), (0, 3.0, 3.0), (5000, 3.0, 3.0), (1000, 3.0, 1.0)],
)
def test_nearer_deadline_wins(
    timeout_ms: int, time_left_s: float | None, expected_s: float
) -> None:
    arrival = replace(ARRIVAL, time_left_s=time_left_s)
    assert deadline_of(timeout_ms, arrival, Limits()) == 1000.0 + expected_s


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 17}, "n"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop": ("é" * 129,)}, "stop"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"force_mode": "UP"}, "x-isthmus-force-mode"),
        ({"timeout_ms": 10**9}, "timeout_ms"),
        ({"priority": 10**6}, "priority"),
        ({"model": "other"}, "model"),
        ({"prompt": TokenInput(np.asarray([1, -1]))}, "prompt"),
        ({"prompt": TokenInput(np.asarray([], dtype=np.int64))}, "prompt"),
        ({"prompt": TokenInput(np.zeros(100, dtype=np.int64))}, "prompt"),
    ],
)
def test_each_rule_names_its_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_spec(replace(SPEC, **changes), Limits(), MODEL)
    assert caught.value.param == param


def test_limits_come_from_the_table() -> None:
    limits = Limits(max_choices=2, max_stop_strings=1, max_prompt_tokens=5)
    for changes in ({"n": 3}, {"stop": ("a", "b")}):
        with pytest.raises(RequestError):
            check_spec(replace(SPEC, **changes), limits, MODEL)
    with pytest.raises(RequestError, match="limit 5"):
        build(SPEC, 6, limits)


def message_of(spec: GenerateSpec, length: int, **model: Any) -> str:
    with pytest.raises(RequestError) as caught:
        build(spec, length, **model)
    return caught.value.message


def test_refusals_say_what_would_be_served() -> None:
    with pytest.raises(RequestError, match="model 'x' is not served; served: m"):
        check_spec(replace(SPEC, model="x"), Limits(), MODEL)
    assert message_of(SPEC, 100) == (
        "prompt has 100 tokens; the model's context of 100 tokens must hold it and the answer; "
        "shorten it"
    )
    assert message_of(replace(SPEC, max_tokens=91), 10).endswith("; ask for 90 at most")
    assert message_of(replace(SPEC, max_tokens=31), 10, max_pool_tokens=40).endswith(
        "; ask for 30 at most"
    )
