"""Generate requests of the gRPC door turned into GenerateSpecs, and outputs into frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.errors import RequestError
from services.common.limits import Limits
from services.gateway.input_bounds import check_count
from services.gateway.spec import (
    ChatInput,
    FieldNames,
    GenerateSpec,
    PromptInput,
    TextInput,
    TokenInput,
)
from services.gateway.validate import empty_prompt
from services.kv.hashing import pack_token_ids
from services.pb import common_pb2, inference_pb2
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, RequestTiming, TextLogprob
from services.text.template import ChatTurn

_FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}
_MODES = dict(common_pb2.Mode.items())
_PLANES = dict(common_pb2.Plane.items())
_GRPC_ROLES = ("system", "developer", "user", "assistant")
_NAMES = {
    kind: FieldNames(prompt=prompt, timeout="timeout_ms", force_mode="x-isthmus-force-mode")
    for kind, prompt in (
        ("text", "text"),
        ("chat", "chat.messages"),
        ("token_ids", "token_ids"),
    )
}


def parse_generate(
    request: inference_pb2.GenerateRequest, limits: Limits, force_mode: str | None
) -> GenerateSpec:
    """Translate a GenerateRequest; ranges are checked later, with the other door's."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise RequestError(
            "empty_prompt", "input is missing: set text, chat or token_ids", param="input"
        )
    prompt = _prompt(kind, request, limits)
    sampling = request.sampling
    check_count(len(request.stop), limits.max_stop_strings, "stop", "strings")
    top_logprobs = max(sampling.top_logprobs, request.top_logprobs)
    return GenerateSpec(
        prompt=prompt,
        names=_NAMES[kind],
        model=request.model,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        min_tokens=max(request.min_tokens, sampling.min_tokens),
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        ),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=tuple(request.stop),
        stop_token_ids=_stop_token_ids(sampling.stop_token_ids, limits),
        n=request.n if request.HasField("n") else 1,
        logprobs=sampling.logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
        ignore_eos=request.ignore_eos or sampling.ignore_eos,
        priority=request.priority,
        timeout_ms=request.timeout_ms,
        slo_ttft_ms=request.slo_ttft_ms,
        slo_tpot_ms=request.slo_tpot_ms,
        force_mode=force_mode,
    )


def chat_input(chat: inference_pb2.Chat, limits: Limits, param: str) -> ChatInput:
    """Translate a chat; roles are from a closed list, the template judges their order."""
    if not chat.messages:
        raise empty_prompt(param)
    check_count(len(chat.messages), limits.max_messages, param, "messages")
    turns = []
    for index, message in enumerate(chat.messages):
        if message.role not in _GRPC_ROLES:
            where = f"{param}[{index}].role"
            allowed = ", ".join(_GRPC_ROLES)
            raise RequestError(
                "invalid_argument",
                f"{where} is {message.role[:32]!r}, must be one of {allowed}",
                param=where,
            )
        role = "system" if message.role == "developer" else message.role
        turns.append(ChatTurn(role, message.content))
    return ChatInput(tuple(turns))


def unpack_ids(raw: bytes, param: str) -> npt.NDArray[np.uint32]:
    """Read little-endian uint32 ids, in place."""
    if len(raw) % 4:
        raise RequestError(
            "invalid_argument", f"{param} has {len(raw)} bytes, not a multiple of 4", param=param
        )
    return np.frombuffer(raw, dtype="<u4")


def delta_frame(delta: ChoiceDelta, *, with_ids: bool) -> inference_pb2.GenerateFrame:
    """Write new output."""
    frame = inference_pb2.GenerateFrame(
        choice=delta.choice,
        first_index=delta.first_index,
        num_tokens=len(delta.token_ids),
        text=delta.text,
    )
    if with_ids:
        frame.token_ids = pack_token_ids(delta.token_ids)
    if delta.logprobs:
        frame.logprobs.extend(_logprob(item) for item in delta.logprobs)
    return frame


def add_choice_end(frame: inference_pb2.GenerateFrame, end: ChoiceEnd) -> None:
    """Put the end of a choice on its last frame."""
    frame.finish.reason = _FINISH[end.finish_reason]
    frame.finish.stop = end.stop or ""


def add_request_end(frame: inference_pb2.GenerateFrame, end: RequestEnd) -> None:
    """Put usage and timing on the request's last frame."""
    usage = frame.usage
    usage.prompt_tokens = end.prompt_tokens
    usage.cached_tokens = end.cached_tokens
    usage.completion_tokens = end.completion_tokens
    frame.timing.CopyFrom(timing_message(end.timing))


def timing_message(timing: RequestTiming) -> common_pb2.Timing:
    """Write stage times; a mode or plane this build does not know stays unspecified."""
    return common_pb2.Timing(
        router_us=timing.router_us,
        queue_us=timing.queue_us,
        queue_prefill_us=timing.queue_prefill_us,
        prefill_us=timing.prefill_us,
        handoff_us=timing.handoff_us,
        handoff_bytes=timing.handoff_bytes,
        queue_decode_us=timing.queue_decode_us,
        decode_us=timing.decode_us,
        unattributed_us=timing.unattributed_us,
        ttft_us=timing.ttft_us,
        e2e_us=timing.e2e_us,
        prefill_worker=timing.prefill_worker,
        decode_worker=timing.decode_worker,
        migrations=timing.migrations,
        migration_gap_us=timing.migration_gap_us,
        prefill_chunks=timing.prefill_chunks,
        recomputed=timing.recomputed,
        handoff_blocks=timing.handoff_blocks,
        handoff_blocks_deduped=timing.handoff_blocks_deduped,
        handoff_blocks_attached=timing.handoff_blocks_attached,
        migration_us=timing.migration_us,
        migration_bytes=timing.migration_bytes,
        migration_blocks=timing.migration_blocks,
        migration_blocks_attached=timing.migration_blocks_attached,
        plane=_plane(timing.plane),
        migration_plane=_plane(timing.migration_plane),
        routed_locally=timing.routed_locally,
        mode=_MODES.get(f"MODE_{timing.mode.upper()}", common_pb2.MODE_UNSPECIFIED),
    )


def _plane(name: str) -> common_pb2.Plane.ValueType:
    return _PLANES.get(f"PLANE_{name.upper()}", common_pb2.PLANE_UNSPECIFIED)


def _prompt(kind: str, request: inference_pb2.GenerateRequest, limits: Limits) -> PromptInput:
    if kind == "text":
        return TextInput(request.text)
    if kind == "chat":
        return chat_input(request.chat, limits, "chat.messages")
    return TokenInput(unpack_ids(request.token_ids, "token_ids"))


def _stop_token_ids(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    check_count(len(token_ids), limits.max_stop_token_ids, "sampling.stop_token_ids", "entries")
    return tuple(token_ids)


def _logprob(item: TextLogprob) -> common_pb2.Logprob:
    top = [
        common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
        for token_id, _, _, logprob in item.top
    ]
    return common_pb2.Logprob(
        token_id=item.token_id, logprob=item.logprob, top=top, text=item.text, raw=item.raw
    )
