"""The official openai client, unchanged, against the HTTP door."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from services.common.errors import RequestError
from services.router.api import ChoiceDelta, ChoiceEnd, GenerateCall, RequestEnd, TextLogprob
from services.text.tokenizer import TextModel
from tests.support.fake_router import TIMING, Step
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

MODEL = "toy-llama"
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
TEXT = "Hello wörld 🫠!"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@contextlib.asynccontextmanager
async def client_of(doors: Doors, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{doors.base_url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        **options,
    ) as client:
        yield client


async def test_chat_gives_text_usage_and_ids(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT)
        call = doors.router.calls[0]
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(call.token_ids)
        assert answer.usage.total_tokens == len(call.token_ids) + answer.usage.completion_tokens
        assert answer._request_id == call.request_id
        assert answer.id == "chatcmpl-" + call.request_id.removeprefix("req-")


async def test_chat_prompt_is_the_models_template(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        parts: list[Any] = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": parts},
        ]
        await client.chat.completions.create(model=MODEL, messages=messages)
        assert text_model.decode(doors.router.calls[0].token_ids) == (
            "<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_streamed_chat_joins_to_the_whole_text(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        assert [delta.role for delta in deltas].count("assistant") == 1
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        usages = [chunk.usage for chunk in chunks]
        assert usages[:-1] == [None] * (len(chunks) - 1)
        assert usages[-1] is not None
        assert usages[-1].completion_tokens == len(text_model.encode(TEXT, False))
        assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_several_choices_streamed_and_not(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=CHAT, n=3)
        assert [choice.message.content for choice in whole.choices] == [TEXT] * 3
        texts = ["", "", ""]
        ends = []
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=CHAT, n=3, stream=True
        ):
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        assert texts == [TEXT] * 3
        assert sorted(ends) == [0, 1, 2]


async def test_completions_take_text_and_ids(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        first = await client.completions.create(model=MODEL, prompt="Once upon")
        await client.completions.create(model=MODEL, prompt=[5, 6, 7])
        await client.completions.create(model=MODEL, prompt=["Once upon"])
        assert first.choices[0].text == TEXT
        prompts = [call.token_ids.tolist() for call in doors.router.calls]
        assert prompts[0] == prompts[2] == text_model.encode("Once upon", True).tolist()
        assert prompts[1] == [5, 6, 7]


async def test_streamed_completion(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        stream = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_cut_by_max_tokens_says_length(text_model: TextModel, stream: bool) -> None:
    """RB-081: in both forms."""
    async with open_doors(text_model) as doors, client_of(doors) as client:
        arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 2}
        if stream:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(stream=True, **arguments)
            ]
            reason = chunks[-1].choices[0].finish_reason
        else:
            reason = (await client.chat.completions.create(**arguments)).choices[0].finish_reason
        assert reason == "length"
        assert doors.router.calls[0].sampling.max_tokens == 2


async def test_stop_string_ends_the_text(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, stop=["wör"])
        assert answer.choices[0].message.content == "Hello "
        assert answer.choices[0].finish_reason == "stop"


async def test_every_sampling_parameter_reaches_the_router(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            temperature=0.5,
            top_p=0.9,
            n=2,
            seed=-1,
            stop="x",
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            max_completion_tokens=7,
            user="me",
            metadata={"a": "b"},
            store=False,
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "min_tokens": 3,
                "ignore_eos": True,
                "stop_token_ids": [9],
            },
            extra_headers={"x-isthmus-force-mode": "local", "x-isthmus-timeout-ms": "5000"},
        )
        call = doors.router.calls[0]
        sampling = call.sampling
        assert (sampling.temperature, sampling.top_p, sampling.n) == (0.5, 0.9, 2)
        assert sampling.seed == 2**64 - 1
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.25)
        assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
        assert (sampling.min_tokens, sampling.max_tokens) == (3, 7)
        assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (9,))
        assert (call.stop, call.force_mode) == (("x",), "LOCAL")
        assert call.deadline - call.received_at == pytest.approx(5.0)


async def test_absent_seed_is_drawn_anew_each_time(text_model: TextModel) -> None:
    """RB-076: requests without a seed do not share one."""
    async with open_doors(text_model) as doors, client_of(doors) as client:
        for _ in range(4):
            await client.chat.completions.create(model=MODEL, messages=CHAT)
        assert len({call.sampling.seed for call in doors.router.calls}) == 4


def logprob_script(call: GenerateCall) -> list[Step]:
    first = TextLogprob(7, "H", b"H", -0.5, ((7, "H", b"H", -0.5), (8, "J", b"J", float("-inf"))))
    half = TextLogprob(9, "\ufffd", b"\xc3", float("-inf"))
    return [
        ChoiceDelta(0, 0, (7,), "H", (first,)),
        ChoiceDelta(0, 1, (9,), "", (half,)),
        ChoiceEnd(0, "length", None, 2),
        RequestEnd(3, 0, 2, TIMING),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_keep_exact_bytes(text_model: TextModel, stream: bool) -> None:
    """RB-067: half a character keeps its byte; infinities are written as numbers."""
    async with open_doors(text_model) as doors, client_of(doors) as client:
        doors.router.script = logprob_script
        arguments: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
        content: list[Any] = []
        if stream:
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=CHAT, stream=True, **arguments
            ):
                if chunk.choices[0].logprobs is not None:
                    content += chunk.choices[0].logprobs.content or []
        else:
            answer = await client.chat.completions.create(model=MODEL, messages=CHAT, **arguments)
            assert answer.choices[0].logprobs is not None
            content += answer.choices[0].logprobs.content or []
        assert [item.token for item in content] == ["H", "\ufffd"]
        assert [item.bytes for item in content] == [[72], [0xC3]]
        assert [item.logprob for item in content] == [-0.5, -9999.0]
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
            ("H", -0.5),
            ("J", -9999.0),
        ]


async def test_completion_logprobs_have_the_legacy_form(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        doors.router.script = logprob_script
        answer = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["H", "\ufffd"]
        assert logprobs.token_logprobs == [-0.5, -9999.0]
        assert logprobs.text_offset == [0, 1]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] == {"H": -0.5, "J": -9999.0}
        assert doors.router.calls[0].sampling.top_logprobs == 2


async def test_models_are_listed_and_found(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "isthmus"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other/model")
        assert caught.value.code == "model_not_found"


async def test_errors_before_the_first_token_have_their_http_status(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, client_of(doors) as client:
        doors.router.script = lambda _: [
            RequestError("overloaded", "queues are full", retry_after_ms=1500)
        ]
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
            assert caught.value.code == "overloaded"
            assert caught.value.response.headers["retry-after"] == "2"


async def test_error_after_the_headers_is_an_event_and_no_end(text_model: TextModel) -> None:
    """RB-063: a cut answer never looks complete."""
    async with open_doors(text_model) as doors, client_of(doors) as client:
        doors.router.script = lambda _: [
            ChoiceDelta(0, 0, (1,), "par"),
            RequestError("worker_lost", "the worker died"),
        ]
        with pytest.raises(openai.APIError, match="the worker died"):
            async for _ in await client.chat.completions.create(
                model=MODEL, messages=CHAT, stream=True
            ):
                pass
        raw = await doors.http.post("/v1/chat/completions", json={"messages": CHAT, "stream": True})
        events = [line[6:] for line in raw.text.splitlines() if line.startswith("data: ")]
        assert [json.loads(event).get("error", {}).get("code") for event in events] == [
            None,
            "worker_lost",
        ]
        assert '"finish_reason":"' not in raw.text
        assert doors.hooks.records[-1].code == "worker_lost"


@pytest.mark.parametrize("stream", [False, True])
async def test_record_of_a_request_has_where_it_ran_and_the_clients_own_id(
    text_model: TextModel, stream: bool
) -> None:
    async with open_doors(text_model) as doors:
        body = {"messages": CHAT, "stream": stream}
        await doors.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine 1"})
        await wait_until(lambda: len(doors.hooks.records) == 1)
        [record] = doors.hooks.records
    assert record.client_request_id == "mine_1"
    assert record.end is not None
    assert (record.end.timing.mode, record.end.timing.decode_worker) == ("REMOTE", "decode-0")


async def test_timing_is_given_on_request_only(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        body = {"messages": CHAT}
        plain = await doors.http.post("/v1/chat/completions", json=body)
        timed = await doors.http.post(
            "/v1/chat/completions", json=body, headers={"x-isthmus-timing": "1"}
        )
        streamed = await doors.http.post(
            "/v1/chat/completions", json={**body, "stream": True}, headers={"x-isthmus-timing": "1"}
        )
        assert "isthmus" not in plain.json()
        assert plain.headers["x-isthmus-mode"] == "REMOTE"
        assert timed.json()["isthmus"]["decode_worker"] == "decode-0"
        last = json.loads(streamed.text.split("data: ")[-2])
        assert last["isthmus"]["handoff_us"] == 300
        assert streamed.text.endswith("data: [DONE]\n\n")
