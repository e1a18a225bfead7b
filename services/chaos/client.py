"""A client that hears every frame of a call and lets no breach of the stream's rules pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from services.common.errors import ERROR_TABLE
from services.gateway.wire_names import FORCE_MODE
from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

_PLANES = {
    number: name.removeprefix("PLANE_").lower()
    for name, number in common_pb2.Plane.items()
    if number != common_pb2.PLANE_UNSPECIFIED
}


class StreamBroken(AssertionError):
    """A stream had a gap, a repeat, two ends, or an error without a code."""


@dataclass(slots=True)
class Heard:
    """What one call gave: per choice its tokens, text and end, or an error."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    logprob_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)  # tokens of the prompt and of the answer
    code: str = ""  # of the error table; "" = answered
    took_s: float = 0.0
    migrations: int = 0  # times it went on at another worker
    plane: str = ""  # over which its KV was handed off
    first_s: float | None = None  # when the first tokens came
    newest_s: float = 0.0  # when the newest frame came
    was_blind: bool = False  # its router decided without the store
    has_ids: bool = True  # its door gives token ids

    def forget(self) -> None:
        """Begin anew: the request is sent once more."""
        for heard in (self.token_ids, self.text, self.ends, self.logprob_ids, self.logprobs):
            heard.clear()
        self.code, self.took_s, self.newest_s, self.migrations = "", 0.0, 0.0, 0
        self.first_s = None

    @property
    def answer(self) -> object:
        """Everything that must equal the reference."""
        return self.token_ids, self.text, self.ends, self.logprob_ids


async def call(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    body: inference_pb2.GenerateRequest,
    *,
    timeout_s: float,
    mode: str = "",
    heard: Heard | None = None,
) -> Heard:
    """Run one request; gaps, repeats and second ends fail at once, errors must have a code.

    Args:
        heard: filled as frames come in, for who wants to look at a call it cancels.
    """
    heard, start = heard or Heard(), time.monotonic()
    metadata = ((FORCE_MODE.name, mode),) if mode else ()
    try:
        async for frame in stub.Generate(body, timeout=timeout_s, metadata=metadata):
            _take(heard, frame)
            heard.newest_s = time.monotonic() - start
            if heard.first_s is None and frame.num_tokens:
                heard.first_s = heard.newest_s
    except grpc.aio.AioRpcError as error:
        # A server that stops ends so what it has not looked at yet; no handler can add a code.
        # We would have had another exception, had we cancelled the call ourselves.
        was_unseen = error.code() is grpc.StatusCode.CANCELLED and heard.newest_s == 0
        heard.code = "unavailable" if was_unseen else code_of(error)
    heard.took_s = time.monotonic() - start
    return heard


def _take(heard: Heard, frame: inference_pb2.GenerateFrame) -> None:
    ids = heard.token_ids.setdefault(frame.choice, [])
    if frame.num_tokens:
        if frame.first_index != len(ids):
            raise StreamBroken("token indexes have a gap or a repeat")
        ids.extend(np.frombuffer(frame.token_ids, dtype="<u4").tolist())
    heard.text[frame.choice] = heard.text.get(frame.choice, "") + frame.text
    heard.logprob_ids.setdefault(frame.choice, []).extend(e.token_id for e in frame.logprobs)
    heard.logprobs.setdefault(frame.choice, []).extend(e.logprob for e in frame.logprobs)
    if frame.HasField("usage"):
        heard.usage = (frame.usage.prompt_tokens, frame.usage.completion_tokens)
    if frame.HasField("timing"):
        heard.migrations = frame.timing.migrations
        heard.plane = _PLANES.get(frame.timing.plane, "")
        heard.was_blind = frame.timing.routed_locally
    if frame.HasField("finish"):
        if frame.choice in heard.ends:
            raise StreamBroken("a choice ended twice")
        heard.ends[frame.choice] = (frame.finish.reason, frame.finish.stop)


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Return the code an error names; a dead door or a passed call deadline has none of its own."""
    code = (error.details() or "").partition(":")[0]
    if code in ERROR_TABLE:
        return code
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise StreamBroken(f"an error without a code: {error.code()} {error.details()}")
    return error.code().name.lower()
