"""Reads the events of one OpenAI stream into a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from loadtest.records import Chunk, RequestRecord
from loadtest.server_timing import take_object

_MAX_LINE_BYTES = 1 << 20
_TEXT_KEYS = ("content", "reasoning_content", "reasoning")  # of a chat's delta


class OpenAIStream:
    """Takes bytes as they come and stamps each event that brought tokens.

    A server that says how many tokens an event has is believed. Of one that does not, each event
    with text counts as one token until the usage at the end tells how many there were.
    """

    def __init__(self, record: RequestRecord, clock: Callable[[], float]) -> None:
        self.is_done = False  # [DONE] came
        self.fault = ""  # code of an error the stream held, or of what it should not hold
        self.has_usage = False
        self.has_counts = False  # the server said how many tokens an event has
        self._record = record
        self._clock = clock
        self._left = b""
        self._has_finish = False
        self._num_told = 0
        self._is_ours = False  # every event says what it brings

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end, by what the stream itself says."""
        return self._has_finish and not self.fault

    def feed(self, data: bytes) -> None:
        """Take some bytes; events they complete get the time of now."""
        at_s = self._clock()
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            self._line(line, at_s)
        if len(self._left) > _MAX_LINE_BYTES:
            self._left = b""
            self.fault = self.fault or "event_too_large"

    def finish(self) -> None:
        """Settle the token counts once the stream is over."""
        record = self._record
        record.num_heard = sum(chunk.num_tokens for chunk in record.chunks)
        if not self.has_usage:
            record.osl = record.num_heard
        elif self._is_ours and self.is_whole:
            record.num_lost = max(0, record.osl - record.num_heard)
            record.num_repeated = max(0, record.num_heard - record.osl)
        elif not self.has_counts and record.chunks:
            record.chunks[:] = _spread(record.chunks, record.osl)

    def _line(self, line: bytes, at_s: float) -> None:
        if not line.startswith(b"data:"):
            return  # blank lines, comments that keep a connection alive, names of events
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
            self._event(event, at_s)
        except (ValueError, TypeError, AttributeError, LookupError):
            self.fault = self.fault or "bad_event"

    def _event(self, event: dict[str, Any], at_s: float) -> None:
        if "error" in event:
            self.fault = self.fault or error_code(event)
            return
        choices = event.get("choices")
        usage = event.get("usage")
        own = event.get("isthmus")
        if choices:
            self._choice(choices[0], own, usage, at_s)
        elif own is not None:
            take_object(self._record, own)
        if usage:
            self._usage(usage)

    def _choice(self, choice: dict[str, Any], own: Any, usage: Any, at_s: float) -> None:
        if choice.get("finish_reason"):
            self._has_finish = True
        if own is not None:
            self.has_counts = self._is_ours = True
            num_tokens = int(own["num_tokens"])
        elif usage and (self.has_counts or not self._record.chunks):
            # Some servers tell the sum so far with every event; others once, with the last one.
            self.has_counts = True
            num_tokens = int(usage["completion_tokens"]) - self._num_told
        else:
            num_tokens = 1 if _has_text(choice) else 0
        if num_tokens > 0:
            self._num_told += num_tokens
            self._record.chunks.append(Chunk(at_s, num_tokens))

    def _usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        self.has_usage = True
        record.osl = int(usage["completion_tokens"])
        record.isl = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            record.cached_tokens = int(details["cached_tokens"])


def error_code(body: object) -> str:
    """Return what an error object calls itself, in a form that fits a table."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        for key in ("code", "type"):
            value = error.get(key)
            if isinstance(value, str) and value:
                return value[:64]
    return "error_without_code"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(key) for key in _TEXT_KEYS)


def _spread(chunks: list[Chunk], num_tokens: int) -> list[Chunk]:
    """Share the tokens of an answer evenly among the events that brought it."""
    num_chunks = len(chunks)
    if num_tokens < num_chunks:
        return chunks  # events with text and no token of their own: nothing better is known
    shares = [num_tokens * (i + 1) // num_chunks for i in range(num_chunks)]
    firsts = [0, *shares]
    return [
        Chunk(chunk.at_s, share - before)
        for chunk, share, before in zip(chunks, shares, firsts, strict=False)
    ]
