"""Any message, and bytes that are none, get an answer or a coded error over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.pb import common_pb2, inference_pb2
from services.text.tokenizer import TextModel
from tests.support.gateway import Doors, open_doors, toy_text_model

pytestmark = pytest.mark.integration

U32 = st.sampled_from([0, 1, 2, 20, 4096, 2**31, 2**32 - 1])
FLOATS = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, -3.0, 1e30, float("inf"), float("nan")])


def make_sampling(fields: dict[str, Any]) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


SAMPLING: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "temperature": FLOATS,
        "top_p": FLOATS,
        "top_k": U32,
        "min_p": FLOATS,
        "presence_penalty": FLOATS,
        "frequency_penalty": FLOATS,
        "repetition_penalty": FLOATS,
        "seed": st.sampled_from([0, 1, 2**64 - 1]),
        "stop_token_ids": st.lists(U32, max_size=3),
        "top_logprobs": U32,
        "min_tokens": U32,
    },
).map(make_sampling)
CHATS = st.lists(
    st.builds(
        inference_pb2.ChatMessage,
        role=st.sampled_from(["user", "assistant", "system", "tool", "", "\x00"]),
        content=st.text(max_size=5),
    ),
    max_size=3,
).map(lambda messages: inference_pb2.Chat(messages=messages))
INPUTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.text(max_size=8).map(lambda text: {"text": text}),
    st.binary(max_size=9).map(lambda raw: {"token_ids": raw}),
    CHATS.map(lambda chat: {"chat": chat}),
)
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["", "toy-llama", "other"]),
        "max_tokens": U32,
        "min_tokens": U32,
        "n": U32,
        "stop": st.lists(st.text(max_size=4), max_size=3),
        "timeout_ms": st.sampled_from([0, 5000, 2**32 - 1]),
        "priority": U32,
        "top_logprobs": U32,
        "request_id": st.text(max_size=4),
        "sampling": SAMPLING,
    },
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Doors]:
    text_model: TextModel = toy_text_model(tmp_path_factory.mktemp("toy"))
    async with open_doors(text_model) as opened:
        yield opened


async def outcome(call: Any) -> tuple[grpc.aio.AioRpcError | None, list[Any]]:
    """Give how a stream ended and what came before."""
    frames: list[Any] = []
    try:
        async for frame in call:
            frames.append(frame)  # noqa: PERF401 - the frames before an error count too
    except grpc.aio.AioRpcError as error:
        return error, frames
    return None, frames


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=INPUTS, others=OTHERS)
@pytest.mark.asyncio(loop_scope="module")
async def test_any_request_ends_with_a_clear_status(
    doors: Doors, prompt: dict[str, Any], others: dict[str, Any]
) -> None:
    request = inference_pb2.GenerateRequest(**prompt, **others)
    error, frames = await outcome(doors.stub.Generate(request, timeout=10))
    if error is None:
        ends = [frame.choice for frame in frames if frame.WhichOneof("end")]
        assert sorted(ends) == list(range(doors.router.calls[-1].sampling.n))
        return
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert dict(error.trailing_metadata())["isthmus-code"] != "internal"


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(raw=st.binary(max_size=40))
@pytest.mark.asyncio(loop_scope="module")
async def test_any_bytes_end_with_a_status(doors: Doors, raw: bytes) -> None:
    method: Any = doors.channel.unary_stream("/isthmus.v1.Inference/Generate")
    error, frames = await outcome(method(raw, timeout=10))
    if error is None:  # the bytes happened to be a request
        assert frames
        return
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert "Traceback" not in (error.details() or "")
