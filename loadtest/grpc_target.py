"""A target that speaks our own proto: prompts as token ids, token counts and stages in frames."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import grpc
import grpc.aio

from loadtest.credentials import KEY_ADVICE, ApiKeys
from loadtest.prompt_bytes import IdBytes
from loadtest.records import Chunk, Piece, PlannedRequest, PoolSize, RequestRecord, Status
from loadtest.server_timing import take_message
from loadtest.target import ClusterLook, TargetFacts, TargetUnusable
from services.common.errors import ERROR_TABLE
from services.pb import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
)

CONNECT_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 16 << 20
_CHANNELS = 4  # servers bound the streams of one connection
_LOOK_TIMEOUT_S = 1.0
_SLACK_S = 0.5  # the server hears of the deadline, and may act on it a little before us
_KEY_NEEDED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_REJECTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
    ("grpc.enable_retries", 0),  # a request is sent once, and its fate is the record's
    ("grpc.enable_http_proxy", 0),
)


class GrpcTarget:
    """A router at HOST:PORT."""

    def __init__(
        self,
        address: str,
        clock: Callable[[], float],
        keys: ApiKeys,
        *,
        model: str = "",
        is_tls: bool = False,
        ca_file: Path | None = None,
    ) -> None:
        self._address = address
        self._clock = clock
        self._keys = keys
        self._model = model
        self._is_tls = is_tls or ca_file is not None
        self._ca_file = ca_file
        self._channels: list[grpc.aio.Channel] = []
        self._ids: Callable[[Sequence[Piece]], bytes] | None = None

    async def open(self) -> TargetFacts:
        """Connect, and ask for the models."""
        self._channels = [self._dial() for _ in range(_CHANNELS)]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._stubs = cycle(stubs)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.gather(*(c.channel_ready() for c in self._channels))
                answer = await stubs[0].ListModels(
                    inference_pb2.ListModelsRequest(), metadata=self._metadata("")
                )
        except TimeoutError:
            way = "with TLS" if self._is_tls else "in plaintext"
            raise TargetUnusable(
                f"nobody answers at grpc://{self._address} {way} within {CONNECT_TIMEOUT_S:g} s; "
                "is a cluster running there?"
            ) from None
        except grpc.aio.AioRpcError as error:
            fault = f"{error.code().name}: {error.details()}"
            if error.code() in _KEY_NEEDED:
                fault += f"; {KEY_ADVICE}"
            raise TargetUnusable(f"{self._address} does not list its models: {fault}") from None
        model = self._chosen(answer.models)
        self._ids = IdBytes(model.vocab_size).binary()
        return TargetFacts(
            kind="grpc",
            address=self._address,
            model=model.id,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
        )

    async def send(self, request: PlannedRequest, record: RequestRecord, timeout_s: float) -> None:
        """Send one request; every end but a cancellation of ours is a status."""
        assert self._ids is not None
        message = self._message(request, self._ids(request.prompt.pieces))
        metadata = self._metadata(request.tenant)
        clock = self._clock
        record.sent_s = clock()
        call = next(self._stubs).Generate(message, timeout=timeout_s, metadata=metadata)
        chunks, last, heard = record.chunks, None, 0
        try:
            while isinstance(frame := await call.read(), inference_pb2.GenerateFrame):
                if frame.num_tokens:
                    chunks.append(Chunk(clock(), frame.num_tokens))
                    if frame.first_index != heard:
                        _note_gap(record, frame.first_index - heard)
                    heard = frame.first_index + frame.num_tokens
                last = frame
            record.done_s = clock()
        except grpc.aio.AioRpcError as error:
            record.done_s = clock()
            _fail(record, error, timeout_s)
            return
        finally:
            call.cancel()  # of a call that is over, nothing
            record.num_heard = record.osl = sum(chunk.num_tokens for chunk in chunks)
        _finish(record, last)
        if record.status is Status.OK:
            planned = request.max_tokens if request.ignore_eos else 0
            _note_gap(record, max(planned, record.osl) - heard)

    async def look(self) -> ClusterLook | None:
        """Ask the router for its workers; None where the key may not, or nobody knows."""
        try:
            status = await admin_pb2_grpc.AdminStub(self._channels[0]).ClusterStatus(
                admin_pb2.ClusterStatusRequest(),
                timeout=_LOOK_TIMEOUT_S,
                metadata=self._metadata(""),
            )
        except grpc.aio.AioRpcError:
            return None
        live = [worker for worker in status.workers if worker.state == "live"]
        at_workers = sum(worker.in_flight for worker in status.workers)
        return ClusterLook(
            replicas=dict(Counter(worker.role for worker in live)),
            queued=max(0, status.requests_open - at_workers) + sum(w.load.waiting for w in live),
            pools=tuple(map(_pool_size, status.autoscaler.pools)),
        )

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _dial(self) -> grpc.aio.Channel:
        if not self._is_tls:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        try:
            authorities = self._ca_file.read_bytes() if self._ca_file else None
        except OSError as error:
            raise TargetUnusable(f"{self._ca_file}: {error.strerror}") from None
        credentials = grpc.ssl_channel_credentials(authorities)
        return grpc.aio.secure_channel(self._address, credentials, options=_OPTIONS)

    def _chosen(self, models: Sequence[inference_pb2.Model]) -> inference_pb2.Model:
        for model in models:
            if self._model in ("", model.id):
                return model
        known = ", ".join(model.id for model in models) or "none"
        raise TargetUnusable(f"{self._address} does not serve {self._model!r}; it serves: {known}")

    def _metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        key = self._keys.of(tenant)
        return (("authorization", f"Bearer {key}"),) if key else ()

    def _message(self, request: PlannedRequest, token_ids: bytes) -> inference_pb2.GenerateRequest:
        sampling = common_pb2.SamplingParams(temperature=request.temperature)
        if request.seed is not None:
            sampling.seed = request.seed
        return inference_pb2.GenerateRequest(
            model=request.model or self._model,
            token_ids=token_ids,
            sampling=sampling,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            priority=request.priority,
        )


def _pool_size(told: admin_pb2.AutoscaledPool) -> PoolSize:
    return PoolSize(
        told.pool, told.desired, told.ready, told.pending, told.draining, told.limited_by
    )


def _note_gap(record: RequestRecord, num_tokens: int) -> None:
    """Note tokens that were skipped, or, where there are fewer than none, repeated."""
    record.num_lost += max(0, num_tokens)
    record.num_repeated += max(0, -num_tokens)


def _finish(record: RequestRecord, last: inference_pb2.GenerateFrame | None) -> None:
    """Note the usage, and whether the stream was whole."""
    if last is None or not last.HasField("finish"):
        code = last.error.code if last is not None and last.HasField("error") else "broken_stream"
        record.status, record.code = Status.ERROR, code
        return
    record.isl = last.usage.prompt_tokens
    record.cached_tokens = last.usage.cached_tokens
    record.osl = last.usage.completion_tokens
    take_message(record, last.timing)
    record.status = Status.OK


def _fail(record: RequestRecord, error: grpc.aio.AioRpcError, timeout_s: float) -> None:
    code = error.code()
    own = (error.details() or "").partition(":")[0]  # details of our servers begin with a code
    record.code = own if own in ERROR_TABLE else code.name.lower()
    waited_s = (record.done_s or 0.0) - (record.sent_s or 0.0)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and waited_s >= timeout_s - _SLACK_S:
        record.status, record.code = Status.TIMEOUT, "client_timeout"
    else:
        record.status = Status.REJECTED if code is _REJECTED else Status.ERROR
