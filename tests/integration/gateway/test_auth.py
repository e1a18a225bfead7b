"""Default deny: every route and RPC, by enumeration, with no, wrong and right keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from services.common.access import GRPC_POLICY, HTTP_POLICY, SCOPES, Access, Scope
from services.common.clock import SystemClock
from services.common.errors import ConfigError
from services.gateway.auth import AuthConfig
from services.gateway.config import GatewayConfig
from services.gateway.keys import create_key, revoke_key
from services.gateway.server import GatewayServer, GrpcService
from services.pb import admin_pb2, admin_pb2_grpc
from services.text.tokenizer import TextModel
from tests.support.fake_router import FakeRouter
from tests.support.gateway import Doors, open_doors, toy_text_model

pytestmark = pytest.mark.integration

OPEN_HTTP = {"/health", "/ready"}
OPEN_GRPC = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
WORKER = "/isthmus.v1.Worker/"
WRONG = "isk-0123456789ab-" + "x" * 43


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def locked(keys_file: Path) -> GatewayConfig:
    return GatewayConfig(auth=AuthConfig(keys_file, poll_s=0.0), health_poll_s=0.02)


def admin_service() -> GrpcService:
    class Admin(admin_pb2_grpc.AdminServicer):
        async def ClusterStatus(self, request: Any, context: Any) -> Any:
            return admin_pb2.ClusterStatusResponse()

    admin = Admin()  # type: ignore[abstract]  # only this one is called
    return GrpcService(
        "isthmus.v1.Admin",
        tuple(method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods),
        lambda server: admin_pb2_grpc.add_AdminServicer_to_server(admin, server),
    )


async def status_of(doors: Doors, method: str, key: str | None) -> grpc.StatusCode:
    """Call any RPC with an empty message, which every one of them can parse.

    Sent at once, not from an iterator: grpc.aio reports INTERNAL instead of the server's status
    where that comes before the message is written.
    """
    method_of: Any = doors.channel.unary_stream(method)
    call = method_of(
        b"",
        metadata=() if key is None else (("authorization", f"Bearer {key}"),),
        timeout=30,
    )
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


async def test_every_route_but_health_and_ready_needs_a_key(
    text_model: TextModel, keys_file: Path
) -> None:
    """RB-120: enumerated from the application itself."""
    key, _ = create_key(keys_file, "acme", "", 0, SCOPES)
    async with open_doors(text_model, locked(keys_file)) as doors:
        routes = doors.server.http.app.routes
        assert {route.path for route in routes} == HTTP_POLICY.keys()
        for route in routes:
            path = route.path.replace("{model_id:path}", "toy-llama")
            for presented in (None, WRONG, "x", key + "x", key[:-1]):
                headers = {} if presented is None else {"authorization": f"Bearer {presented}"}
                answer = await doors.http.request(route.method, path, headers=headers)
                if path in OPEN_HTTP:
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, (path, presented)
                    assert answer.json()["error"]["code"] == "unauthenticated"
                    assert answer.headers["www-authenticate"] == "Bearer"
            right = await doors.http.request(
                route.method, path, headers={"authorization": f"Bearer {key}"}
            )
            assert right.status_code in (200, 400), path


@pytest.mark.parametrize(
    "path",
    [
        "/V1/chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/./chat/completions",
        "/health/../v1/chat/completions",
        "/health//v1/chat/completions",
        "/health/",
        "//health",
        "/HEALTH",
        "/health%2f",
        "/invocations",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
async def test_odd_spellings_find_no_way_around(
    text_model: TextModel, keys_file: Path, path: str
) -> None:
    """RB-120: odd case, double and trailing slashes, aliases."""
    create_key(keys_file, "acme", "", 0)
    async with open_doors(text_model, locked(keys_file)) as doors:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await doors.http.request(method, path, json=BODY)
            assert answer.status_code == 401
        assert not doors.router.calls


async def reflected_methods(doors: Doors, key: str) -> set[str]:
    from google.protobuf import descriptor_pb2

    metadata = (("authorization", f"Bearer {key}"),)
    method = doors.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**query: Any) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**query)
        return await method(iter([request]), metadata=metadata, timeout=5).read()

    names = [s.name for s in (await ask(list_services="")).list_services_response.service]
    methods = set()
    for name in names:
        answer = await ask(file_containing_symbol=name)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            methods |= {
                f"/{file.package}.{service.name}/{rpc.name}"
                for service in file.service
                for rpc in service.method
                if f"{file.package}.{service.name}" in names
            }
    return methods


async def test_every_rpc_but_health_needs_a_key(text_model: TextModel, keys_file: Path) -> None:
    """RB-120: enumerated by reflection; Admin included as the router process has it."""
    key, _ = create_key(keys_file, "acme", "", 0, SCOPES)
    config = locked(keys_file)
    async with open_doors(text_model, config, extra_services=(admin_service(),)) as doors:
        methods = await reflected_methods(doors, key)
        # Health's file of a newer grpc may describe more methods than the servicer has.
        assert set(doors.server.grpc_methods) <= methods | OPEN_GRPC
        of_doors = {name for name in GRPC_POLICY if not name.startswith(WORKER)}
        assert set(doors.server.grpc_methods) == of_doors
        for method in methods:
            refused = await status_of(doors, method, None)
            wrong = await status_of(doors, method, WRONG)
            right = await status_of(doors, method, key)
            if method in OPEN_GRPC:
                assert grpc.StatusCode.UNAUTHENTICATED not in (refused, wrong, right)
            else:
                assert (refused, wrong) == (grpc.StatusCode.UNAUTHENTICATED,) * 2, method
                assert right is not grpc.StatusCode.UNAUTHENTICATED, method
        for method in ("/isthmus.v1.Inference/generate", "/x/y"):
            assert await status_of(doors, method, None) is grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(doors, method, key) is grpc.StatusCode.UNIMPLEMENTED
        for method in (name for name in GRPC_POLICY if name.startswith(WORKER)):
            assert await status_of(doors, method, None) is grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(doors, method, key) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_key_may_do_what_its_scope_names_and_no_more(
    text_model: TextModel, keys_file: Path, scope: Scope
) -> None:
    key, _ = create_key(keys_file, "acme", "", 0, (scope,))
    allowed = {Access.OPEN, Access.KEY, Access(scope)}
    async with open_doors(
        text_model, locked(keys_file), extra_services=(admin_service(),)
    ) as doors:
        for route in doors.server.http.app.routes:
            path = route.path.replace("{model_id:path}", "toy-llama")
            headers = {"authorization": f"Bearer {key}"}
            answer = await doors.http.request(route.method, path, headers=headers)
            may = HTTP_POLICY[route.path] in allowed
            assert (answer.status_code == 403) is not may, path
            if not may:
                assert answer.json()["error"]["code"] == "permission_denied"
                assert HTTP_POLICY[route.path].value in answer.json()["error"]["message"]
        for method in doors.server.grpc_methods:
            refused = await status_of(doors, method, key) is grpc.StatusCode.PERMISSION_DENIED
            assert refused is (GRPC_POLICY[method] not in allowed), method


async def test_expired_key_is_refused_while_the_router_runs(
    text_model: TextModel, keys_file: Path
) -> None:
    soon = SystemClock().unix_ms() + 600_000
    alive, _ = create_key(keys_file, "acme", "", 0, ("inference",), soon)
    dead, _ = create_key(keys_file, "acme", "", 0, ("inference",), soon - 1_200_000)
    async with open_doors(text_model, locked(keys_file)) as doors:
        for key, status in ((alive, 200), (dead, 401)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await doors.http.post(CHAT, json=BODY, headers=headers)
            assert answer.status_code == status
        assert "expired" in answer.json()["error"]["message"]


async def test_calls_without_a_key_are_recorded_at_both_doors(
    text_model: TextModel, keys_file: Path
) -> None:
    create_key(keys_file, "acme", "", 0)
    async with open_doors(text_model, locked(keys_file)) as doors:
        for method in ("/isthmus.v1.Inference/Generate", "/made.up/Name"):
            assert await status_of(doors, method, None) is grpc.StatusCode.UNAUTHENTICATED
        await doors.http.post("/v1/completions", json={})
        records = [(record.door, record.route, record.code) for record in doors.hooks.records]
        assert all("127.0.0.1:" in record.peer for record in doors.hooks.records)
    assert records == [
        ("grpc", "Generate", "unauthenticated"),
        ("grpc", "unknown", "unauthenticated"),
        ("http", "/v1/completions", "unauthenticated"),
    ]


async def test_route_without_a_policy_keeps_the_server_from_starting(
    text_model: TextModel,
) -> None:
    service = GrpcService("x.Extra", ("Backdoor",), lambda server: None)
    server = GatewayServer(
        FakeRouter(text_model),
        text_model,
        text_model.manifest,
        GatewayConfig(),
        extra_services=(service,),
    )
    with pytest.raises(ConfigError, match=r"/x\.Extra/Backdoor"):
        await server.start("127.0.0.1:0", "127.0.0.1:0")
    await server.stop(0)


async def test_only_health_and_ready_are_open() -> None:
    assert {path for path, access in HTTP_POLICY.items() if access is Access.OPEN} == OPEN_HTTP
    assert {name for name, access in GRPC_POLICY.items() if access is Access.OPEN} == OPEN_GRPC


async def test_key_decides_the_tenant(text_model: TextModel, keys_file: Path) -> None:
    acme, _ = create_key(keys_file, "acme", "", 0)
    other, _ = create_key(keys_file, "other", "", 0)
    async with open_doors(text_model, locked(keys_file)) as doors:
        for headers in (
            {"authorization": f"Bearer {acme}"},
            {"authorization": f"bearer  {other}"},
            {"x-api-key": acme},
        ):
            assert (await doors.http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        calls = doors.router.calls
    assert [call.tenant for call in calls] == ["acme", "other", "acme"]
    assert calls[0].namespace == calls[2].namespace != calls[1].namespace
    assert len({"acme", "other", "", *(call.namespace for call in calls)}) == 5


@pytest.mark.parametrize("name", ["cache_salt", "tenant", "namespace", "prompt_cache_key"])
async def test_nothing_a_client_sends_names_its_tenant(
    text_model: TextModel, keys_file: Path, name: str
) -> None:
    """RB-040: a namespace that could be asked for would give the timing signal back."""
    acme, _ = create_key(keys_file, "acme", "", 0)
    other, _ = create_key(keys_file, "other", "", 0)
    async with open_doors(text_model, locked(keys_file)) as doors:
        headers = {"authorization": f"Bearer {acme}"}
        assert (await doors.http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        stolen = doors.router.calls[0].namespace
        headers = {"authorization": f"Bearer {other}", f"x-isthmus-{name}": stolen, name: stolen}
        answer = await doors.http.post(CHAT, json={**BODY, name: stolen}, headers=headers)
        # A parameter of OpenAI's that promises nothing is ignored; the others are refused.
        assert answer.status_code == (200 if name == "prompt_cache_key" else 400)
        assert (await doors.http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        assert all(call.namespace != stolen for call in doors.router.calls[1:])


async def test_idempotency_keys_of_tenants_are_apart(
    text_model: TextModel, keys_file: Path
) -> None:
    keys = [create_key(keys_file, tenant, "", 0)[0] for tenant in ("acme", "other")]
    async with open_doors(text_model, locked(keys_file)) as doors:
        for key in keys:
            headers = {"authorization": f"Bearer {key}", "idempotency-key": "same"}
            assert (await doors.http.post(CHAT, json=BODY, headers=headers)).status_code == 200
        assert len(doors.router.calls) == 2


def damage(path: Path) -> None:
    path.write_text("{ half written")


def remove(path: Path) -> None:
    path.unlink()


async def test_changed_file_counts_without_a_restart(
    text_model: TextModel, keys_file: Path
) -> None:
    first, record = create_key(keys_file, "acme", "", 0)
    async with open_doors(text_model, locked(keys_file)) as doors:

        async def status(key: str) -> int:
            answer = await doors.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return answer.status_code

        assert await status(first) == 200
        second, _ = create_key(keys_file, "acme", "", 0)
        assert (await status(first), await status(second)) == (200, 200)
        revoke_key(keys_file, record.key_id)
        assert (await status(first), await status(second)) == (401, 200)
        damage(keys_file)
        assert await status(second) == 200  # a damaged file keeps the last good keys
        remove(keys_file)
        assert await status(second) == 401  # no file, no keys


async def test_absent_keys_file_refuses_everyone(text_model: TextModel, keys_file: Path) -> None:
    async with open_doors(text_model, locked(keys_file)) as doors:
        assert (await doors.http.get("/v1/models")).status_code == 401
        assert (await doors.http.get("/health")).status_code == 200


async def test_keys_are_nowhere_but_with_their_owner(
    text_model: TextModel, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, _ = create_key(keys_file, "acme", "ci", 0)
    secret = key.split("-", 2)[2]  # it may have dashes of its own
    async with open_doors(text_model, locked(keys_file)) as doors:
        for presented in (key, key + "x"):
            answer = await doors.http.post(
                CHAT, json=BODY, headers={"authorization": f"Bearer {presented}"}
            )
            assert secret not in answer.text
            assert secret not in json.dumps(dict(answer.headers))
    assert secret not in caplog.text
