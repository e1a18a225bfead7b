"""isthmus.v1.Inference, health and reflection over a real channel."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from services.common.errors import RequestError
from services.gateway.config import GatewayConfig
from services.pb import common_pb2, inference_pb2
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, RouterOutput, TextLogprob
from services.text.tokenizer import TextModel
from tests.support.fake_router import TIMING, FakeRouter
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

TEXT = "Hello wörld 🫠!"
Request = inference_pb2.GenerateRequest


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


async def frames_of(doors: Doors, request: Request, **options: Any) -> list[Any]:
    options.setdefault("timeout", 10)
    return [frame async for frame in doors.stub.Generate(request, **options)]


async def failure_of(doors: Doors, request: Request, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await frames_of(doors, request, **options)
    return caught.value


def code_of(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata())["isthmus-code"])


async def test_frames_carry_text_counts_usage_and_timing(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        frames = await frames_of(doors, Request(text="Once", return_token_ids=True))
        call = doors.router.calls[0]
        expected = text_model.encode(TEXT, False)
        assert "".join(frame.text for frame in frames) == TEXT
        assert b"".join(frame.token_ids for frame in frames) == expected.tobytes()
        assert sum(frame.num_tokens for frame in frames) == len(expected)
        assert frames[0].request_id == call.request_id
        assert [frame.WhichOneof("end") for frame in frames].count("finish") == 1
        last = frames[-1]
        assert last.finish.reason == common_pb2.FINISH_REASON_STOP
        assert last.usage.prompt_tokens == len(call.token_ids)
        assert last.usage.completion_tokens == len(expected)
        assert last.timing.mode == common_pb2.MODE_REMOTE
        assert last.timing.plane == common_pb2.PLANE_MEMFD
        assert last.timing.decode_worker == "decode-0"
        assert last.timing.handoff_us == 300


async def test_each_choice_ends_once(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        frames = await frames_of(doors, Request(text="Once", n=3))
        ends = [frame.choice for frame in frames if frame.WhichOneof("end")]
        assert ends == [0, 1, 2]
        assert [frame.HasField("usage") for frame in frames].count(True) == 1


async def test_what_is_there_at_once_shares_a_frame_of_its_choice(text_model: TextModel) -> None:
    outputs: list[RouterOutput] = [
        ChoiceDelta(0, 0, (5,), "a"), ChoiceDelta(1, 0, (6, 7), "bc"),
        ChoiceEnd(1, "length", None, 2), ChoiceEnd(0, "stop", "a", 0), RequestEnd(1, 0, 2, TIMING),
    ]  # fmt: skip
    router = FakeRouter(text_model, script=lambda _: [outputs])
    async with open_doors(text_model, router=router) as doors:
        frames = await frames_of(doors, Request(text="Once", n=2))
    assert [(f.choice, f.first_index, f.num_tokens, f.text, f.finish.stop) for f in frames] == [
        (0, 0, 1, "a", ""), (1, 0, 2, "bc", ""), (0, 0, 0, "", "a"),
    ]  # fmt: skip
    assert [f.HasField("finish") for f in frames] == [False, True, True]
    assert [f.HasField("usage") for f in frames] == [False, False, True]

    router.script = lambda _: [outputs[:1], 0.0, [outputs[3], outputs[4]]]
    async with open_doors(text_model, router=router) as doors:
        apart = await frames_of(doors, Request(text="Once"))
    assert [(f.num_tokens, f.text, f.HasField("usage")) for f in apart] == [
        (1, "a", False), (0, "", True),
    ]  # fmt: skip
    router.script = lambda _: [[ChoiceDelta(0, 0, (5,), "a"), *outputs[3:]]]
    async with open_doors(text_model, router=router) as doors:
        [whole] = await frames_of(doors, Request(text="Once"))
    assert (whole.text, whole.finish.reason) == ("a", common_pb2.FINISH_REASON_STOP)
    assert whole.usage.completion_tokens == 2
    assert whole.request_id


async def test_chat_and_token_ids_reach_the_router(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        message = inference_pb2.ChatMessage(role="user", content="Hi")
        await frames_of(doors, Request(chat=inference_pb2.Chat(messages=[message])))
        await frames_of(doors, Request(token_ids=ids(5, 6, 7)))
        first, second = (call.token_ids for call in doors.router.calls)
        assert text_model.decode(first).startswith("<|im_start|>user\nHi<|im_end|>\n")
        assert second.tolist() == [5, 6, 7]


async def test_sampling_and_metadata_reach_the_router(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        sampling = common_pb2.SamplingParams(temperature=0.0, seed=9, top_k=4, logprobs=True)
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        request = Request(text="x", sampling=sampling, max_tokens=3, stop=["q"], min_tokens=1)
        await frames_of(
            doors, request, metadata=(("x-isthmus-force-mode", "stay"), ("traceparent", trace))
        )
        call = doors.router.calls[0]
        assert call.sampling.is_greedy
        assert (call.sampling.seed, call.sampling.top_k, call.sampling.max_tokens) == (9, 4, 3)
        assert (call.stop, call.force_mode, call.traceparent) == (("q",), "STAY", trace)


async def test_logprobs_are_written(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        item = TextLogprob(7, "\ufffd", b"\xc3", -0.5, ((7, "\ufffd", b"\xc3", -0.5),))
        doors.router.script = lambda _: [
            ChoiceDelta(0, 0, (7,), "", (item,)),
            ChoiceEnd(0, "length", None, 1),
            RequestEnd(1, 0, 1, TIMING),
        ]
        frames = await frames_of(doors, Request(text="x", top_logprobs=1))
        assert frames[0].logprobs[0].raw == b"\xc3"
        assert frames[0].logprobs[0].top[0].logprob == -0.5
        assert doors.router.calls[0].sampling.top_logprobs == 1


BAD: list[tuple[Request, str, grpc.StatusCode]] = [
    (Request(), "empty_prompt", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text=""), "empty_prompt", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text=" \n"), "empty_prompt", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(token_ids=b""), "empty_prompt", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(chat=inference_pb2.Chat()), "empty_prompt", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(token_ids=b"abc"), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(token_ids=ids(2**31)), "token_out_of_range", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(token_ids=ids(2**32 - 1)), "token_out_of_range", grpc.StatusCode.INVALID_ARGUMENT),
    (
        Request(token_ids=ids(*[5] * 4000)),
        "context_length_exceeded",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (Request(text="x", model="no"), "model_not_found", grpc.StatusCode.NOT_FOUND),
    (Request(text="x", max_tokens=0), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (
        Request(text="x", max_tokens=10_000),
        "context_length_exceeded",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (Request(text="x", n=0), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text="x", n=10**7), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text="x", stop=["a"] * 17), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text="x", top_logprobs=21), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text="x", timeout_ms=2**32 - 1), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (Request(text="x", request_id="r" * 200), "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT),
    (
        Request(text="x", sampling=common_pb2.SamplingParams(temperature=float("nan"))),
        "invalid_argument",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        Request(text="x", sampling=common_pb2.SamplingParams(top_p=0.0)),
        "invalid_argument",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        Request(
            chat=inference_pb2.Chat(
                messages=[inference_pb2.ChatMessage(role="wizard", content="x")]
            )
        ),
        "invalid_argument",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
]


async def test_bad_requests_get_status_code_and_trailer(text_model: TextModel) -> None:
    """RB-068, RB-071, RB-072, RB-073, RB-077, RB-080 over gRPC; the server goes on."""
    async with open_doors(text_model) as doors:
        for request, code, status in BAD:
            error = await failure_of(doors, request)
            assert (code_of(error), error.code()) == (code, status), request
            assert (error.details() or "").startswith(f"{code}: ")
            assert dict(error.trailing_metadata())["isthmus-retryable"] == "false"
        assert not doors.router.calls
        assert await frames_of(doors, Request(text="x"))


async def test_router_errors_keep_code_and_retry_hint(text_model: TextModel) -> None:
    """RB-063: a stream that fails after its first frames ends with a status that is not OK."""
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [
            ChoiceDelta(0, 0, (1,), "par"),
            RequestError("worker_lost", "the worker died", retry_after_ms=250),
        ]
        call = doors.stub.Generate(Request(text="x"), timeout=10)
        frame = await call.read()
        assert isinstance(frame, inference_pb2.GenerateFrame)
        assert frame.text == "par"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict(caught.value.trailing_metadata())
        assert trailers["isthmus-code"] == "worker_lost"
        assert trailers["isthmus-retryable"] == "true"
        assert trailers["isthmus-retry-after-ms"] == "250"


async def test_stray_cancellation_still_answers(text_model: TextModel) -> None:
    """RB-089: a cancelled inner task never leaves a client waiting."""
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [ChoiceDelta(0, 0, (1,), "a"), asyncio.CancelledError()]
        started = time.monotonic()
        error = await failure_of(doors, Request(text="x"), timeout=20)
        assert time.monotonic() - started < 1.0
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_faults_of_ours_are_internal_and_say_nothing(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [ValueError("secret path /etc/x")]
        error = await failure_of(doors, Request(text="x"))
        assert code_of(error) == "internal"
        assert "secret" not in (error.details() or "")
        doors.router.script = None
        assert await frames_of(doors, Request(text="x"))


async def test_client_cancel_cancels_the_router(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [ChoiceDelta(0, 0, (1,), "a"), 60.0]
        call = doors.stub.Generate(Request(text="x"))
        await call.read()
        call.cancel()
        await wait_until(lambda: doors.router.num_cancelled == 1)
        assert doors.router.num_open == 0


async def test_nearer_deadline_wins(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        await frames_of(doors, Request(text="x", timeout_ms=3000), timeout=60)
        await frames_of(doors, Request(text="x", timeout_ms=60_000), timeout=3)
        await frames_of(doors, Request(text="x"), timeout=None)
        left = [call.deadline - call.received_at for call in doors.router.calls]
        assert left == [pytest.approx(3, abs=0.5), pytest.approx(3, abs=0.5), pytest.approx(600)]


async def test_request_that_overstays_is_ended(text_model: TextModel) -> None:
    """A router that misses the deadline does not keep the client."""
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [60.0]
        started = time.monotonic()
        error = await failure_of(doors, Request(text="x", timeout_ms=50), timeout=20)
        assert code_of(error) == "deadline_exceeded"
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 3.0


async def test_tokenize_and_detokenize(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        made = await doors.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))
        assert made.token_ids == text_model.encode(TEXT, True).tobytes()
        assert made.count == len(made.token_ids) // 4
        back = await doors.stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=made.token_ids)
        )
        assert back.text == TEXT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids(2**31)))
        assert code_of(caught.value) == "token_out_of_range"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.stub.Tokenize(inference_pb2.TokenizeRequest(text="x", model="no"))
        assert code_of(caught.value) == "model_not_found"


async def test_models(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        answer = await doors.stub.ListModels(inference_pb2.ListModelsRequest())
        assert [model.id for model in answer.models] == ["toy-llama"]
        assert answer.models[0].vocab_size == text_model.manifest.vocab_size


async def test_large_messages_pass_and_larger_name_the_limit(text_model: TextModel) -> None:
    """RB-088: 5 MiB of prompt reach validation; more than 16 MiB do not pass."""
    async with open_doors(text_model) as doors:
        error = await failure_of(doors, Request(text="x y" * (5 << 20)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "limit" in (error.details() or "")
        error = await failure_of(doors, Request(text="x" * (17 << 20)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_frequent_client_pings_are_allowed(text_model: TextModel) -> None:
    """RB-087: a silent call with pings every second outlives the default server's patience."""
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        options = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        address = f"127.0.0.1:{doors.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.unary_stream(
                "/isthmus.v1.Inference/Generate",
                request_serializer=Request.SerializeToString,
                response_deserializer=inference_pb2.GenerateFrame.FromString,
            )(Request(text="x"), timeout=30)
            await asyncio.sleep(5.0)  # a default server sends GOAWAY after 4.0 s
            doors.router.gate.set()
            assert [frame async for frame in call]


async def test_health_follows_readiness(text_model: TextModel) -> None:
    async with open_doors(text_model, GatewayConfig(health_poll_s=0.01)) as doors:
        stub = health_pb2_grpc.HealthStub(doors.channel)
        serving = health_pb2.HealthCheckResponse.SERVING

        for name in ("", "isthmus.v1.Inference", "readiness"):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=10)
            while (await watch.read()).status != serving:
                pass
        doors.router.ready = (False, "no decode worker")
        while (await watch.read()).status == serving:
            pass
        check = await stub.Check(health_pb2.HealthCheckRequest(service=""))
        assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
        check = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert check.status == serving  # what has no workers must not be started again
        answer = await doors.http.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no decode worker")
        assert (await doors.http.get("/health")).status_code == 200


async def reflect(doors: Doors, version: str, **query: Any) -> Any:
    method = doors.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(**query)]), timeout=5)
    return await call.read()


async def test_a_router_without_hints_says_so_and_stays_in(text_model: TextModel) -> None:
    """RB-050: plain load balancing is a sign, and no reason to be taken out."""
    router = FakeRouter(text_model)
    async with open_doors(text_model, router=router) as doors:
        assert (await doors.http.get("/ready")).json() == {"status": "ready"}
        router.degraded = (True, "no answer from redis://user:secret@store")
        answer = await doors.http.get("/ready")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready", "degraded": ["prefix_hints"]}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes(text_model: TextModel, version: str) -> None:
    async with open_doors(text_model) as doors:
        listed = await reflect(doors, version, list_services="")
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            "isthmus.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for name in names:
            answer = await reflect(doors, version, file_containing_symbol=name)
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(raw)
                for raw in answer.file_descriptor_response.file_descriptor_proto
            ]
            services = {f"{file.package}.{s.name}" for file in files for s in file.service}
            assert name in services
        missing = await reflect(doors, version, file_containing_symbol="no.Such")
        assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
