"""Rules every request meets, whichever door it came through; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from services.common.errors import RequestError
from services.common.ids import RequestId
from services.common.light_value import light_value
from services.common.limits import Limits
from services.common.sampling import SamplingParams
from services.gateway.input_bounds import check_count, check_range, check_text
from services.gateway.spec import ChatInput, GenerateSpec, TextInput, TokenIds, TokenInput
from services.gateway.wire_names import SESSION
from services.router.api import GenerateCall, ServedModel
from services.router.policy import MODES

_MAX_INT32 = (1 << 31) - 1
_MAX_PRIORITY = 1000


@light_value
class Arrival:
    """Facts of a request that are not its content."""

    request_id: RequestId
    received_at: float  # monotonic seconds
    tenant: str = ""
    namespace: str = ""  # the tenant's name in block hashes
    traceparent: str = ""
    time_left_s: float | None = None  # what the transport's own deadline leaves
    session: str = ""  # the client's name for what belongs together


def check_spec(spec: GenerateSpec, limits: Limits, model: ServedModel) -> None:
    """Check all that needs no tokens; the first violation is raised with its field and limit."""
    if spec.model and spec.model != model.name:
        raise model_not_found(spec.model, model.name)
    _check_sampling(spec, limits)
    _check_stop(spec, limits, model)
    _check_lengths(spec, limits)
    if spec.force_mode is not None and spec.force_mode not in MODES:
        _invalid(spec.names.force_mode, f"must be one of {', '.join(MODES)}")
    check_range(spec.timeout_ms, 0, limits.max_timeout_ms, spec.names.timeout)
    check_range(spec.slo_ttft_ms, 0, limits.max_timeout_ms, spec.names.slo_ttft)
    check_range(spec.slo_tpot_ms, 0, limits.max_timeout_ms, spec.names.slo_tpot)
    check_range(spec.priority, 0, _MAX_PRIORITY, "priority")
    _check_prompt(spec, limits, model)


def build_call(
    spec: GenerateSpec,
    token_ids: npt.NDArray[np.uint32],
    arrival: Arrival,
    limits: Limits,
    model: ServedModel,
    draw_seed: Callable[[], int],
) -> GenerateCall:
    """Make the call from a checked spec and its tokens; raise if they do not fit."""
    max_tokens = _fit(spec, len(token_ids), limits, model)
    if spec.min_tokens > max_tokens:
        _invalid("min_tokens", f"is {spec.min_tokens}, max_tokens allows {max_tokens}")
    seed = draw_seed() if spec.seed is None else spec.seed & ((1 << 64) - 1)
    sampling = SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        seed=seed,
        stop_token_ids=spec.stop_token_ids,
        logprobs=spec.logprobs,
        top_logprobs=spec.top_logprobs,
        ignore_eos=spec.ignore_eos,
        min_tokens=spec.min_tokens,
        max_tokens=max_tokens,
        n=spec.n,
    )
    return GenerateCall(
        request_id=arrival.request_id,
        model=model.name,
        token_ids=token_ids,
        sampling=sampling,
        stop=spec.stop,
        deadline=deadline_of(spec.timeout_ms, arrival, limits),
        received_at=arrival.received_at,
        priority=spec.priority,
        tenant=arrival.tenant,
        namespace=arrival.namespace,
        force_mode=spec.force_mode,
        traceparent=arrival.traceparent,
        slo_ttft_ms=spec.slo_ttft_ms,
        slo_tpot_ms=spec.slo_tpot_ms,
        session=arrival.session,
    )


def deadline_of(timeout_ms: int, arrival: Arrival, limits: Limits) -> float:
    """Give the monotonic deadline: the nearer of the request's and the transport's."""
    timeout_s = (timeout_ms or limits.default_timeout_ms) / 1000
    if arrival.time_left_s is not None:
        timeout_s = min(timeout_s, arrival.time_left_s)
    return arrival.received_at + timeout_s


def session_of(value: str, limits: Limits) -> str:
    """Check a client's name for requests that belong together; empty = it gave none."""
    check_count(len(value.encode()), limits.max_id_bytes, SESSION.name, "bytes")
    return value


def check_token_ids(token_ids: TokenIds, vocab_size: int, param: str) -> npt.NDArray[np.uint32]:
    """Turn ids into uint32, refusing those the model has no embedding for, by the first."""
    may_be_negative = token_ids.dtype.kind != "u"
    if token_ids.size and (
        token_ids.max() >= vocab_size or (may_be_negative and token_ids.min() < 0)
    ):
        position = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[0])
        _out_of_range(int(token_ids[position]), position, vocab_size, param)
    return token_ids.astype(np.uint32, copy=False)


def model_not_found(name: str, served: str) -> RequestError:
    """Make the error for a model nobody serves; `name` is the client's own word."""
    return RequestError(
        "model_not_found",
        f"model {name[:128]!r} is not served; served: {served or 'none yet'}",
        param="model",
    )


def _check_sampling(spec: GenerateSpec, limits: Limits) -> None:
    check_range(spec.temperature, 0.0, 2.0, "temperature")
    check_range(spec.top_p, 0.0, 1.0, "top_p")
    if spec.top_p == 0.0:
        _invalid("top_p", "must be greater than 0")
    check_range(spec.top_k, 0, _MAX_INT32, "top_k")
    check_range(spec.min_p, 0.0, 1.0, "min_p")
    check_range(spec.presence_penalty, -2.0, 2.0, "presence_penalty")
    check_range(spec.frequency_penalty, -2.0, 2.0, "frequency_penalty")
    check_range(spec.repetition_penalty, 0.0, 2.0, "repetition_penalty")
    if spec.repetition_penalty == 0.0:
        _invalid("repetition_penalty", "must be greater than 0")
    if spec.seed is not None:
        check_range(spec.seed, -(1 << 63), (1 << 64) - 1, "seed")
    check_range(spec.n, 1, limits.max_choices, "n")
    check_range(spec.top_logprobs, 0, limits.max_logprobs, spec.names.top_logprobs)
    if spec.top_logprobs and not spec.logprobs:
        _invalid(spec.names.top_logprobs, "needs logprobs to be true")


def _check_stop(spec: GenerateSpec, limits: Limits, model: ServedModel) -> None:
    check_count(len(spec.stop), limits.max_stop_strings, "stop", "strings")
    for text in spec.stop:
        check_text(text, "stop")
        if not text:
            _invalid("stop", "holds an empty string")
        check_count(len(text.encode()), limits.max_stop_bytes, "stop", "bytes in one string")
    check_count(len(spec.stop_token_ids), limits.max_stop_token_ids, "stop_token_ids", "entries")
    for position, token_id in enumerate(spec.stop_token_ids):
        if not 0 <= token_id < model.vocab_size:
            _out_of_range(token_id, position, model.vocab_size, "stop_token_ids")


def _check_lengths(spec: GenerateSpec, limits: Limits) -> None:
    if spec.max_tokens is not None:
        high = limits.max_output_tokens or _MAX_INT32
        check_range(spec.max_tokens, 1, high, spec.names.max_tokens)
    check_range(spec.min_tokens, 0, _MAX_INT32, "min_tokens")
    if spec.max_tokens is not None and spec.min_tokens > spec.max_tokens:
        _invalid("min_tokens", f"is {spec.min_tokens}, more than {spec.names.max_tokens}")


def _check_prompt(spec: GenerateSpec, limits: Limits, model: ServedModel) -> None:
    param = spec.names.prompt
    prompt = spec.prompt
    if isinstance(prompt, TextInput):
        check_text(prompt.text, param)
        if not prompt.text.strip():
            raise empty_prompt(param)
        check_count(len(prompt.text.encode()), limits.max_body_bytes, param, "bytes")
    elif isinstance(prompt, ChatInput):
        check_turns(prompt, limits, param)
    elif isinstance(prompt, TokenInput):
        if not prompt.token_ids.size:
            raise empty_prompt(param)
        _check_prompt_length(prompt.token_ids.size, limits, model, param)
        check_token_ids(prompt.token_ids, model.vocab_size, param)


def check_turns(prompt: ChatInput, limits: Limits, param: str) -> None:
    """Check the messages of a chat."""
    if not prompt.turns:
        raise empty_prompt(param)
    check_count(len(prompt.turns), limits.max_messages, param, "messages")
    total = 0
    for turn in prompt.turns:
        check_text(turn.content, param)
        total += len(turn.content.encode())
    check_count(total, limits.max_body_bytes, param, "bytes")


def empty_prompt(param: str) -> RequestError:
    """Make the error for a prompt with nothing in it (white space alone counts as nothing)."""
    return RequestError("empty_prompt", f"{param} is empty", param=param)


def _check_prompt_length(length: int, limits: Limits, model: ServedModel, param: str) -> None:
    if limits.max_prompt_tokens and length > limits.max_prompt_tokens:
        raise RequestError(
            "context_length_exceeded",
            f"{param} has {length} tokens, limit {limits.max_prompt_tokens}; shorten it",
            param=param,
        )
    if length + 1 > model.context_length:
        raise RequestError(
            "context_length_exceeded",
            f"{param} has {length} tokens; the model's context of {model.context_length} tokens "
            "must hold it and the answer; shorten it",
            param=param,
        )
    if model.max_pool_tokens and length + 1 > model.max_pool_tokens:
        raise RequestError(
            "prompt_too_large_for_pool",
            f"{param} has {length} tokens; the largest KV pool holds {model.max_pool_tokens}; "
            "shorten it, or serve with more KV blocks",
            param=param,
        )


def _fit(spec: GenerateSpec, length: int, limits: Limits, model: ServedModel) -> int:
    """Give max_tokens: what was asked for if it fits, else what is left if none was asked."""
    if length == 0:
        raise empty_prompt(spec.names.prompt)
    _check_prompt_length(length, limits, model, spec.names.prompt)
    context_left = model.context_length - length
    pool_left = model.max_pool_tokens - length if model.max_pool_tokens else context_left
    if spec.max_tokens is None:
        left = min(context_left, pool_left)
        return min(left, limits.max_output_tokens) if limits.max_output_tokens else left
    if spec.max_tokens > context_left:
        raise RequestError(
            "context_length_exceeded",
            f"{length} prompt tokens and {spec.names.max_tokens} {spec.max_tokens} are more than "
            f"the model's context of {model.context_length} tokens; ask for {context_left} at most",
            param=spec.names.max_tokens,
        )
    if spec.max_tokens > pool_left:
        raise RequestError(
            "prompt_too_large_for_pool",
            f"{length} prompt tokens and {spec.names.max_tokens} {spec.max_tokens} are more than "
            f"the largest KV pool, which holds {model.max_pool_tokens}; "
            f"ask for {pool_left} at most",
            param=spec.names.max_tokens,
        )
    return spec.max_tokens


def _invalid(param: str, message: str) -> NoReturn:
    raise RequestError("invalid_argument", f"{param} {message}", param=param)


def _out_of_range(token_id: int, position: int, vocab_size: int, param: str) -> NoReturn:
    raise RequestError(
        "token_out_of_range",
        f"{param}[{position}] is {token_id}, must be from 0 to {vocab_size - 1}",
        param=param,
    )
