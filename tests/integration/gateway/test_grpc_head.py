"""Metadata of Generate: in one batch with a whole answer, else before its first frame."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.common.errors import RequestError
from services.gateway import grpc_head
from services.gateway.wire_names import GRPC_CLIENT_REQUEST_ID, REQUEST_ID
from services.pb import inference_pb2
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, RouterOutput
from services.text.tokenizer import TextModel
from tests.support.fake_router import TIMING, FakeRouter
from tests.support.gateway import open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

Request = inference_pb2.GenerateRequest
DELTA = ChoiceDelta(0, 0, (5,), "a")
END: list[RouterOutput] = [ChoiceEnd(0, "length", None, 1), RequestEnd(1, 0, 1, TIMING)]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(params=[True, False], ids=["joined", "ahead"])
def is_known_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(grpc_head, "IS_KNOWN_VERSION", request.param)
    return bool(request.param)


def test_the_version_of_grpc_that_is_locked_was_looked_at() -> None:
    """A newer one may have other private classes: look at them, then name it in grpc_head."""
    lock = Path("requirements.lock").read_text("utf-8")
    assert f"\ngrpcio=={grpc.__version__}" in lock
    assert grpc_head.IS_KNOWN_VERSION


@pytest.mark.usefixtures("is_known_version")
@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize(
    ("script", "num_frames"),
    [([[DELTA, *END]], 1), ([DELTA, 0.0, [*END]], 2)],
    ids=["whole", "in parts"],
)
async def test_an_answer_has_its_metadata_and_its_status(
    text_model: TextModel,
    script: list[RouterOutput | float],
    num_frames: int,
    max_tokens: int,
) -> None:
    router = FakeRouter(text_model, script=lambda _: script)
    async with open_doors(text_model, router=router) as doors:
        for _ in range(3):  # on one connection: a call that was left open would block it
            request = Request(text="Once", request_id="mine", max_tokens=max_tokens)
            call = doors.stub.Generate(request, timeout=10)
            frames = [frame async for frame in call]
            head = dict(await call.initial_metadata())
            assert len(frames) == num_frames
            assert head[REQUEST_ID.name] == frames[0].request_id
            assert head[GRPC_CLIENT_REQUEST_ID.name] == "mine"
            assert frames[-1].usage.completion_tokens == 1
            assert await call.code() is grpc.StatusCode.OK
            assert await call.details() == ""
            assert not await call.trailing_metadata()
        await wait_until(lambda: len(doors.hooks.records) == 3)
        assert {record.code for record in doors.hooks.records} == {"ok"}


@pytest.mark.usefixtures("is_known_version")
@pytest.mark.parametrize("before", [[], [DELTA]], ids=["at once", "after a token"])
async def test_an_error_has_its_metadata_too(
    text_model: TextModel, before: list[RouterOutput]
) -> None:
    router = FakeRouter(
        text_model, script=lambda _: [*before, RequestError("no_workers", "nobody is there")]
    )
    async with open_doors(text_model, router=router) as doors:
        call = doors.stub.Generate(Request(text="Once", max_tokens=1), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert dict(await call.initial_metadata())[REQUEST_ID.name]
        assert dict(caught.value.trailing_metadata())["isthmus-code"] == "no_workers"


async def test_who_waits_long_is_told_the_id_meanwhile(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_head, "HEAD_AFTER_S", 0.01)
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [[DELTA, *END]]
        doors.router.gate = asyncio.Event()
        call = doors.stub.Generate(Request(text="Once", max_tokens=1), timeout=60)
        head = dict(await call.initial_metadata())
        doors.router.gate.set()
        [frame] = [frame async for frame in call]
        assert frame.request_id == head[REQUEST_ID.name]
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.usefixtures("is_known_version")
async def test_who_leaves_before_anything_is_sent_is_recorded_as_that(
    text_model: TextModel,
) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        call = doors.stub.Generate(Request(text="Once", max_tokens=1), timeout=60)
        await wait_until(lambda: doors.router.num_open == 1)
        call.cancel()
        await wait_until(lambda: bool(doors.hooks.records))
        assert doors.hooks.records[-1].code == "cancelled"
