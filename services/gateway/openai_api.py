"""OpenAI request bodies turned into GenerateSpecs; what is not built is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from services.common.errors import RequestError
from services.common.limits import Limits
from services.gateway.fields import Fields, json_type, refuse_unsupported, wrong_type
from services.gateway.input_bounds import check_count, check_text
from services.gateway.openai_params import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    LIMITED,
    ROLES,
    TOKENIZE,
    UNBUILT_MESSAGE_FIELDS,
    UNBUILT_ROLES,
    UNSUPPORTED,
    UNUSED_TEXTS,
)
from services.gateway.spec import (
    ChatInput,
    FieldNames,
    GenerateSpec,
    PromptInput,
    TextInput,
    TokenInput,
)
from services.gateway.validate import empty_prompt
from services.gateway.wire_names import SLO_TPOT, SLO_TTFT, TIMEOUT
from services.text.template import ChatTurn


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A translated body: what to generate, and how the answer is to be written."""

    spec: GenerateSpec
    is_chat: bool
    stream: bool
    include_usage: bool


def parse_chat(body: Any, limits: Limits) -> OpenAIRequest:
    """Translate a body of /v1/chat/completions."""
    fields = Fields(body)
    fields.refuse_others(CHAT, UNSUPPORTED)
    names, max_tokens = _chat_max_tokens(fields)
    spec = GenerateSpec(
        prompt=_messages(fields, limits),
        max_tokens=max_tokens,
        names=names,
        logprobs=fields.boolean("logprobs") or False,
        top_logprobs=fields.integer("top_logprobs") or 0,
        **_shared(fields, limits),
    )
    return _request(spec, fields, is_chat=True)


def parse_completion(body: Any, limits: Limits) -> OpenAIRequest:
    """Translate a body of /v1/completions."""
    fields = Fields(body)
    fields.refuse_others(COMPLETION, UNSUPPORTED)
    if fields.boolean("echo"):
        _refuse_beyond("echo")
    logprobs = _completion_logprobs(fields)
    shared = _shared(fields, limits)
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != shared["n"]:
        _refuse_beyond("best_of")
    spec = GenerateSpec(
        prompt=_prompt(fields.raw("prompt"), limits),
        max_tokens=fields.integer("max_tokens"),
        names=FieldNames(
            top_logprobs="logprobs",
            timeout=TIMEOUT.name,
            slo_ttft=SLO_TTFT.name,
            slo_tpot=SLO_TPOT.name,
        ),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        **shared,
    )
    return _request(spec, fields, is_chat=False)


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """A translated body of /tokenize."""

    model: str
    prompt: TextInput | ChatInput
    add_special_tokens: bool


def parse_tokenize(body: Any, limits: Limits) -> TokenizeBody:
    """Translate a body of /tokenize: `prompt` or `messages`."""
    fields = Fields(body)
    fields.refuse_others(TOKENIZE, UNSUPPORTED)
    model = fields.text("model") or ""
    add_special = fields.boolean("add_special_tokens")
    prompt: TextInput | ChatInput
    if fields.raw("messages") is not None:
        if fields.raw("prompt") is not None:
            raise RequestError(
                "invalid_argument", "give prompt or messages, not both", param="prompt"
            )
        prompt = _messages(fields, limits)
    else:
        text = fields.text("prompt")
        if text is None:
            raise RequestError("invalid_argument", "prompt is missing", param="prompt")
        prompt = TextInput(text)
    return TokenizeBody(model, prompt, True if add_special is None else add_special)


def parse_detokenize(body: Any) -> tuple[str, TokenInput]:
    """Translate a body of /detokenize: model (or "") and ids."""
    fields = Fields(body)
    fields.refuse_others(DETOKENIZE, UNSUPPORTED)
    tokens = fields.raw("tokens")
    if not isinstance(tokens, list):
        wrong_type("tokens", "an array of integers", tokens)
    return fields.text("model") or "", TokenInput(_integers(tokens, "tokens"))


def _shared(fields: Fields, limits: Limits) -> dict[str, Any]:
    """Read what both endpoints have, as arguments of GenerateSpec."""
    _check_harmless(fields, limits)
    given = {
        "model": fields.text("model"),
        "min_tokens": fields.integer("min_tokens"),
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "seed": fields.integer("seed"),
        "ignore_eos": fields.boolean("ignore_eos"),
        "stop_token_ids": _token_id_list(fields, limits),
        "stop": _stop(fields.raw("stop"), limits),
    }
    shared: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    n = fields.integer("n")
    shared["n"] = 1 if n is None else n
    top_k = fields.integer("top_k")
    if top_k is not None:
        shared["top_k"] = 0 if top_k == -1 else top_k  # -1 is how other servers say "off"
    return shared


def _check_harmless(fields: Fields, limits: Limits) -> None:
    """Check the parameters that change nothing about the answer."""
    for name in UNUSED_TEXTS:
        text = fields.text(name)
        if text is not None:
            size = len(check_text(text, name).encode())
            check_count(size, limits.max_id_bytes, name, "bytes")
    metadata = fields.raw("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        wrong_type("metadata", "an object", metadata)
    if metadata:
        check_count(len(metadata), 16, "metadata", "entries")
    if fields.boolean("store"):
        _refuse_beyond("store")
    if fields.text("service_tier") not in (None, "auto", "default"):
        _refuse_beyond("service_tier")


def _refuse_beyond(name: str) -> NoReturn:
    refuse_unsupported(name, f" {LIMITED[name]}")


def _request(spec: GenerateSpec, fields: Fields, *, is_chat: bool) -> OpenAIRequest:
    stream = fields.boolean("stream") or False
    options = fields.raw("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise RequestError(
                "invalid_argument", "stream_options needs stream to be true", param="stream_options"
            )
        if not isinstance(options, dict):
            wrong_type("stream_options", "an object", options)
        include_usage = _stream_options(options)
    return OpenAIRequest(spec, is_chat, stream, include_usage)


def _stream_options(options: dict[str, Any]) -> bool:
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            full = f"stream_options.{name[:64]}"
            raise RequestError("unknown_parameter", f"unknown parameter {full!r}", param=full)
    for name, value in options.items():
        if value is not None and type(value) is not bool:
            wrong_type(f"stream_options.{name}", "a boolean", value)
    if options.get("include_obfuscation"):
        _refuse_beyond("stream_options.include_obfuscation")
    return bool(options.get("include_usage"))


def _chat_max_tokens(fields: Fields) -> tuple[FieldNames, int | None]:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "invalid_argument",
            "max_tokens and max_completion_tokens differ; give one",
            param="max_completion_tokens",
        )
    name = "max_tokens" if new is None else "max_completion_tokens"
    names = FieldNames(
        prompt="messages",
        max_tokens=name,
        timeout=TIMEOUT.name,
        slo_ttft=SLO_TTFT.name,
        slo_tpot=SLO_TPOT.name,
    )
    return names, old if new is None else new


def _completion_logprobs(fields: Fields) -> int | None:
    """Legacy form: a number of alternatives; false, which some clients send, means none."""
    value = fields.raw("logprobs")
    return None if value is False else fields.integer("logprobs")


def _stop(value: Any, limits: Limits) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        wrong_type("stop", "a string or an array of strings", value)
    check_count(len(value), limits.max_stop_strings, "stop", "strings")
    for text in value:
        if not isinstance(text, str):
            wrong_type("stop", "a string or an array of strings", text)
    return tuple(value)


def _token_id_list(fields: Fields, limits: Limits) -> tuple[int, ...] | None:
    value = fields.raw("stop_token_ids")
    if value is None:
        return None
    if not isinstance(value, list):
        wrong_type("stop_token_ids", "an array of integers", value)
    check_count(len(value), limits.max_stop_token_ids, "stop_token_ids", "entries")
    return tuple(int(token_id) for token_id in _integers(value, "stop_token_ids"))


def _prompt(value: Any, limits: Limits) -> PromptInput:
    if isinstance(value, str):
        return TextInput(value)
    if not isinstance(value, list):
        wrong_type("prompt", "a string or an array", value)
    first = value[0] if value else 0
    if type(first) is int:
        return _only_ids(value)
    if not isinstance(first, str | list):
        wrong_type("prompt", "an array of strings or integers", first)
    if len(value) > 1:
        refuse_unsupported("prompt", f" as an array of {len(value)} prompts; send one a request")
    if isinstance(first, list):
        return _only_ids(first)
    return TextInput(first)


def _only_ids(value: list[Any]) -> TokenInput:
    if not value:
        raise empty_prompt("prompt")
    return TokenInput(_integers(value, "prompt"))


def _integers(values: Sequence[Any], param: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    for value in values:
        if type(value) is not int:
            wrong_type(param, "an array of integers", value)
    # Numbers beyond 64 bits are as much out of the vocabulary as the largest that fits.
    high = (1 << 62) - 1
    try:
        return np.asarray(values, dtype=np.int64)
    except OverflowError:
        return np.asarray([max(-high, min(high, value)) for value in values], dtype=np.int64)


def _messages(fields: Fields, limits: Limits) -> ChatInput:
    value = fields.raw("messages")
    if value is None:
        raise RequestError("invalid_argument", "messages is missing", param="messages")
    if not isinstance(value, list):
        wrong_type("messages", "an array", value)
    if not value:
        raise empty_prompt("messages")
    check_count(len(value), limits.max_messages, "messages", "messages")
    return ChatInput(tuple(_turn(message, index) for index, message in enumerate(value)))


def _turn(message: Any, index: int) -> ChatTurn:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        wrong_type(where, "an object", message)
    for name, value in message.items():
        if name in ("role", "content", "name") or value is None or value == []:
            continue
        if name in UNBUILT_MESSAGE_FIELDS:
            refuse_unsupported(f"{where}.{name}")
        full = f"{where}.{name[:64]}"
        raise RequestError("unknown_parameter", f"unknown parameter {full!r}", param=full)
    return ChatTurn(_role(message.get("role"), where), _content(message.get("content"), where))


def _role(role: Any, where: str) -> str:
    param = f"{where}.role"
    if not isinstance(role, str):
        wrong_type(param, "a string", role)
    if role in UNBUILT_ROLES:
        refuse_unsupported(param, f": role {role!r}")
    if role not in ROLES:
        allowed = ", ".join(ROLES)
        raise RequestError(
            "invalid_argument", f"{param} is {role[:32]!r}, must be one of {allowed}", param=param
        )
    return ROLES[role]


def _content(content: Any, where: str) -> str:
    param = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        wrong_type(param, "a string or an array of text parts", content)
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind != "text":
        if isinstance(kind, str):
            refuse_unsupported(f"{where}.type", f": {kind[:32]!r}; text is")
        wrong_type(f"{where}.type", "a string", kind)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(
            "invalid_argument",
            f"{where}.text must be a string, not {json_type(text)}",
            param=f"{where}.text",
        )
    return text
