"""Call the gRPC front door from tests: one request in, everything it answered out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

TIMEOUT_S = 120.0


@dataclass(slots=True)
class Answer:
    """What one Generate call returned, per choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    usage: inference_pb2.Usage | None = None
    timing: common_pb2.Timing | None = None

    @property
    def mode(self) -> str:
        """Where it ran: REMOTE, LOCAL or STAY."""
        assert self.timing is not None
        return common_pb2.Mode.Name(self.timing.mode).removeprefix("MODE_")


def pack(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as the API wants them."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def request(
    token_ids: Sequence[int] | str, *, max_tokens: int = 24, n: int = 1, **sampling: float
) -> inference_pb2.GenerateRequest:
    """Build a request, greedy unless told otherwise; a string is sent as text."""
    body = inference_pb2.GenerateRequest(max_tokens=max_tokens, n=n, return_token_ids=True)
    if isinstance(token_ids, str):
        body.text = token_ids
    else:
        body.token_ids = pack(token_ids)
    sampling.setdefault("temperature", 0.0)
    for name, value in sampling.items():
        setattr(body.sampling, name, value)
    return body


def generate(
    address: str,
    body: inference_pb2.GenerateRequest,
    *,
    mode: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Run one request to its end and check the frame rules on the way."""
    metadata = (("x-isthmus-force-mode", mode),) if mode else ()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return collect(stub.Generate(body, timeout=timeout_s, metadata=metadata))


def collect(frames: Iterable[inference_pb2.GenerateFrame]) -> Answer:
    """Gather a stream of frames; indexes must run without gap or repeat, ends come once."""
    answer = Answer()
    for frame in frames:
        ids = answer.token_ids.setdefault(frame.choice, [])
        answer.text.setdefault(frame.choice, "")
        if frame.num_tokens:
            assert frame.first_index == len(ids), "token indexes have a gap or a repeat"
            new = np.frombuffer(frame.token_ids, dtype="<u4").tolist()
            assert len(new) == frame.num_tokens
            ids.extend(new)
        answer.text[frame.choice] += frame.text
        if frame.HasField("finish"):
            assert frame.choice not in answer.finish, "a choice ended twice"
            answer.finish[frame.choice] = frame.finish.reason
        if frame.HasField("usage"):
            answer.usage = frame.usage
        if frame.HasField("timing"):
            answer.timing = frame.timing
    return answer
