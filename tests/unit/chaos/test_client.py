"""What a client makes of a call that its server ended without a code of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from services.chaos.client import StreamBroken, call
from services.pb import inference_pb2, inference_pb2_grpc


class _Stub:
    """Gives frames, then ends with a status."""

    def __init__(self, num_frames: int, status: grpc.StatusCode) -> None:
        self._num_frames = num_frames
        self._status = status

    async def Generate(self, *_: object, **__: object) -> AsyncIterator[Any]:  # noqa: N802 - as in the proto
        for index in range(self._num_frames):
            token = (7).to_bytes(4, "little")
            yield inference_pb2.GenerateFrame(first_index=index, num_tokens=1, token_ids=token)
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(self._status, empty, empty, details=self._status.name)


def stub(num_frames: int, status: grpc.StatusCode) -> inference_pb2_grpc.InferenceAsyncStub:
    """A stub as the client knows it."""
    return cast("inference_pb2_grpc.InferenceAsyncStub", _Stub(num_frames, status))


async def test_a_call_that_a_stopping_server_never_looked_at_may_be_sent_again() -> None:
    body = inference_pb2.GenerateRequest()
    heard = await call(stub(0, grpc.StatusCode.CANCELLED), body, timeout_s=1)
    assert heard.code == "unavailable"


@pytest.mark.parametrize(
    ("num_frames", "status"),
    [(1, grpc.StatusCode.CANCELLED), (0, grpc.StatusCode.INTERNAL), (2, grpc.StatusCode.UNKNOWN)],
)
async def test_any_other_end_without_a_code_is_a_fault(
    num_frames: int, status: grpc.StatusCode
) -> None:
    body = inference_pb2.GenerateRequest()
    with pytest.raises(StreamBroken, match="without a code"):
        await call(stub(num_frames, status), body, timeout_s=1)
