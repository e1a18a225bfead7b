"""Limits, usage and the audit log as the front doors keep them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from services.common.clock import ManualClock, SystemClock
from services.common.errors import RequestError
from services.gateway.accounting import Accounting, AuditHooks
from services.gateway.admin_servicer import ADMIN, AdminConfig, AdminServicer
from services.gateway.auth import AuthConfig
from services.gateway.config import GatewayConfig
from services.gateway.hooks import NoHooks, RequestRecord
from services.gateway.keys import create_key
from services.gateway.namespaces import Namespaces, random_secret
from services.gateway.rate_limits import RateLimits, read_tenants
from services.gateway.server import GrpcService
from services.gateway.usage import Usage, UsageBook, read_all
from services.pb import admin_pb2, admin_pb2_grpc, inference_pb2
from services.router.model_set import ModelSet
from services.telemetry.audit import AuditConfig, AuditHead, AuditLog, verify_lines
from services.text.tokenizer import TextModel
from tests.support.fake_router import FakeRouter
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
PROMPT = "A sentinel nobody else would write: kumquat"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


class Books:
    """A gateway's configuration with every account kept, and two tenants' keys."""

    def __init__(self, tmp_path: Path, tenants: str = "{}", **audit: Any) -> None:
        self.dir = tmp_path
        self.clock = ManualClock()
        keys, limits = tmp_path / "keys.json", tmp_path / "tenants.yaml"
        self.acme, self.record = create_key(keys, "acme", "", 0)
        self.other, _ = create_key(keys, "other", "", 0)
        limits.write_text(tenants)
        names = Namespaces(random_secret())
        self.refused: list[str] = []
        self.audit = AuditLog(AuditConfig(tmp_path / "audit", "r0"), SystemClock(), **audit)
        self.accounting = Accounting(
            RateLimits(limits, names, self.clock, self.refused.append),
            UsageBook(tmp_path / "usage", "r0"),
            self.audit,
        )
        self.config = GatewayConfig(
            auth=AuthConfig(keys), namespaces=names, accounting=self.accounting, health_poll_s=0.02
        )

    def events(self) -> list[dict[str, Any]]:
        """What the audit log holds; checks its chain."""
        (path,) = (self.dir / "audit").iterdir()
        lines = path.read_bytes().splitlines(keepends=True)
        assert verify_lines(lines, AuditHead()).fault == ""
        return [json.loads(line) for line in lines]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask_grpc(doors: Doors, key: str) -> Any:
    """Run a request; give its call."""
    call = doors.stub.Generate(
        inference_pb2.GenerateRequest(text="Hi", max_tokens=8),
        metadata=tuple(bearer(key).items()),
        timeout=20,
    )
    async for _ in call:
        pass
    return call


async def test_requests_over_the_rate_are_429_at_both_doors(
    text_model: TextModel, tmp_path: Path
) -> None:
    books = Books(tmp_path, "default: {requests_per_s: 2, request_burst: 3, tokens_per_min: 60000}")
    async with open_doors(text_model, books.config) as doors:
        good = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        assert good.status_code == 200
        assert good.headers["x-ratelimit-limit-requests"] == "3"
        assert good.headers["x-ratelimit-remaining-requests"] == "2"
        assert good.headers["x-ratelimit-reset-requests"] == "0.50s"
        assert good.headers["x-ratelimit-limit-tokens"] == "60000"
        call = await ask_grpc(doors, books.acme)
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "1"
        tokenized = await doors.http.post(
            "/tokenize", json={"prompt": "x"}, headers=bearer(books.acme)
        )
        assert tokenized.status_code == 200
        over = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        assert over.status_code == 429
        assert over.json()["error"]["code"] == "rate_limited"
        assert (over.headers["retry-after"], over.headers["retry-after-ms"]) == ("1", "500")
        assert over.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_grpc(doors, books.acme)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(caught.value.trailing_metadata() or ())
        assert trailers["isthmus-code"] == "rate_limited"
        assert trailers["isthmus-retry-after-ms"] == "500"
        assert trailers["x-ratelimit-remaining-requests"] == "0"
        for door in (CHAT, "/v1/completions"):
            body = {**BODY, "prompt": "x"} if door != CHAT else BODY
            body = {k: v for k, v in body.items() if door == CHAT or k != "messages"}
            fine = await doors.http.post(door, json=body, headers=bearer(books.other))
            assert fine.status_code == 200
        books.clock.advance(0.5)
        assert (await ask_grpc(doors, books.acme)) is not None
        assert len(doors.router.calls) == 5
    assert books.refused == ["requests", "requests"]


async def test_tokens_of_prompt_and_answer_are_charged(
    text_model: TextModel, tmp_path: Path
) -> None:
    books = Books(tmp_path, "tenants: {acme: {tokens_per_min: 60}}")
    router = FakeRouter(text_model, text="word " * 80)
    async with open_doors(text_model, books.config, router) as doors:
        body = {**BODY, "max_tokens": 300}
        first = await doors.http.post(CHAT, json=body, headers=bearer(books.acme))
        used = first.json()["usage"]["total_tokens"]
        assert used > 60
        over = await doors.http.post(CHAT, json=body, headers=bearer(books.acme))
        assert over.status_code == 429
        assert int(over.headers["retry-after-ms"]) == (used - 60 + 1) * 1000
        assert (await doors.http.post(CHAT, json=body, headers=bearer(books.other))).is_success
        books.clock.advance(used - 60 + 1)
        assert (await doors.http.post(CHAT, json=body, headers=bearer(books.acme))).is_success
    assert books.refused == ["tokens"]


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_a_prompt_the_router_does_not_let_in_costs_no_tokens(
    text_model: TextModel, tmp_path: Path, door: str
) -> None:
    books = Books(tmp_path, "default: {tokens_per_min: 60}")
    router = FakeRouter(text_model, script=lambda _call: [RequestError("overloaded", "not now")])
    async with open_doors(text_model, books.config, router) as doors:
        for _ in range(5):
            if door == "http":
                answer = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
                assert answer.json()["error"]["code"] == "overloaded"
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask_grpc(doors, books.acme)
                assert dict(caught.value.trailing_metadata() or ())["isthmus-code"] == "overloaded"
        router.script = None
        good = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        assert good.headers["x-ratelimit-remaining-tokens"] == "60"


async def test_open_streams_are_limited_and_given_back(
    text_model: TextModel, tmp_path: Path
) -> None:
    books = Books(tmp_path, "default: {max_streams: 2}")
    router = FakeRouter(text_model, gate=asyncio.Event())
    async with open_doors(text_model, books.config, router) as doors:
        running = [
            asyncio.ensure_future(doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))),
            asyncio.ensure_future(ask_grpc(doors, books.acme)),
        ]
        await wait_until(lambda: router.num_open == 2)
        over = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        assert (over.status_code, over.headers["retry-after"]) == (429, "1")
        running[0].cancel()  # the client goes away
        await wait_until(lambda: router.num_open == 1)
        assert router.gate is not None
        router.gate.set()
        await running[1]
        assert (await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))).is_success
    assert books.refused == ["streams"]


async def test_usage_is_that_of_the_answers(text_model: TextModel, tmp_path: Path) -> None:
    books = Books(tmp_path)
    expected: dict[str, Usage] = {}
    async with open_doors(text_model, books.config) as doors:
        for tenant, key in (("acme", books.acme), ("other", books.other), ("acme", books.acme)):
            answer = await doors.http.post(CHAT, json=BODY, headers=bearer(key))
            used = answer.json()["usage"]
            one = Usage(1, used["prompt_tokens"], 0, used["completion_tokens"])
            expected[tenant] = expected.get(tenant, Usage()).plus(one)
        # A repeat of an answered request is read again, not made again.
        headers = {**bearer(books.other), "idempotency-key": "k"}
        for _ in range(2):
            assert (await doors.http.post(CHAT, json=BODY, headers=headers)).is_success
        expected["other"] = expected["other"].plus(one)
        bad = await doors.http.post(CHAT, json={"messages": []}, headers=bearer(books.acme))
        assert bad.status_code == 400
    assert read_all(tmp_path / "usage") == expected


async def test_every_request_is_in_the_audit_log_without_its_text(
    text_model: TextModel, tmp_path: Path
) -> None:
    """RB-118: who, what, how it ended; no key and no word of prompt or answer."""
    books = Books(tmp_path)
    async with open_doors(text_model, books.config) as doors:
        answer = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        await ask_grpc(doors, books.other)
        await doors.http.post(CHAT, json=BODY, headers=bearer("isk-0123456789ab-wrong"))
        await doors.http.get("/health")
        await doors.http.get("/metrics", headers=bearer(books.acme))
    events = books.events()
    assert [event["event"] for event in events] == [
        "router.started", "request", "request", "request", "request", "router.stopped",
    ]  # fmt: skip
    shown = [(e["door"], e["route"], e["code"], e["tenant"]) for e in events[1:5]]
    assert shown == [
        ("http", CHAT, "ok", "acme"),
        ("grpc", "Generate", "ok", "other"),
        ("http", CHAT, "unauthenticated", ""),
        ("http", "/metrics", "permission_denied", "acme"),
    ]
    assert events[1]["key_id"] == books.record.key_id
    assert events[1]["request_id"] == answer.headers["x-isthmus-request-id"]
    assert events[1]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert events[1]["peer"].startswith("127.0.0.1:")
    raw = b"".join(path.read_bytes() for path in (tmp_path / "audit").iterdir())
    for secret in ("kumquat", "sentinel", doors.router.text[:5], books.acme[-20:]):
        assert secret.encode() not in raw


class SlowAdmin(AdminServicer):
    """The admin service over a router with one open request; drains never end."""

    def __init__(self) -> None:
        super().__init__(cast("ModelSet", self), SystemClock(), AdminConfig(lease_ms=1000))
        self.is_draining = asyncio.Event()

    def kill(self, request_id: str) -> bool:
        if request_id == "fault":
            raise RuntimeError("a fault of the router")
        return request_id == "open"

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        self.is_draining.set()
        await asyncio.Event().wait()


async def test_the_audit_log_says_how_calls_of_operators_ended(
    text_model: TextModel, tmp_path: Path
) -> None:
    books, admin = Books(tmp_path), SlowAdmin()
    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    # What the interceptor takes for granted.
    assert not any(m.client_streaming or m.server_streaming for m in service.methods)
    key, record = create_key(tmp_path / "keys.json", "ops", "", 0, ("admin",))
    served = GrpcService(
        ADMIN,
        tuple(method.name for method in service.methods),
        lambda server: admin_pb2_grpc.add_AdminServicer_to_server(admin, server),
    )
    async with open_doors(text_model, books.config, extra_services=(served,)) as doors:
        stub = admin_pb2_grpc.AdminStub(doors.channel)
        metadata = tuple(bearer(key).items())
        for request_id in ("open", "gone", "fault"):
            asked = admin_pb2.KillRequestRequest(request_id=request_id)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.KillRequest(asked, metadata=metadata, timeout=20)
        drain = stub.DrainWorker(admin_pb2.DrainWorkerRequest(), metadata=metadata, timeout=20)
        async with asyncio.timeout(20):
            await admin.is_draining.wait()
        drain.cancel()
        await wait_until(lambda: len(doors.hooks.records) == 4)
        await ask_bad_admin(doors, metadata)
    events = [event for event in books.events() if event["event"] == "request"]
    assert [(event["route"], event["code"]) for event in events] == [
        ("KillRequest", "ok"),
        ("KillRequest", "not_found"),
        ("KillRequest", "internal"),
        ("DrainWorker", "cancelled"),
        ("KillRequest", "invalid_argument"),
    ]
    assert {event["key_id"] for event in events} == {record.key_id}
    assert all(event["peer"].startswith("ipv4:127.0.0.1:") for event in events)


async def ask_bad_admin(doors: Doors, metadata: Any) -> None:
    """Call an RPC of operators with bytes that are no message."""
    raw: Any = doors.channel.unary_unary(f"/{ADMIN}/KillRequest")
    with pytest.raises(grpc.aio.AioRpcError):
        await raw(b"\xff\xff", metadata=metadata, timeout=20)


async def test_without_an_audit_log_nothing_is_let_in(
    text_model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: requests are refused until there is room; with `drop` they are not."""
    is_full = True

    def write(handle: int, data: bytes) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return os.write(handle, data)

    monkeypatch.setattr("services.telemetry.audit.RETRY_S", 0.01)
    books = Books(tmp_path, write=write)
    async with open_doors(text_model, books.config) as doors:
        await wait_until(lambda: books.audit.is_blocked)
        refused = await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "audit_unavailable")
        assert refused.headers["retry-after"] == "1"
        ready = await doors.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (
            503, "the audit log cannot be written",
        )  # fmt: skip
        assert not doors.router.calls
        books.accounting.must_audit = False
        assert (await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))).is_success
        books.accounting.must_audit = True
        is_full = False
        await wait_until(lambda: not books.audit.is_blocked)
        assert (await doors.http.post(CHAT, json=BODY, headers=bearer(books.acme))).is_success
    codes = [event["code"] for event in books.events() if event["event"] == "request"]
    assert codes == ["audit_unavailable", "ok", "ok"]


def test_whoever_has_no_key_cannot_fill_the_disk(tmp_path: Path) -> None:
    clock, log = ManualClock(), AuditLog(AuditConfig(tmp_path, "r0"), ManualClock())
    hooks = AuditHooks(NoHooks(), log, clock)
    log.start()
    for _ in range(5000):
        hooks.request_finished(RequestRecord("http", "unknown", "unauthenticated", 0.0))
    clock.advance(1.0)
    hooks.request_finished(RequestRecord("http", "unknown", "unauthenticated", 0.0))
    assert log.close(10)
    (path,) = tmp_path.iterdir()
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(events) == 102
    assert [e["num_events"] for e in events if e["event"] == "request.refusals_left_out"] == [4900]


@pytest.mark.parametrize(
    "content",
    [
        "default: {requests_per_s: -1}",
        "default: {requests_per_sec: 1}",
        "tenants: {acme: {max_streams: 1.5}}",
        "tenants: 7",
        "[",
        "extra: {}",
    ],
)
def test_wrong_limits_are_refused_by_their_place(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(content)
    with pytest.raises(Exception, match=r"auth\.tenants_file"):
        read_tenants(path)


def test_entries_are_laid_over_the_default(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "default: {requests_per_s: 5, max_streams: 3}\n"
        "tenants: {a: {max_streams: 9}, free: {requests_per_s: 0, max_streams: 0}}\n"
    )
    table = read_tenants(path)
    limits = {tenant: table.of(tenant) for tenant in ("a", "b", "free")}
    assert limits["free"] is None
    assert limits["a"] is not None
    assert limits["b"] is not None
    assert (limits["a"].requests_per_s, limits["a"].max_streams) == (5, 9)
    assert (limits["b"].requests_per_s, limits["b"].max_streams) == (5, 3)
    with (
        pytest.raises(RequestError),
        RateLimits(path, Namespaces(random_secret()), ManualClock()).admitted("a") as _,
    ):
        raise RequestError("internal", "the context passes what is raised in it on")
