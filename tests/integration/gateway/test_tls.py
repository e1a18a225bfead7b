"""TLS on both front doors: who gets in, and certificates that change under open streams."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509

from services.gateway.config import GatewayConfig
from services.pb import inference_pb2, inference_pb2_grpc
from services.router.api import ChoiceDelta, ChoiceEnd, GenerateCall, RequestEnd
from services.text.tokenizer import TextModel
from tests.support.certs import client_credentials, identity, make_certs
from tests.support.fake_router import FakeRouter, Step
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certs(tmp_path)
    return tmp_path


def with_tls(certs: Path) -> GatewayConfig:
    return GatewayConfig(tls=identity(certs, "doors", ca=False), health_poll_s=0.02)


def https(doors: Doors, certs: Path, **options: Any) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.maximum_version = options.pop("version", ssl.TLSVersion.TLSv1_3)
    return httpx.AsyncClient(
        base_url=f"https://localhost:{doors.http_port}", verify=context, trust_env=False, timeout=20
    )


def secure_channel(doors: Doors, certs: Path, name: str = "localhost") -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        f"127.0.0.1:{doors.grpc_port}",
        client_credentials(certs),
        options=[
            ("grpc.ssl_target_name_override", name),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


async def generate(channel: grpc.aio.Channel) -> str:
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(text="Hi", max_tokens=64)
    return "".join([frame.text async for frame in stub.Generate(request, timeout=20)])


async def shown_serial(doors: Doors) -> int:
    """Serial number of the certificate a new HTTPS connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", doors.http_port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_doors_answer_over_tls(
    text_model: TextModel, certs: Path, version: ssl.TLSVersion
) -> None:
    async with open_doors(text_model, with_tls(certs)) as doors:
        async with https(doors, certs, version=version) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == doors.router.text
        async with secure_channel(doors, certs) as channel:
            assert await generate(channel) == doors.router.text


async def test_plaintext_and_unknown_names_get_no_answer(
    text_model: TextModel, certs: Path, tmp_path: Path
) -> None:
    async with open_doors(text_model, with_tls(certs)) as doors:
        with pytest.raises(httpx.HTTPError):
            await doors.http.get("/health")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(doors.channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with secure_channel(doors, certs, "elsewhere") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not doors.router.calls


async def test_rotated_certificates_count_at_once_and_drop_no_stream(
    text_model: TextModel, certs: Path
) -> None:
    """RB-093: streams that are open go on, new connections get the new certificate."""
    gate = asyncio.Event()
    ids = [int(i) for i in text_model.encode("one two three", add_special=False)]

    def script(call: GenerateCall) -> list[Step]:
        deltas: list[Step] = [ChoiceDelta(0, i, (t,), f"{i} ") for i, t in enumerate(ids)]
        return [*deltas, ChoiceEnd(0, "stop", None, len(ids)), RequestEnd(1, 0, len(ids))]

    router = FakeRouter(text_model, script=script)
    async with open_doors(text_model, with_tls(certs), router) as doors:
        first = await shown_serial(doors)
        async with https(doors, certs) as http, secure_channel(doors, certs) as channel:
            assert (await http.get("/health")).status_code == 200
            assert await generate(channel)
            router.gate = gate
            by_http = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT))
            by_grpc = asyncio.ensure_future(generate(channel))
            await wait_until(lambda: router.num_open == 2)
            make_certs(certs)
            second = await shown_serial(doors)
            assert second != first
            async with secure_channel(doors, certs) as late:
                answer = asyncio.ensure_future(generate(late))
                await wait_until(lambda: router.num_open == 3)
                gate.set()
                texts = [(await by_http).json()["choices"][0]["message"]["content"]]
                texts += [await by_grpc, await answer]
    assert texts == ["".join(f"{i} " for i in range(len(ids)))] * 3
