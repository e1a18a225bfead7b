"""Router outputs written as OpenAI JSON: one body, or server-sent events.

A stream has one event per token, so an event is put together from prepared bytes and only the
new text goes through the JSON encoder.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from services.common.errors import IsthmusError
from services.gateway.errors import openai_error
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, TextLogprob

DONE_EVENT = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this number for it
_EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What every object of one answer repeats."""

    request_id: str
    model: str
    created: int  # Unix seconds
    fingerprint: str
    is_chat: bool
    logprobs: bool
    top_logprobs: int = 0
    with_usage: bool = False  # stream: a last event with usage
    with_timing: bool = False  # the key `isthmus` on the last object

    @property
    def answer_id(self) -> str:
        """The id as OpenAI shapes it."""
        bare = self.request_id.removeprefix("req-")
        return f"chatcmpl-{bare}" if self.is_chat else f"cmpl-{bare}"

    def head(self, *, is_stream: bool) -> dict[str, Any]:
        """Give the keys in front of `choices`."""
        if self.is_chat:
            kind = "chat.completion.chunk" if is_stream else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def dump(value: Any) -> bytes:
    """Write JSON; a number that JSON cannot hold is a fault, not output."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_text(text: str) -> bytes:
    """Write a string of JSON."""
    return encode_basestring(text).encode()


def usage_of(end: RequestEnd) -> dict[str, Any]:
    """Write the usage object."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
    }


def timing_of(facts: AnswerFacts, end: RequestEnd) -> dict[str, Any]:
    """Write where and how fast a request ran."""
    return {"request_id": facts.request_id, **dataclasses.asdict(end.timing)}


class StreamWriter:
    """Writes the events of one streamed answer."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts
        head = dump(facts.head(is_stream=True))[:-1]
        self._head = b"data: " + head
        usage = b',"usage":null' if facts.with_usage else b""
        text_key = b'"delta":{"content":' if facts.is_chat else b'"text":'
        closing = b"}" if facts.is_chat else b""
        self._plain_tail = (
            closing + b',"logprobs":null,"finish_reason":null}]' + usage + b"}" + _EVENT_END
        )
        self._usage = usage
        self._text_key = text_key
        self._prefixes: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}

    def delta(self, output: ChoiceDelta) -> bytes:
        """Write new output; nothing if a client could not see any of it."""
        if self._facts.logprobs and output.logprobs:
            return self._with_logprobs(output)
        if not output.text:
            return b""
        prefix = self._prefixes.get(output.choice)
        if prefix is None:
            return self._first(output)
        return prefix + json_text(output.text) + self._plain_tail

    def frame_of(self, choice: int) -> tuple[bytes, bytes] | None:
        """Give what stands around the text of a plain event; None before a choice's first one."""
        prefix = self._prefixes.get(choice)
        return None if prefix is None else (prefix, self._plain_tail)

    def note_written(self, choice: int, num_tokens: int) -> None:
        """Hear of events of one token each that others wrote, in such a frame."""

    def end(self, end: ChoiceEnd) -> bytes:
        """Write the end of one choice."""
        opening = (
            self._first(ChoiceDelta(end.choice, 0, (), "")) if self._is_new(end.choice) else b""
        )
        body: dict[str, Any] = {"delta": {}} if self._facts.is_chat else {"text": ""}
        body |= {"logprobs": None, "finish_reason": end.finish_reason}
        return opening + self._event({"index": end.choice, **body})

    def finish(self, end: RequestEnd) -> bytes:
        """Write what follows the last choice: usage and timing if asked for, and DONE."""
        facts = self._facts
        if not (facts.with_usage or facts.with_timing):
            return DONE_EVENT
        body: dict[str, Any] = {**facts.head(is_stream=True), "choices": []}
        if facts.with_usage:
            body["usage"] = usage_of(end)
        if facts.with_timing:
            body["isthmus"] = timing_of(facts, end)
        return b"data: " + dump(body) + _EVENT_END + DONE_EVENT

    def error(self, error: IsthmusError) -> bytes:
        """Write the event that ends a broken stream: no finish_reason, no DONE."""
        return b"data: " + dump(openai_error(error)) + _EVENT_END

    def _is_new(self, choice: int) -> bool:
        return choice not in self._prefixes

    def _open(self, choice: int) -> None:
        index = str(choice).encode()
        self._prefixes[choice] = (
            self._head + b',"choices":[{"index":' + index + b"," + self._text_key
        )

    def _first(self, output: ChoiceDelta) -> bytes:
        self._open(output.choice)
        body: dict[str, Any] = {"text": output.text}
        if self._facts.is_chat:
            body = {"delta": {"role": "assistant", "content": output.text}}
        body |= {"logprobs": None, "finish_reason": None}
        return self._event({"index": output.choice, **body})

    def _with_logprobs(self, output: ChoiceDelta) -> bytes:
        body: dict[str, Any]
        if self._facts.is_chat:
            delta: dict[str, Any] = {"content": output.text}
            if self._is_new(output.choice):
                delta = {"role": "assistant", **delta}
            content = [chat_logprob(item) for item in output.logprobs]
            body = {"delta": delta, "logprobs": {"content": content, "refusal": None}}
        else:
            offset = self._offsets.get(output.choice, 0)
            written = legacy_logprobs(output.logprobs, self._facts.top_logprobs, offset)
            self._offsets[output.choice] = offset + sum(len(item.text) for item in output.logprobs)
            body = {"text": output.text, "logprobs": written}
        if self._is_new(output.choice):
            self._open(output.choice)
        return self._event({"index": output.choice, **body, "finish_reason": None})

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return self._head + b',"choices":[' + dump(choice) + b"]" + self._usage + b"}" + _EVENT_END


class CountingWriter(StreamWriter):
    """Says with each event how many tokens it brought, those still without text included.

    Events and tokens differ where text is held back, so who measures times between tokens needs
    the numbers. Other clients do not pay for them.
    """

    def __init__(self, facts: AnswerFacts) -> None:
        super().__init__(facts)
        self._come: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def delta(self, output: ChoiceDelta) -> bytes:
        """Write new output with the tokens since the choice's last event."""
        choice = output.choice
        self._come[choice] = self._come.get(choice, 0) + len(output.token_ids)
        return self._with_count(super().delta(output), choice)

    def frame_of(self, choice: int) -> tuple[bytes, bytes] | None:
        """Give what stands around an event of one token, unless others have come before it."""
        frame = super().frame_of(choice)
        if frame is None or self._come.get(choice) != self._told.get(choice):
            return None
        prefix, tail = frame
        return prefix, _counted(tail, 1)

    def note_written(self, choice: int, num_tokens: int) -> None:
        """Count events of one token each that others wrote."""
        self._come[choice] += num_tokens
        self._told[choice] += num_tokens

    def end(self, end: ChoiceEnd) -> bytes:
        """Write the end of one choice with what is left."""
        self._come[end.choice] = max(end.num_tokens, self._told.get(end.choice, 0))
        return self._with_count(super().end(end), end.choice)

    def _with_count(self, events: bytes, choice: int) -> bytes:
        """Add the key to the last event."""
        if not events:
            return events
        num_tokens = self._come[choice] - self._told.get(choice, 0)
        self._told[choice] = self._come[choice]
        return _counted(events, num_tokens)


def _counted(events: bytes, num_tokens: int) -> bytes:
    """Put the number of tokens into the last event."""
    before = events.removesuffix(_EVENT_END)[:-1]
    return b'%b,"isthmus":{"num_tokens":%d}}%b' % (before, num_tokens, _EVENT_END)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class BodyWriter:
    """Collects the outputs of one answer and writes them as one body."""

    def __init__(self, facts: AnswerFacts, num_choices: int) -> None:
        self._facts = facts
        self._choices = [_Choice() for _ in range(num_choices)]

    def delta(self, output: ChoiceDelta) -> None:
        """Take new output."""
        choice = self._choices[output.choice]
        choice.texts.append(output.text)
        choice.logprobs.extend(output.logprobs)

    def end(self, end: ChoiceEnd) -> None:
        """Take the end of one choice."""
        self._choices[end.choice].finish_reason = end.finish_reason

    def finish(self, end: RequestEnd) -> bytes:
        """Write the body."""
        facts = self._facts
        choices = [self._write(index, choice) for index, choice in enumerate(self._choices)]
        body = {**facts.head(is_stream=False), "choices": choices, "usage": usage_of(end)}
        if facts.with_timing:
            body["isthmus"] = timing_of(facts, end)
        return dump(body)

    def _write(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        written: dict[str, Any] = {"index": index}
        if self._facts.is_chat:
            written["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            written["text"] = text
        written["logprobs"] = self._logprobs(choice.logprobs) if self._facts.logprobs else None
        written["finish_reason"] = choice.finish_reason
        return written

    def _logprobs(self, items: Sequence[TextLogprob]) -> dict[str, Any]:
        if self._facts.is_chat:
            return {"content": [chat_logprob(item) for item in items], "refusal": None}
        return legacy_logprobs(items, self._facts.top_logprobs, 0)


def chat_logprob(item: TextLogprob) -> dict[str, Any]:
    """Write one token's logprob in the chat form; `bytes` is exact where the text cannot be."""
    top = [
        {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}
        for _, text, raw, logprob in item.top
    ]
    return {
        "token": item.text,
        "logprob": _finite(item.logprob),
        "bytes": list(item.raw),
        "top_logprobs": top,
    }


def legacy_logprobs(
    items: Sequence[TextLogprob], num_top: int, first_offset: int
) -> dict[str, Any]:
    """Write logprobs in the form of /v1/completions."""
    offsets, offset = [], first_offset
    for item in items:
        offsets.append(offset)
        offset += len(item.text)
    top = [{text: _finite(lp) for _, text, _, lp in item.top} for item in items]
    return {
        "tokens": [item.text for item in items],
        "token_logprobs": [_finite(item.logprob) for item in items],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
