"""Bad input gets a clear error that names field and limit, and nothing else suffers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.text.tokenizer import TextModel
from tests.support.gateway import Doors, open_doors, toy_text_model

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
AT_ONCE_S = 5.0  # mostly 5 ms; the machine may be busy, and a hang lasts longer than this


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(text_model: TextModel) -> AsyncIterator[Doors]:
    async with open_doors(text_model) as opened:
        yield opened


async def refused(doors: Doors, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Send a body; check the error's shape, and that a normal request is served after it."""
    before = len(doors.router.calls)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    started = time.monotonic()
    answer = await doors.http.post(path, content=content)
    assert time.monotonic() - started < AT_ONCE_S
    assert answer.status_code == status, answer.text[:500]
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert len(error["message"]) < 600
    assert len(doors.router.calls) == before  # it never reached the router
    normal = await doors.http.post(CHAT, json={"messages": USER})
    assert normal.status_code == 200
    return error


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", **fields}


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], "  \n\t ", "\u3000"])
@pytest.mark.asyncio(loop_scope="module")
async def test_empty_prompts(doors: Doors, prompt: Any) -> None:
    """RB-068: refused, and a normal request still works."""
    assert (await refused(doors, TEXT, {"prompt": prompt}))["code"] == "empty_prompt"


@pytest.mark.asyncio(loop_scope="module")
async def test_empty_messages(doors: Doors) -> None:
    """RB-068."""
    assert (await refused(doors, CHAT, {"messages": []}))["code"] == "empty_prompt"


@pytest.mark.parametrize("value", [0, -1, 2**31, "10", 1.5, True, 10_000])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_max_tokens(doors: Doors, name: str, value: Any) -> None:
    """RB-071 and RB-072: an error at once, never a hang."""
    started = time.monotonic()
    error = await refused(doors, CHAT, chat(**{name: value}))
    assert time.monotonic() - started < AT_ONCE_S
    assert error["param"] == name
    assert name in error["message"]
    fits = "context_length_exceeded" if value == 10_000 else "invalid_argument"
    assert error["code"] == fits


@pytest.mark.parametrize("body", [{}, {"max_tokens": None}])
@pytest.mark.asyncio(loop_scope="module")
async def test_absent_max_tokens_is_what_the_context_leaves(
    doors: Doors, text_model: TextModel, body: dict[str, Any]
) -> None:
    """RB-071."""
    context = text_model.manifest.context_length
    answer = await doors.http.post(TEXT, json={"prompt": [5] * (context - 1), **body})
    assert answer.status_code == 200
    assert doors.router.calls[-1].sampling.max_tokens == 1
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("token_id", [-1, "vocab", 2**31 - 1, 2**63, 10**30])
@pytest.mark.asyncio(loop_scope="module")
async def test_token_ids_out_of_the_vocabulary(
    doors: Doors, text_model: TextModel, token_id: Any
) -> None:
    """RB-073."""
    value = text_model.manifest.vocab_size if token_id == "vocab" else token_id
    error = await refused(doors, TEXT, {"prompt": [1, value]})
    assert error["code"] == "token_out_of_range"
    assert "prompt[1]" in error["message"]
    error = await refused(doors, TEXT, text(stop_token_ids=[value]))
    assert error["code"] == "token_out_of_range"
    error = await refused(doors, "/detokenize", {"tokens": [value]})
    assert error["code"] == "token_out_of_range"
    assert (await refused(doors, TEXT, text(logit_bias={str(value): 1})))["param"] == "logit_bias"


@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_longer_than_the_context(doors: Doors, text_model: TextModel) -> None:
    context = text_model.manifest.context_length
    for prompt in ([5] * context, [5] * 100_000, "a b" * context):
        error = await refused(doors, TEXT, {"prompt": prompt})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(context) in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_larger_than_any_pool(doors: Doors) -> None:
    doors.router.max_pool_tokens = 64
    try:
        answer = await doors.http.post(TEXT, json={"prompt": [5] * 64})
        assert answer.json()["error"]["code"] == "prompt_too_large_for_pool"
        answer = await doors.http.post(TEXT, json={"prompt": [5] * 60, "max_tokens": 5})
        assert answer.json()["error"]["code"] == "prompt_too_large_for_pool"
        assert (await doors.http.post(TEXT, json={"prompt": [5] * 60})).status_code == 200
        assert doors.router.calls[-1].sampling.max_tokens == 4
    finally:
        doors.router.max_pool_tokens = 0


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_model(doors: Doors) -> None:
    error = await refused(doors, CHAT, chat(model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-9" in error["message"]


UNSUPPORTED: list[tuple[str, Any]] = [
    ("tools", [{"type": "function"}]),
    ("tools", []),
    ("tool_choice", "auto"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"$ref": "#"}}),
    ("guided_regex", "("),
    ("guided_regex", "(a+)+$" * 1000),
    ("structured_outputs", {"json": {}}),
    ("cache_salt", "of another tenant"),
    ("lora", "chat"),
    ("logit_bias", {"1": 5}),
    ("functions", []),
    ("function_call", "auto"),
    ("audio", {}),
    ("modalities", ["text"]),
    ("reasoning_effort", "low"),
    ("prediction", {}),
    ("web_search_options", {}),
    ("parallel_tool_calls", True),
    ("store", True),
    ("service_tier", "flex"),
    ("prompt", "x"),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"tokenize": True}),
    ("add_generation_prompt", False),
    ("guided_json", {}),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 10**6),
    ("best_of", 10**7),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
@pytest.mark.asyncio(loop_scope="module")
async def test_parameters_that_are_not_built_are_refused_by_name(
    doors: Doors, name: str, value: Any
) -> None:
    """RB-040, RB-061, RB-078, RB-079, RB-123: salts, grammars, prompt_logprobs, templates."""
    error = await refused(doors, CHAT, chat(**{name: value}))
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3), ("messages", USER)]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_completion_parameters_that_are_not_built(
    doors: Doors, name: str, value: Any
) -> None:
    error = await refused(doors, TEXT, text(**{name: value}))
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", ["temprature", "n ", "__class__", "x" * 5000, ""])
@pytest.mark.asyncio(loop_scope="module")
async def test_parameters_nobody_knows(doors: Doors, name: str) -> None:
    error = await refused(doors, CHAT, chat(**{name: 1}))
    assert (error["code"], error["param"]) == ("unknown_parameter", name[:64])


WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 17),
    ("n", 10**7),
    ("n", "2"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", 2**64),
    ("seed", "x"),
    ("stop", 5),
    ("stop", [1]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 100_000),
    ("stop", "x" * 257),
    ("stop", "\ud800"),
    ("stop_token_ids", [1] * 65),
    ("stop_token_ids", "1"),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("user", "u" * 1000),
    ("metadata", "x"),
    ("metadata", {str(i): "x" for i in range(17)}),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("logprobs", 3),
    ("model", 7),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_values_name_their_field(doors: Doors, name: str, value: Any) -> None:
    """RB-080 among them: n, stop; each refused before anything is allocated for it."""
    error = await refused(doors, CHAT, chat(**{name: value}))
    assert (error["code"], error["param"]) == ("invalid_argument", name)
    assert name in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_many_prompts_and_huge_logprobs(doors: Doors) -> None:
    """RB-079 and RB-080."""
    error = await refused(doors, TEXT, {"prompt": ["x"] * 100_000})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt")
    for value in (21, 10**6, -1):
        error = await refused(doors, TEXT, text(logprobs=value))
        assert (error["code"], error["param"]) == ("invalid_argument", "logprobs")


MESSAGES: list[tuple[Any, str, str]] = [
    ([{"role": "wizard", "content": "x"}], "invalid_argument", "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "unsupported_parameter", "messages[0].role"),
    ([{"role": 5, "content": "x"}], "invalid_argument", "messages[0].role"),
    ([{"content": "x"}], "invalid_argument", "messages[0].role"),
    ([{"role": "user", "content": None}], "invalid_argument", "messages[0].content"),
    ([{"role": "user"}], "invalid_argument", "messages[0].content"),
    ([{"role": "user", "content": 5}], "invalid_argument", "messages[0].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "invalid_argument",
        "messages[0].content[0].text",
    ),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    ([{"role": "user", "content": "x", "mood": 1}], "unknown_parameter", "messages[0].mood"),
    (["hi"], "invalid_argument", "messages[0]"),
    ("hi", "invalid_argument", "messages"),
    (USER * 1025, "invalid_argument", "messages"),
    ([{"role": "user", "content": "\ud800"}], "invalid_argument", "messages"),
]


@pytest.mark.parametrize(("messages", "code", "param"), MESSAGES)
@pytest.mark.asyncio(loop_scope="module")
async def test_messages(doors: Doors, messages: Any, code: str, param: str) -> None:
    """RB-077."""
    error = await refused(doors, CHAT, {"messages": messages})
    assert (error["code"], error["param"]) == (code, param)


BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b'{"messages": NaN}', "invalid_json"),
    (b'{"temperature": -Infinity, "prompt": "x"}', "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    (b"\x00\x01\x02", "invalid_json"),
    (b'{"prompt": "a\nb"}', "invalid_json"),
    (b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", "invalid_json"),
    (b"[" * 1_000_000, "invalid_json"),
    (b'{"a":' * 100_000, "invalid_json"),
    (b"[" + b"{}," * 100_000 + b"{}]", "invalid_json"),
    (b'{"seed": ' + b"9" * 10_000 + b"}", "invalid_json"),
    (b"null", "invalid_argument"),
    (b"[]", "invalid_argument"),
    (b'"x"', "invalid_argument"),
    (b"{}", "invalid_argument"),
]


@pytest.mark.parametrize(("body", "code"), BODIES)
@pytest.mark.asyncio(loop_scope="module")
async def test_bodies_that_are_not_requests(doors: Doors, body: bytes, code: str) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        assert (await refused(doors, path, body))["code"] == code


@pytest.mark.asyncio(loop_scope="module")
async def test_brackets_in_text_are_text(doors: Doors) -> None:
    message = '"[{' * 300 + "\\"
    answer = await doors.http.post(TEXT, json={"prompt": message, "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_oversized_body_is_refused_while_it_is_read(doors: Doors) -> None:
    """RB-080: with and without content-length."""
    limit = doors.server.desk.config.limits.max_body_bytes
    error = await refused(doors, CHAT, b" " * (limit + 1), 413)
    assert (error["code"], str(limit) in error["message"]) == ("body_too_large", True)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    answer = await doors.http.post(CHAT, content=endless())
    assert answer.status_code == 413


@pytest.mark.asyncio(loop_scope="module")
async def test_routes_and_methods_have_error_objects(doors: Doors) -> None:
    for method, path, status, code in [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1//chat/completions", 404, "not_found"),
        ("POST", CHAT + "/", 404, "not_found"),
    ]:
        answer = await doors.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        if status == 405:
            assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
@pytest.mark.asyncio(loop_scope="module")
async def test_get_routes_answer_head_without_a_body(doors: Doors, path: str) -> None:
    got = await doors.http.get(path)
    head = await doors.http.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    assert got.content
    assert not head.content
    assert head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-isthmus-force-mode", "SIDEWAYS"),
        ("x-isthmus-timeout-ms", "soon"),
        ("x-isthmus-timeout-ms", "-5"),
        ("x-isthmus-timeout-ms", "99999999"),
        ("idempotency-key", "k" * 200),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_headers_are_named(doors: Doors, header: str, value: str) -> None:
    answer = await doors.http.post(CHAT, json=chat(), headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header


@pytest.mark.asyncio(loop_scope="module")
async def test_oversized_head_is_refused(doors: Doors) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 100_000)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    writer.close()
    assert (await doors.http.get("/health")).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_tokenize_and_detokenize(doors: Doors, text_model: TextModel) -> None:
    answer = await doors.http.post("/tokenize", json={"prompt": "Hi 🫠"})
    tokens = answer.json()["tokens"]
    assert tokens == text_model.encode("Hi 🫠", True).tolist()
    assert answer.json()["count"] == len(tokens)
    back = await doors.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "Hi 🫠"}
    chat_tokens = (await doors.http.post("/tokenize", json={"messages": USER})).json()["tokens"]
    assert text_model.decode(chat_tokens).endswith("<|im_start|>assistant\n")
    assert (await refused(doors, "/tokenize", {"prompt": 5}))["param"] == "prompt"
    assert (await refused(doors, "/detokenize", {"tokens": "x"}))["param"] == "tokens"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_NAMES = """messages prompt model n stop seed temperature top_p max_tokens logprobs stream tools
stream_options top_logprobs metadata min_tokens stop_token_ids user x"""
NAMES = st.sampled_from(_NAMES.split())


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize"]),
    body=st.dictionaries(NAMES, JSON, max_size=5) | JSON,
    base=st.sampled_from([{"messages": USER}, {"prompt": "x"}, {"tokens": [1]}, {}]),
)
@pytest.mark.asyncio(loop_scope="module")
async def test_any_json_gets_an_answer_or_a_clear_error(
    doors: Doors, path: str, body: Any, base: dict[str, Any]
) -> None:
    sent = {**base, **body} if isinstance(body, dict) else body
    answer = await doors.http.post(path, content=json.dumps(sent).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] != "internal"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=st.binary(max_size=60))
@pytest.mark.asyncio(loop_scope="module")
async def test_any_bytes_get_a_clear_error(doors: Doors, body: bytes) -> None:
    answer = await doors.http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_argument", "empty_prompt")
