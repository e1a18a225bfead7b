"""Several models, aliases, canaries, mirrors and sessions as clients of both doors meet them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from services.common.clock import SystemClock
from services.gateway.config import GatewayConfig
from services.gateway.traffic_control import TrafficControl
from services.pb import inference_pb2
from services.router.traffic import parse_table
from services.text.tokenizer import TextModel
from tests.support.fake_router import FakeRouter
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy") / "model")


@contextlib.asynccontextmanager
async def doors_with(
    text_model: TextModel, rules: str, max_mirrors: int = 8
) -> AsyncIterator[tuple[Doors, list[str]]]:
    """Serve the toy model and one more, `next`; also gives what became of mirrored requests."""
    outcomes: list[str] = []
    traffic = TrafficControl(None, SystemClock())
    if rules:
        traffic.set(parse_table(rules, "test"))
    config = GatewayConfig(
        health_poll_s=0.02,
        more_texts={"next": text_model},
        traffic=traffic,
        max_mirrors=max_mirrors,
        note_mirrored=outcomes.append,
    )
    router = FakeRouter(text_model, more_names=("next",))
    async with open_doors(text_model, config, router) as doors:
        yield doors, outcomes


async def chat(doors: Doors, model: str, words: str = "hello", **headers: str) -> dict[str, object]:
    """Ask the HTTP door; gives status and what matters of the body."""
    body = {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 4}
    answer = await doors.http.post(CHAT, json=body, headers=headers)
    return {"status": answer.status_code, **answer.json()}


async def test_request_chooses_its_model_by_name_and_by_alias(text_model: TextModel) -> None:
    name = text_model.manifest.name
    async with doors_with(text_model, "aliases: {smart: [{model: next}]}") as (doors, _):
        for asked, runs in ((name, name), ("next", "next"), ("smart", "next")):
            answer = await chat(doors, asked)
            assert (answer["status"], answer["model"]) == (200, runs)
            assert doors.router.calls[-1].model == runs
        listed = (await doors.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [name, "next", "smart"]
        assert (await doors.http.get("/v1/models/smart")).json()["id"] == "smart"
        request = inference_pb2.GenerateRequest(text="x", model="smart", max_tokens=1)
        async for _frame in doors.stub.Generate(request):
            pass
        assert doors.router.calls[-1].model == "next"
        counted = await doors.http.post("/tokenize", json={"model": "smart", "prompt": "a b"})
        assert counted.status_code == 200


async def test_unknown_model_is_404_and_lists_what_there_is(text_model: TextModel) -> None:
    async with doors_with(text_model, "aliases: {smart: [{model: next}]}") as (doors, _):
        answer = await chat(doors, "gpt-9")
        error = answer["error"]
        assert isinstance(error, dict)
        assert (answer["status"], error["code"], error["param"]) == (
            404, "model_not_found", "model",
        )  # fmt: skip
        assert error["message"].endswith(f"served: {text_model.manifest.name}, next, smart")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.stub.Tokenize(inference_pb2.TokenizeRequest(model="gpt-9", text="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert doors.router.calls == []


async def test_conversation_keeps_its_side_of_a_canary(text_model: TextModel) -> None:
    name = text_model.manifest.name
    rules = f"aliases: {{chat: [{{model: {name}}}, {{model: next}}]}}"
    async with doors_with(text_model, rules) as (doors, _):
        first = {words: (await chat(doors, "chat", words))["model"] for words in "abcdefgh"}
        again = {words: (await chat(doors, "chat", words))["model"] for words in "abcdefgh"}
        assert first == again
        assert set(first.values()) == {name, "next"}
        kept = {
            (await chat(doors, "chat", words, **{"x-isthmus-session": "s1"}))["model"]
            for words in "abcdefgh"
        }
        assert len(kept) == 1
        assert doors.router.calls[-1].session == "s1"


async def test_mirrored_request_runs_again_for_nobody(text_model: TextModel) -> None:
    name = text_model.manifest.name
    async with doors_with(text_model, f"mirrors: {{{name}: {{to: next}}}}") as (doors, outcomes):
        assert (await chat(doors, name))["model"] == name
        await wait_until(lambda: outcomes == ["ok"])
        original, copy = doors.router.calls
        assert (copy.model, copy.token_ids.tolist()) == ("next", original.token_ids.tolist())
        assert copy.request_id != original.request_id
        assert copy.namespace == original.namespace
        assert len(doors.hooks.records) == 1  # the copy passed no door


async def test_copies_are_bounded_and_never_hold_an_original_up(text_model: TextModel) -> None:
    """The mirror's model stands still: originals are answered, what has no room is dropped."""
    name = text_model.manifest.name
    rules = f"mirrors: {{{name}: {{to: next}}}}"
    async with doors_with(text_model, rules, max_mirrors=1) as (doors, outcomes):
        router, still = doors.router, asyncio.Event()
        router.model_gates["next"] = still
        for _ in range(3):
            assert (await chat(doors, name))["status"] == 200
        await wait_until(lambda: outcomes == ["dropped", "dropped"])
        still.set()
        await wait_until(lambda: outcomes[-1] == "ok")


async def test_mirror_that_fails_is_nobodys_business(text_model: TextModel) -> None:
    name = text_model.manifest.name
    async with doors_with(text_model, f"mirrors: {{{name}: {{to: next}}}}") as (doors, outcomes):
        router = doors.router
        router.script = lambda call: (
            [RuntimeError("broken")] if call.model == "next" else router.answer(call)
        )
        assert (await chat(doors, name))["status"] == 200
        await wait_until(lambda: outcomes == ["failed"])
        router.num_cancelled = 0


async def test_too_long_a_session_name_is_refused(text_model: TextModel) -> None:
    async with doors_with(text_model, "") as (doors, _):
        answer = await chat(doors, "next", **{"x-isthmus-session": "s" * 5000})
        error = answer["error"]
        assert isinstance(error, dict)
        assert (answer["status"], error["param"]) == (400, "x-isthmus-session")
