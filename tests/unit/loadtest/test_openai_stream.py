"""Events of OpenAI streams: what is a token, when, and whether the answer was whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.openai_stream import OpenAIStream
from loadtest.records import Chunk, RequestRecord

USAGE = {"prompt_tokens": 7, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.record = RequestRecord(number=1, scheduled_s=0.0)
        self.stream = OpenAIStream(self.record, lambda: self.now)

    def event(self, at_s: float, body: dict[str, Any]) -> None:
        self.raw(at_s, f"data: {json.dumps(body)}\n\n".encode())

    def raw(self, at_s: float, data: bytes) -> None:
        self.now = at_s
        self.stream.feed(data)

    def chat(self, at_s: float, content: str, **more: Any) -> None:
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
        self.event(at_s, {"choices": [choice], **more})

    def end(self, at_s: float, **more: Any) -> None:
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        self.event(at_s, {"choices": [choice], **more})
        self.raw(at_s, b"data: [DONE]\n\n")
        self.stream.finish()


def test_our_own_server_tells_the_tokens_of_each_event_and_its_stages() -> None:
    rig = Rig()
    rig.chat(1, "a", isthmus={"num_tokens": 1})
    rig.chat(2, "bc", isthmus={"num_tokens": 3})
    rig.end(3, isthmus={"num_tokens": 2})
    rig.event(3, {"choices": [], "usage": USAGE,
                  "isthmus": {"mode": "REMOTE", "prefill_us": 1500, "decode_us": 0,
                              "prefill_worker": "p", "handoff_bytes": 12}})  # fmt: skip
    rig.stream.finish()

    record = rig.record
    assert record.chunks == [Chunk(1, 1), Chunk(2, 3), Chunk(3, 2)]
    assert (record.isl, record.osl, record.cached_tokens, record.num_heard) == (7, 6, 4, 6)
    assert (record.mode, record.prefill_worker, record.handoff_bytes) == ("REMOTE", "p", 12)
    assert record.stages_ms == {"prefill": 1.5}
    assert rig.stream.is_whole


def test_running_totals_of_usage_are_believed() -> None:
    rig = Rig()
    for at_s, total in ((1, 2), (2, 5)):
        rig.chat(at_s, "x", usage={"prompt_tokens": 7, "completion_tokens": total})
    rig.end(3, usage=USAGE)

    assert rig.record.chunks == [Chunk(1, 2), Chunk(2, 3), Chunk(3, 1)]
    assert rig.record.osl == 6


def test_without_counts_the_usage_is_shared_among_events() -> None:
    rig = Rig()
    rig.event(0.5, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for at_s in (1, 2, 3, 4):
        rig.chat(at_s, "x")
    rig.event(4, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    rig.event(4, {"choices": [], "usage": USAGE})
    rig.stream.finish()

    assert rig.record.num_heard == 4
    assert rig.record.osl == 6
    assert [c.at_s for c in rig.record.chunks] == [1, 2, 3, 4]
    assert sum(c.num_tokens for c in rig.record.chunks) == 6
    assert max(c.num_tokens for c in rig.record.chunks) == 2


def test_a_usage_that_comes_once_beside_the_last_choice_is_no_running_total() -> None:
    rig = Rig()
    for at_s in (1, 2, 3):
        rig.chat(at_s, "x")
    rig.end(4, usage=USAGE)

    assert rig.record.chunks == [Chunk(1, 2), Chunk(2, 2), Chunk(3, 2)]
    assert rig.record.osl == 6


def test_without_usage_each_event_with_text_is_a_token() -> None:
    rig = Rig()
    rig.chat(1, "a")
    rig.chat(2, "")
    rig.event(3, {"choices": [{"delta": {"reasoning_content": "hm"}}]})
    rig.end(4)

    assert rig.record.chunks == [Chunk(1, 1), Chunk(3, 1)]
    assert (rig.record.osl, rig.record.cached_tokens) == (2, None)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_may_come_in_any_pieces_with_comments_and_other_line_ends(size: int) -> None:
    rig = Rig()
    text = (
        b": ping\r\n\r\nevent: message\r\n"
        b'data: {"choices":[{"text":"\xc3\xa4","finish_reason":null}]}\r\n\r\n'
        b'data:{"choices":[{"text":"b","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    for start in range(0, len(text), size):
        rig.raw(start, text[start : start + size])
    rig.stream.finish()

    assert rig.record.num_heard == 2
    assert rig.stream.is_done
    assert rig.stream.is_whole


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'data: {"error":{"code":"worker_lost","message":"x"}}\n\n', "worker_lost"),
        (b'data: {"error":{"type":"server_error","code":null}}\n\n', "server_error"),
        (b'data: {"error":"gone"}\n\n', "error_without_code"),
        (b"data: <html>\n\n", "bad_event"),
        (b"data: [1]\n\n", "bad_event"),
        (b'data: {"choices":[{}],"isthmus":{}}\n\n', "bad_event"),
        (b"data: " + b"x" * (1 << 21), "event_too_large"),
    ],
)
def test_what_no_stream_should_hold_is_a_fault(data: bytes, fault: str) -> None:
    rig = Rig()
    rig.raw(1, data)
    rig.end(2)

    assert rig.stream.fault == fault
    assert not rig.stream.is_whole


def test_a_stream_without_a_reason_for_its_end_is_not_whole() -> None:
    rig = Rig()
    rig.chat(1, "a")
    rig.raw(2, b"data: [DONE]\n\n")
    rig.stream.finish()

    assert not rig.stream.is_whole
