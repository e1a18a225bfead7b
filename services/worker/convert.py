"""Between messages, transfers and the engine's values. Raises RequestError on a bad work item."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np

from services.common.errors import ERROR_TABLE, RequestError
from services.common.limits import Limits
from services.common.sampling import SamplingParams
from services.engine.api import (
    ChoiceDone,
    EndReason,
    EngineLoad,
    FirstToken,
    PrefillFinished,
    Refused,
    ResumedChoice,
    TokenArray,
    TokenLogprobs,
    TokensOut,
)
from services.pb import common_pb2, worker_pb2
from services.registry.base import LoadReport
from services.transfer.api import FinalInfo, FirstTokenInfo

_FINISH = {
    EndReason.STOP: common_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    EndReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def token_array(data: bytes, vocab_size: int) -> TokenArray:
    """Decode little-endian uint32 token ids and check their range."""
    if not data:
        raise RequestError("empty_prompt", "the work item has no tokens", param="token_ids")
    if len(data) % 4:
        raise RequestError(
            "invalid_argument", "token_ids is not a whole number of uint32", param="token_ids"
        )
    tokens = np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
    top = int(tokens.max())
    if top >= vocab_size:
        raise RequestError(
            "token_out_of_range",
            f"token id {top} is not below the vocabulary size {vocab_size}",
            param="token_ids",
        )
    return tokens


def generated_tokens(work: worker_pb2.Work, vocab_size: int) -> tuple[int, ...]:
    """Read the tokens another worker made of a request under way; () when it begins here."""
    if not work.generated:
        return ()
    generated = token_array(work.generated, vocab_size)
    if len(generated) != work.first_index:
        raise RequestError(
            "invalid_argument",
            f"{len(generated)} tokens are given and the next one is said to be "
            f"number {work.first_index}",
            param="generated",
        )
    return tuple(generated.tolist())


def resumed_choices(work: worker_pb2.Work, vocab_size: int) -> tuple[ResumedChoice, ...]:
    """Read the choices under way that go on here; () when the request begins here."""
    return tuple(
        ResumedChoice(
            one.choice,
            tuple(token_array(one.token_ids, vocab_size).tolist()) if one.token_ids else (),
        )
        for one in work.resumed
    )


def sampling_params(work: worker_pb2.Work, limits: Limits) -> SamplingParams:
    """Read the sampling parameters of a work item; the router has checked their ranges."""
    wire = work.sampling
    n = work.n or 1
    for name, count, limit in (
        ("n", n, limits.max_choices),
        ("stop_token_ids", len(wire.stop_token_ids), limits.max_stop_token_ids),
        ("top_logprobs", wire.top_logprobs, limits.max_logprobs),
    ):
        if count > limit:
            raise RequestError(
                "invalid_argument", f"{name} is {count}, this worker's limit is {limit}", param=name
            )
    if work.max_tokens < 1:
        raise RequestError("invalid_argument", "max_tokens must be at least 1", param="max_tokens")
    _check_numbers(wire)
    return SamplingParams(
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        top_p=wire.top_p if wire.HasField("top_p") else 1.0,
        top_k=wire.top_k,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=(
            wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0
        ),
        seed=wire.seed,
        stop_token_ids=tuple(wire.stop_token_ids),
        logprobs=wire.logprobs,
        top_logprobs=wire.top_logprobs,
        ignore_eos=wire.ignore_eos,
        min_tokens=wire.min_tokens,
        max_tokens=work.max_tokens,
        n=n,
    )


def _check_numbers(wire: common_pb2.SamplingParams) -> None:
    """Refuse what no sampler can use; the finer ranges are the front doors'."""
    for name in (
        *("temperature", "top_p", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ):
        value = getattr(wire, name)
        is_signed = name in ("presence_penalty", "frequency_penalty")
        if not math.isfinite(value) or (value < 0 and not is_signed):
            raise RequestError("invalid_argument", f"{name} is not a usable number", param=name)


def wire_error(code: str, message: str) -> common_pb2.Error:
    """Build an Error message from a code of the table."""
    return common_pb2.Error(code=code, message=message, retryable=ERROR_TABLE[code].retryable)


def wire_logprob(entry: TokenLogprobs) -> common_pb2.Logprob:
    """Build a Logprob message."""
    return common_pb2.Logprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[common_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in entry.top],
    )


def wire_tokens(event: TokensOut, request: int, attempt: int) -> worker_pb2.Tokens:
    """Build a Tokens message."""
    return worker_pb2.Tokens(
        request=request,
        attempt=attempt,
        choice=event.choice,
        first_index=event.first_index,
        token_ids=np.asarray(event.token_ids, dtype="<u4").tobytes(),
        logprobs=[wire_logprob(entry) for entry in event.logprobs],
    )


def wire_ticket(
    ticket: bytes, generated: tuple[int, ...], request: int, attempt: int
) -> worker_pb2.TicketReady:
    """Build a TicketReady message."""
    return worker_pb2.TicketReady(
        request=request,
        attempt=attempt,
        ticket=ticket,
        generated=np.asarray(generated, dtype="<u4").tobytes(),
    )


def wire_refusal(event: Refused, request: int, attempt: int) -> worker_pb2.Refusal:
    """Build a Refusal message."""
    return worker_pb2.Refusal(
        request=request, attempt=attempt, error=wire_error(event.code, event.message)
    )


def wire_done(
    event: ChoiceDone, request: int, attempt: int, timing: common_pb2.Timing
) -> worker_pb2.Done:
    """Build a Done message; the stage times are added to what `timing` already says."""
    timing.queue_decode_us += event.times.queue_us if timing.decode_worker else 0
    timing.queue_prefill_us += 0 if timing.decode_worker else event.times.queue_us
    timing.prefill_us += event.times.prefill_us
    timing.handoff_us += event.times.handoff_us
    timing.decode_us += event.times.decode_us
    timing.prefill_chunks += event.times.prefill_chunks
    done = worker_pb2.Done(
        request=request,
        attempt=attempt,
        choice=event.choice,
        reason=_FINISH[event.reason],
        all_choices=event.all_choices,
        handed_off=event.handed_off,
        cached_tokens=event.cached_tokens,
        computed_tokens=event.computed_tokens,
        timing=timing,
    )
    if event.error_code is not None:
        done.error.CopyFrom(wire_error(event.error_code, event.error_message))
    return done


def load_report(load: EngineLoad) -> LoadReport:
    """Return what the registry is told of the load."""
    return LoadReport(
        queued_uncached_tokens=load.queued_uncached_tokens,
        resident_tokens=load.resident_tokens,
        kv_free=load.blocks_free + load.blocks_cached,
        kv_total=load.blocks_total,
        rate_tok_s=load.rate_tok_s,
        tbt_a_us=load.tbt_a_us,
        tbt_b_us=load.tbt_b_us,
        running=load.running,
        waiting=load.waiting,
        kv_cached=load.blocks_cached,
    )


def wire_load(
    load: EngineLoad, role: common_pb2.RoleWeights, state: common_pb2.WorkerState.ValueType
) -> worker_pb2.Load:
    """Build a Load message: the report, and what routers hear from the worker alone."""
    return worker_pb2.Load(**asdict(load_report(load)), role=role, state=state)


def final_info(event: PrefillFinished) -> FinalInfo:
    """Return what decode is told when the prompt is done."""
    first = tuple(
        FirstTokenInfo(
            f.choice,
            f.token_id,
            f.logprobs.logprob if f.logprobs else None,
            f.logprobs.top if f.logprobs else (),
        )
        for f in event.first
    )
    return FinalInfo(
        first, event.num_tokens, event.tail_block, event.tail_valid_tokens, event.prefill_us
    )


def first_token(info: FirstTokenInfo) -> FirstToken:
    """Return a first token as the engine takes it."""
    logprobs = (
        None if info.logprob is None else TokenLogprobs(info.token_id, info.logprob, info.top)
    )
    return FirstToken(info.choice, info.token_id, logprobs)
