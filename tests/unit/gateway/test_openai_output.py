"""What goes over the wire for streams and whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import RequestError
from services.gateway.openai_output import (
    AnswerFacts,
    BodyWriter,
    CountingWriter,
    StreamWriter,
    json_text,
)
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, TextLogprob

END = RequestEnd(3, 1, 2)


def make_facts(**changes: Any) -> AnswerFacts:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": 'm"odel',
        "created": 5,
        "fingerprint": "fp",
        "is_chat": True,
        "logprobs": False,
    }
    return AnswerFacts(**{**fields, **changes})


def events_of(raw: bytes) -> list[Any]:
    """Split a stream as a client does: events end with an empty line, data is one line."""
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event[6:] for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@given(st.lists(st.text(), max_size=6), st.booleans(), st.booleans())
def test_any_text_survives_the_prepared_bytes(
    texts: list[str], is_chat: bool, with_usage: bool
) -> None:
    writer = StreamWriter(make_facts(is_chat=is_chat, with_usage=with_usage))
    raw = b"".join(writer.delta(ChoiceDelta(0, i, (i,), text)) for i, text in enumerate(texts))
    raw += writer.end(ChoiceEnd(0, "stop")) + writer.finish(END)
    *events, done = events_of(raw)
    choices = [event["choices"][0] for event in events if event["choices"]]
    joined = "".join(
        choice["delta"].get("content", "") if is_chat else choice["text"] for choice in choices
    )
    assert (joined, done) == ("".join(texts), "[DONE]")
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert all(event["model"] == 'm"odel' for event in events)
    assert [event.get("usage") is not None for event in events].count(True) == with_usage
    assert all(("usage" in event) == with_usage for event in events)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "ü"])), max_size=8),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_counted_events_tell_every_token_once(
    deltas: list[tuple[int, str]], num_hidden: int, is_chat: bool, logprobs: bool
) -> None:
    facts = make_facts(is_chat=is_chat, logprobs=logprobs, with_timing=True)
    plain, counting = StreamWriter(facts), CountingWriter(facts)
    outputs = [ChoiceDelta(0, 0, (7,) * number, text) for number, text in deltas]
    end = ChoiceEnd(0, "stop", None, sum(number for number, _ in deltas) + num_hidden)

    without = events_of(b"".join(map(plain.delta, outputs)) + plain.end(end))
    events = events_of(b"".join(map(counting.delta, outputs)) + counting.end(end))

    counts = [event.pop("isthmus", {"num_tokens": 0})["num_tokens"] for event in events]
    assert sum(counts) == end.num_tokens
    assert min(counts) >= 0
    assert events == without


def test_counts_are_of_each_choice() -> None:
    writer = CountingWriter(make_facts(with_timing=True))
    raw = writer.delta(ChoiceDelta(0, 0, (1,), "")) + writer.delta(ChoiceDelta(1, 0, (1,), "b"))
    raw += writer.delta(ChoiceDelta(0, 1, (1, 2), "a")) + writer.end(ChoiceEnd(1, "stop", None, 1))

    counted = [(e["choices"][0]["index"], e["isthmus"]["num_tokens"]) for e in events_of(raw)[:2]]
    assert counted == [(1, 1), (0, 3)]
    assert events_of(raw)[-1]["isthmus"] == {"num_tokens": 0}


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("with_timing", [True, False])
def test_events_put_together_by_others_are_the_writers_own(
    is_chat: bool, with_timing: bool
) -> None:
    facts = make_facts(is_chat=is_chat, with_timing=with_timing)
    kind = CountingWriter if with_timing else StreamWriter
    own, framed = kind(facts), kind(facts)
    assert framed.frame_of(0) is None, "the first event of a chat is another"
    assert own.delta(ChoiceDelta(0, 0, (1,), "a")) == framed.delta(ChoiceDelta(0, 0, (1,), "a"))

    frame = framed.frame_of(0)
    assert frame is not None
    event = own.delta(ChoiceDelta(0, 1, (2,), 'b"\n'))
    assert frame[0] + json_text('b"\n') + frame[1] == event
    framed.note_written(0, 1)

    for writer in (own, framed):  # one without text, which the next event tells of
        assert writer.delta(ChoiceDelta(0, 2, (3,), "")) == b""
    assert (framed.frame_of(0) is None) == with_timing
    assert own.end(ChoiceEnd(0, "stop", None, 3)) == framed.end(ChoiceEnd(0, "stop", None, 3))


def test_pending_text_makes_no_event() -> None:
    assert StreamWriter(make_facts()).delta(ChoiceDelta(0, 0, (1,), "")) == b""


def test_empty_answer_still_has_a_role_and_an_end() -> None:
    events = events_of(StreamWriter(make_facts()).end(ChoiceEnd(0, "stop")))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[1]["choices"][0]["finish_reason"] == "stop"


def test_broken_stream_has_neither_end_nor_done() -> None:
    raw = StreamWriter(make_facts()).error(RequestError("worker_lost", "died"))
    (event,) = events_of(raw)
    assert event == {
        "error": {"message": "died", "type": "server_error", "param": None, "code": "worker_lost"}
    }


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
@pytest.mark.parametrize("is_chat", [True, False])
def test_json_never_holds_infinities(value: float, is_chat: bool) -> None:
    item = TextLogprob(1, "a", b"a", value, ((1, "a", b"a", value),))
    facts = make_facts(is_chat=is_chat, logprobs=True, top_logprobs=1)
    chunk = ChoiceDelta(0, 0, (1,), "a", (item,))
    body = BodyWriter(facts, 1)
    body.delta(chunk)
    for raw in (StreamWriter(facts).delta(chunk), body.finish(END)):
        assert b"Infinity" not in raw
        assert b"NaN" not in raw
        assert b"-9999.0" in raw


def test_text_offsets_go_on_over_chunks() -> None:
    writer = StreamWriter(make_facts(is_chat=False, logprobs=True))
    raw = b"".join(
        writer.delta(ChoiceDelta(0, i, (i,), text, (TextLogprob(i, text, b"", -1.0),)))
        for i, text in enumerate(["ab", "c", "de"])
    )
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events_of(raw)]
    assert offsets == [[0], [2], [3]]
