"""Clients of a router in a process of their own: every answer timed, tokens counted.

    python -P -m services.bench.router_load ORDER

ORDER is a `LoadOrder` as JSON. Writes `ready`, waits for a line on its input, runs, and writes a
`LoadReport` as JSON: what the load costs is spent here and not in the process that is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

import grpc.aio
import numpy as np
import uvloop

from services.common.address import split_host_port
from services.gateway.wire_names import FORCE_MODE
from services.pb import common_pb2, inference_pb2

CALL_TIMEOUT_S = 300.0
_METHOD = "/isthmus.v1.Inference/Generate"
_CHANNELS = 4
_READ_BYTES = 1 << 16
_CLIENT_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_EVENT, _LAST_EVENT, _END = b"data: {", b"data: [DONE]", b"0\r\n\r\n"
_FIRST_LETTER, _NUM_LETTERS = ord("A"), 26  # printable in every vocabulary


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What to ask for, of whom, and how often."""

    door: Literal["grpc", "sse"]
    address: str
    prompt: Literal["ids", "text"]
    prompt_tokens: int
    max_tokens: int
    clients: int
    requests: int
    vocab_size: int
    seed: int
    api_key: str = ""
    core: int | None = None  # to run on; None = wherever
    mode: str = ""  # asked for by name; empty = the router chooses


@dataclass(slots=True)
class LoadReport:
    """What came back."""

    wall_s: float = 0.0
    requests: int = 0
    frames: int = 0  # messages or events that carried text
    total_ms: list[float] = field(default_factory=list)  # per request, as its client saw it
    worker_ms: list[float] = field(default_factory=list)  # of them: at workers, where known
    faults: list[str] = field(default_factory=list)  # the first few


MAX_FAULTS = 3


class Load:
    """Closed-loop clients: each sends its next request when it has the last answer."""

    def __init__(self, order: LoadOrder) -> None:
        self._order = order
        self._rng = np.random.default_rng(order.seed)
        self._left = order.requests
        self.report = LoadReport()

    async def run(self) -> LoadReport:
        """Send everything; a request that fails is a fault of the report."""
        order, report = self._order, self.report
        client = self._grpc_clients if order.door == "grpc" else self._sse_clients
        started = time.perf_counter()
        await client()
        report.wall_s = time.perf_counter() - started
        return report

    def _turns(self) -> Iterator[bytes]:
        """Give prompts, all different, until every request is sent; shared by all clients."""
        while self._left > 0 and len(self.report.faults) < MAX_FAULTS:
            self._left -= 1
            order = self._order
            if order.prompt == "text":
                letters = self._rng.integers(0, _NUM_LETTERS, order.prompt_tokens)
                yield (letters + _FIRST_LETTER).astype(np.uint8).tobytes()
            else:  # id 0 is the end of a text
                ids = self._rng.integers(1, order.vocab_size, order.prompt_tokens)
                yield ids.astype("<u4").tobytes()

    def _done(self, started: float, frames: int) -> None:
        report = self.report
        report.requests += 1
        report.frames += frames
        report.total_ms.append((time.perf_counter() - started) * 1e3)

    def _headers(self) -> tuple[tuple[str, str], ...]:
        order = self._order
        key = (("authorization", f"Bearer {order.api_key}"),) if order.api_key else ()
        return (*key, *(((FORCE_MODE.name, order.mode),) if order.mode else ()))

    # -- gRPC --------------------------------------------------------------------------------

    async def _grpc_clients(self) -> None:
        order = self._order
        count = min(_CHANNELS, order.clients)
        channels = [
            grpc.aio.insecure_channel(order.address, options=_CLIENT_OPTIONS) for _ in range(count)
        ]
        try:
            await asyncio.gather(
                *(self._grpc_client(channels[i % count]) for i in range(order.clients))
            )
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _grpc_client(self, channel: grpc.aio.Channel) -> None:
        order = self._order
        call: grpc.aio.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, bytes]
        call = channel.unary_stream(
            _METHOD,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=None,  # bytes: only the last frame is looked into
        )
        metadata = self._headers()
        for prompt in self._turns():
            request = inference_pb2.GenerateRequest(
                max_tokens=order.max_tokens,
                ignore_eos=True,
                sampling=common_pb2.SamplingParams(temperature=0.0),
            )
            if order.prompt == "text":
                request.text = prompt.decode()
            else:
                request.token_ids = prompt
            started, frames, last = time.perf_counter(), 0, b""
            try:
                async for frame in call(request, metadata=metadata, timeout=CALL_TIMEOUT_S):
                    frames, last = frames + 1, frame
            except grpc.aio.AioRpcError as error:
                self.report.faults.append(f"{error.code().name}: {(error.details() or '')[:200]}")
                continue
            end = inference_pb2.GenerateFrame.FromString(last)
            # The last one is the end alone where that came later than the last token.
            self._done(started, frames - (not end.num_tokens))
            self.report.worker_ms.append(_worker_ms(end.timing))

    # -- server-sent events ------------------------------------------------------------------

    async def _sse_clients(self) -> None:
        await asyncio.gather(*(self._sse_client() for _ in range(self._order.clients)))

    async def _sse_client(self) -> None:
        host, port = split_host_port(self._order.address)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for prompt in self._turns():
                started = time.perf_counter()
                writer.write(self._http_request(prompt))
                events, answer = 0, b""
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    while not answer.endswith(_END):
                        data = await reader.read(_READ_BYTES)
                        if not data:
                            break
                        # What a read cut in two is looked at again with the next one.
                        events += data.count(_EVENT)
                        events += (answer[1 - len(_EVENT) :] + data[: len(_EVENT) - 1]).count(
                            _EVENT
                        )
                        answer = (answer + data)[-64:]
                if _LAST_EVENT not in answer:
                    self.report.faults.append(f"no end of stream: {answer[:200]!r}")
                    return
                self._done(started, events - 1)  # one event is the finish
        finally:
            writer.close()

    def _http_request(self, prompt: bytes) -> bytes:
        order = self._order
        text = prompt.decode() if order.prompt == "text" else None
        ids = None if text is not None else np.frombuffer(prompt, dtype="<u4").tolist()
        body = json.dumps(
            {
                "prompt": ids if text is None else text,
                "max_tokens": order.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        own = "".join(f"{name}: {value}\r\n" for name, value in self._headers())
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {order.address}\r\n{own}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _worker_ms(timing: common_pb2.Timing) -> float:
    stages = (timing.queue_prefill_us, timing.prefill_us, timing.handoff_us,
              timing.queue_decode_us, timing.decode_us)  # fmt: skip
    return sum(stages) / 1e3


def main(arguments: list[str]) -> int:
    """Run one order."""
    order = LoadOrder(**json.loads(arguments[0]))
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return 1  # whoever ordered it is gone
    report = uvloop.run(Load(order).run())
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
