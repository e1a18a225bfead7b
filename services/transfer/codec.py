"""Message bodies: values to protobuf and back, every length checked against what is expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from services.common.limits import MAX_CHOICES, MAX_LOGPROBS
from services.kv.layout import KvLayout
from services.pb import common_pb2
from services.pb import transfer_pb2 as pb
from services.transfer.api import FirstTokenInfo
from services.transfer.config import KIB
from services.transfer.planes import PLANES_BEST_FIRST
from services.transfer.values import FinalArgs, OpenArgs, ReadyArgs, RejectCode, U64Array
from services.transfer.wire import WireError

M = TypeVar("M", bound=Message)

_MAX_REASON = 200
_MAX_TRACEPARENT = 256
_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")

_PLANE_OF = {name: common_pb2.Plane.Value(f"PLANE_{name.upper()}") for name in PLANES_BEST_FIRST}
_NAME_OF = {number: name for name, number in _PLANE_OF.items()}


def parse(kind: type[M], body: bytes) -> M:
    """Parse one message; raise WireError instead of protobuf's error."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise WireError("body") from None


def plane_number(name: str) -> common_pb2.Plane.ValueType:
    """Return the wire's number of a plane."""
    return _PLANE_OF[name]


def plane_name(number: int) -> str:
    """Return the name of a plane this build speaks."""
    try:
        return _NAME_OF[number]  # type: ignore[index]  # an unknown number is what we look for
    except KeyError:
        raise WireError("plane") from None


def clip(reason: str) -> str:
    """Bound a text that goes on the wire."""
    return reason[:_MAX_REASON]


# ---- OPEN, REJECT -----------------------------------------------------------------------------


def open_body(ticket: bytes, args: OpenArgs) -> bytes:
    """Serialise OPEN."""
    bits = np.packbits(np.array(args.have, dtype=bool), bitorder="little")
    message = pb.Open(
        signed_ticket=ticket,
        attempt=args.attempt,
        have=bits.tobytes(),
        plane=plane_number(args.plane),
        credit_bytes=args.credit_bytes,
        traceparent=args.traceparent[:_MAX_TRACEPARENT],
    )
    if args.wire is not None:
        message.layer_lo, message.layer_hi = args.wire.layers
        message.head_lo, message.head_hi = args.wire.heads
        message.wire_dtype = args.wire.kv_dtype
    return message.SerializeToString()


def open_args(message: pb.Open, num_blocks: int, wire: KvLayout | None = None) -> OpenArgs:
    """Read OPEN once its ticket has told how many blocks there are, and its range is checked."""
    if len(message.have) != -(-num_blocks // 8):
        raise WireError("have_length")
    if len(message.traceparent) > _MAX_TRACEPARENT:
        raise WireError("traceparent_length")
    bits = np.frombuffer(message.have, np.uint8)
    have = np.unpackbits(bits, count=num_blocks, bitorder="little").astype(bool)
    return OpenArgs(
        attempt=message.attempt,
        have=tuple(have.tolist()),
        plane=plane_name(message.plane),
        credit_bytes=message.credit_bytes,
        traceparent=message.traceparent,
        wire=wire,
    )


def reject_body(code: RejectCode, retry_after_s: float, detail: str) -> bytes:
    """Serialise REJECT."""
    return pb.Reject(
        code=pb.Reject.Code.ValueType(int(code)),
        retry_after_ms=round(retry_after_s * 1000),
        detail=clip(detail),
    ).SerializeToString()


def reject_args(body: bytes) -> tuple[RejectCode, float, str]:
    """Read REJECT; a code we do not know is a refusal all the same."""
    message = parse(pb.Reject, body)
    try:
        code = RejectCode(message.code)
    except ValueError:
        code = RejectCode.UNSPECIFIED
    return code, message.retry_after_ms / 1000, clip(message.detail)


# ---- READY ------------------------------------------------------------------------------------


def ready_bodies(ready: ReadyArgs, max_bytes: int = 128 * KIB) -> Iterable[tuple[int, int, bytes]]:
    """Serialise READY, split so that no body is longer than `max_bytes`; yields (lo, hi, body)."""
    per_block = 8 + 4 + 8 * ready.digests.shape[1]
    step = max(1, max_bytes // per_block)
    for start in range(0, len(ready.gens), step):
        part = slice(start, min(start + step, len(ready.gens)))
        lo, hi = ready.lo + part.start, ready.lo + part.stop
        body = pb.Ready(
            lo=lo,
            hi=hi,
            block_gens=ready.gens[part].astype(_U64).tobytes(),
            digests=ready.digests[part].astype(_U64).tobytes(),
            source_blocks=ready.source_blocks[part].astype(_U32).tobytes(),
        ).SerializeToString()
        yield lo, hi, body


def ready_args(body: bytes, num_blocks: int, digests_per_block: int) -> ReadyArgs:
    """Read READY for a prompt of `num_blocks` full blocks."""
    message = parse(pb.Ready, body)
    count = message.hi - message.lo
    if count < 1 or message.hi > num_blocks:
        raise WireError("ready_range")
    sizes = (len(message.block_gens), len(message.digests), len(message.source_blocks))
    if sizes != (8 * count, 8 * count * digests_per_block, 4 * count):
        raise WireError("ready_length")
    digests = np.frombuffer(message.digests, _U64).reshape(count, digests_per_block)
    return ReadyArgs(
        lo=message.lo,
        gens=np.frombuffer(message.block_gens, _U64),
        digests=digests,
        source_blocks=np.frombuffer(message.source_blocks, _U32),
    )


# ---- DATA, NACK -------------------------------------------------------------------------------


def data_body(indexes: Sequence[int], is_tail: bool, digests: U64Array | None = None) -> bytes:
    """Serialise DATA.

    Args:
        digests: `[frames, digests of a frame]` of converted frames; those of blocks as they are
            were announced by READY and FINAL and are not repeated.
    """
    packed = b"" if digests is None else digests.astype(_U64).tobytes()
    return pb.Data(blocks=_pack_u32(indexes), digests=packed, is_tail=is_tail).SerializeToString()


def data_digests(body: bytes, n_payload: int, digests_per_frame: int) -> U64Array:
    """Read the digests of converted frames, `[frames, digests_per_frame]`."""
    packed = parse(pb.Data, body).digests
    if len(packed) != 8 * n_payload * digests_per_frame:
        raise WireError("data_digests")
    return np.frombuffer(packed, _U64).reshape(n_payload, digests_per_frame)


def data_indexes(body: bytes, n_payload: int, num_blocks: int) -> tuple[int, ...]:
    """Read which block each payload frame is; the tail comes out as `num_blocks`."""
    message = parse(pb.Data, body)
    if message.is_tail:
        if n_payload != 1:
            raise WireError("tail_payload")
        return (num_blocks,)
    indexes = _unpack_u32(message.blocks)
    if len(indexes) != n_payload or any(i >= num_blocks for i in indexes):
        raise WireError("data_blocks")
    if len(set(indexes)) != n_payload:
        raise WireError("data_blocks")  # the second would be written over a block that was judged
    return indexes


def nack_body(indexes: Sequence[int], tail: bool, reason: str) -> bytes:
    """Serialise NACK."""
    return pb.Nack(blocks=_pack_u32(indexes), tail=tail, reason=clip(reason)).SerializeToString()


def nack_args(body: bytes) -> tuple[tuple[int, ...], bool]:
    """Read NACK; indexes are checked by the sender against its prompt."""
    message = parse(pb.Nack, body)
    return _unpack_u32(message.blocks), message.tail


# ---- FINAL ------------------------------------------------------------------------------------


def final_body(final: FinalArgs) -> bytes:
    """Serialise FINAL."""
    message = pb.Final(
        num_tokens=final.num_tokens,
        num_blocks=final.num_blocks,
        tail_valid_tokens=final.tail_valid_tokens,
        tail_source_block=final.tail_source_block,
        tail_gen=final.tail_gen,
        tail_digest=final.tail_digest,
        prefill_us=final.prefill_us,
        is_single_shot=final.is_single_shot,
    )
    for info in final.first:
        token = message.first.add(choice=info.choice, token_id=info.token_id)
        if info.logprob is not None:
            token.logprob.token_id = info.token_id
            token.logprob.logprob = info.logprob
            for token_id, logprob in info.top:
                token.logprob.top.add(token_id=token_id, logprob=logprob)
    return message.SerializeToString()


def final_args(body: bytes) -> FinalArgs:
    """Read FINAL."""
    message = parse(pb.Final, body)
    if len(message.first) > MAX_CHOICES:
        raise WireError("first_tokens")
    return FinalArgs(
        first=tuple(_first_token(token) for token in message.first),
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        tail_valid_tokens=message.tail_valid_tokens,
        tail_source_block=message.tail_source_block,
        tail_gen=message.tail_gen,
        tail_digest=message.tail_digest,
        prefill_us=message.prefill_us,
        is_single_shot=message.is_single_shot,
    )


def _first_token(token: pb.FirstToken) -> FirstTokenInfo:
    if len(token.logprob.top) > MAX_LOGPROBS:
        raise WireError("top_logprobs")
    has_logprob = token.HasField("logprob")
    return FirstTokenInfo(
        choice=token.choice,
        token_id=token.token_id,
        logprob=token.logprob.logprob if has_logprob else None,
        top=tuple((top.token_id, top.logprob) for top in token.logprob.top),
    )


def _pack_u32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=_U32).tobytes()


def _unpack_u32(raw: bytes) -> tuple[int, ...]:
    if len(raw) % 4:
        raise WireError("u32_list")
    return tuple(np.frombuffer(raw, _U32).tolist())
