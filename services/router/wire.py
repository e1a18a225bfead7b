"""Between the router's values and the messages of a Link."""

from __future__ import annotations

import struct
from dataclasses import asdict

from services.common.errors import ERROR_TABLE, RequestError
from services.common.ids import BlockHash, Incarnation
from services.common.light_value import light_value
from services.common.sampling import SamplingParams
from services.kv.hashing import pack_hashes, pack_token_ids
from services.pb import common_pb2, worker_pb2
from services.registry.base import LoadReport
from services.router.api import GenerateCall
from services.router.legs import CONTINUE, PREFILL
from services.router.request import ChoiceSoFar, TokenLogprob, TokensIn
from services.router.timing import StageTimes

_ONE_ID = struct.Struct("<I")

_PLANES = {
    number: name.removeprefix("PLANE_").lower()
    for name, number in common_pb2.Plane.items()
    if number != common_pb2.PLANE_UNSPECIFIED
}


@light_value
class WorkHead:
    """What of a work item depends on the leg rather than on the request."""

    request: int
    attempt: int
    kind: str  # PREFILL | CONTINUE | WHOLE
    incarnation: Incarnation
    slot_gen: int  # 0 = not stated
    deadline_ms: int
    ticket: bytes = b""
    generated: bytes = b""  # tokens so far of a request under way, as on the wire
    resumed: tuple[ChoiceSoFar, ...] = ()  # the same of several choices

    @property
    def first_index(self) -> int:
        """Index of the first token this work item will produce."""
        if self.generated:
            return len(self.generated) // 4
        return 1 if self.kind == CONTINUE else 0


def build_work(
    head: WorkHead, call: GenerateCall, hashes: tuple[BlockHash, ...]
) -> worker_pb2.Work:
    """Build a work item."""
    work = worker_pb2.Work(
        request=head.request,
        request_id=call.request_id,
        attempt=head.attempt,
        expect_incarnation=head.incarnation,
        slot_gen=head.slot_gen,
        token_ids=pack_token_ids(call.token_ids),
        block_hashes=pack_hashes(hashes),
        sampling=sampling_message(call.sampling),
        first_index=head.first_index,
        generated=head.generated,
        resumed=[
            worker_pb2.ResumedChoice(choice=one.choice, token_ids=pack_token_ids(one.token_ids))
            for one in head.resumed
        ],
        max_tokens=call.sampling.max_tokens,
        n=call.sampling.n,
        deadline_ms=head.deadline_ms,
        priority=call.priority,
        tenant=call.namespace,
        traceparent=call.traceparent,
    )
    if head.kind == PREFILL:
        work.prefill.SetInParent()
    elif head.kind == CONTINUE:
        work.continue_from.ticket = head.ticket
    else:
        work.whole.SetInParent()
    return work


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Read little-endian uint32; mostly it is one."""
    if len(packed) == _ONE_ID.size:
        return _ONE_ID.unpack(packed)
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def sampling_message(params: SamplingParams) -> common_pb2.SamplingParams:
    """Write every field: what the router validated must not meet a second set of defaults."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        top_logprobs=params.top_logprobs,
        logprobs=params.logprobs,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def load_report(load: worker_pb2.Load) -> LoadReport:
    """Read a Load message."""
    return LoadReport(
        queued_uncached_tokens=load.queued_uncached_tokens,
        resident_tokens=load.resident_tokens,
        kv_free=load.kv_free,
        kv_total=load.kv_total,
        rate_tok_s=load.rate_tok_s,
        tbt_a_us=load.tbt_a_us,
        tbt_b_us=load.tbt_b_us,
        running=load.running,
        waiting=load.waiting,
        kv_cached=load.kv_cached,
    )


def load_message(load: LoadReport) -> worker_pb2.Load:
    """Write a Load message."""
    return worker_pb2.Load(**asdict(load))


def stage_times(timing: common_pb2.Timing) -> StageTimes:
    """Read what a worker measured of its leg."""
    return StageTimes(
        queue_prefill_us=timing.queue_prefill_us,
        prefill_us=timing.prefill_us,
        handoff_us=timing.handoff_us,
        queue_decode_us=timing.queue_decode_us,
        decode_us=timing.decode_us,
        handoff_bytes=timing.handoff_bytes,
        plane=_PLANES.get(timing.plane, ""),
        prefill_chunks=timing.prefill_chunks,
        recomputed=timing.recomputed,
        handoff_blocks=timing.handoff_blocks,
        handoff_blocks_deduped=timing.handoff_blocks_deduped,
        handoff_blocks_attached=timing.handoff_blocks_attached,
    )


def known_code(error: common_pb2.Error, default: str) -> str:
    """Return the error's code when it is one of the table's."""
    return error.code if error.code in ERROR_TABLE else default


def read_tokens(tokens: worker_pb2.Tokens) -> TokensIn:
    """Read a Tokens message."""
    if len(tokens.token_ids) % 4:
        raise RequestError("internal", "a worker sent token ids that are no whole uint32")
    return TokensIn(
        choice=tokens.choice,
        first_index=tokens.first_index,
        token_ids=unpack_ids(tokens.token_ids),
        logprobs=()
        if not tokens.logprobs
        else tuple(
            TokenLogprob(
                entry.token_id,
                entry.logprob,
                tuple((top.token_id, top.logprob) for top in entry.top),
            )
            for entry in tokens.logprobs
        ),
    )
