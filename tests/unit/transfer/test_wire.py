"""The header refuses whatever is not whole, and never allocates by what a peer says."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.limits import MAX_CHOICES, MAX_LOGPROBS
from services.pb import transfer_pb2 as pb
from services.pb.common_pb2 import PLANE_MEMORY
from services.transfer import codec
from services.transfer.api import FirstTokenInfo
from services.transfer.values import FinalArgs, OpenArgs, ReadyArgs, RejectCode
from services.transfer.wire import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Header,
    MessageType,
    WireError,
    decode,
    encode,
)


@given(
    kind=st.sampled_from(list(MessageType)),
    xfer_id=st.integers(0, 2**64 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 2**32 - 1),
    seq=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=200),
)
def test_round_trip(
    kind: MessageType, xfer_id: int, incarnation: int, attempt: int, seq: int, body: bytes
) -> None:
    message = decode(encode(Header(kind, incarnation, xfer_id, attempt, seq), body))
    assert message.body == body
    assert message.header == Header(kind, incarnation, xfer_id, attempt, seq, body_len=len(body))


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=120), max_size=4))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    """RB-121: garbage raises the one typed error."""
    with pytest.raises(WireError):
        decode(frames)


@settings(max_examples=300)
@given(body=st.binary(max_size=64), position=st.integers(0, 8 * (HEADER_BYTES + 64) - 1))
def test_any_flipped_bit_is_seen(body: bytes, position: int) -> None:
    """RB-025: header and body are covered by one checksum."""
    head, body = encode(Header(MessageType.READY, 5, 6, 7, 8), body)
    whole = bytearray(head + body)
    byte = position // 8 % len(whole)
    whole[byte] ^= 1 << position % 8
    with pytest.raises(WireError):
        decode([bytes(whole[:HEADER_BYTES]), bytes(whole[HEADER_BYTES:])])


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "reason"),
    [
        (0, "4s", b"ZMTP", "magic"),
        (4, "B", 9, "version"),
        (5, "B", 200, "type"),
        (32, "I", MAX_BODY_BYTES + 1, "body_too_long"),
        (36, "I", 1, "payload_count"),
        (32, "I", 3, "body_length"),
        (24, "I", 3, "checksum"),
    ],
)
def test_refusals_are_named(offset: int, fmt: str, value: object, reason: str) -> None:
    head, body = encode(Header(MessageType.OPEN, 5), b"four")
    broken = bytearray(head)
    struct.pack_into("<" + fmt, broken, offset, value)
    with pytest.raises(WireError, match=reason):
        decode([bytes(broken), body])


def test_an_oversized_body_is_not_even_sent() -> None:
    with pytest.raises(WireError, match="body_too_long"):
        encode(Header(MessageType.PING, 1), bytes(9_000))


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 40))
def test_bodies_of_random_bytes_raise_wire_errors_only(body: bytes, num_blocks: int) -> None:
    """RB-121: the parsers raise nothing but the typed error, whatever comes."""
    parsers: list[Callable[[], object]] = [
        lambda: codec.ready_args(body, num_blocks, 4),
        lambda: codec.data_indexes(body, 2, num_blocks),
        lambda: codec.nack_args(body),
        lambda: codec.final_args(body),
        lambda: codec.reject_args(body),
        lambda: codec.open_args(codec.parse(pb.Open, body), num_blocks),
    ]
    for parser in parsers:
        try:
            parser()
        except WireError:
            continue


def test_a_block_twice_in_one_message_is_nonsense() -> None:
    """The second would be written over content that was judged already."""
    assert codec.data_indexes(codec.data_body([3, 1, 2], False), 3, 4) == (3, 1, 2)
    with pytest.raises(WireError, match="data_blocks"):
        codec.data_indexes(codec.data_body([3, 1, 3], False), 3, 4)


def test_open_keeps_the_have_bitmap() -> None:
    have = tuple(i % 3 == 0 for i in range(19))
    args = OpenArgs(3, have, "memfd", 17, "00-trace")
    body = codec.open_body(b"ticket", args)
    assert codec.open_args(codec.parse(pb.Open, body), 19) == args
    with pytest.raises(WireError, match="have_length"):
        codec.open_args(codec.parse(pb.Open, body), 25)


def test_ready_is_split_and_joins_again() -> None:
    rng = np.random.default_rng(0)
    ready = ReadyArgs(
        lo=5,
        gens=rng.integers(0, 2**63, 100, np.uint64),
        digests=rng.integers(0, 2**63, (100, 12), np.uint64),
        source_blocks=rng.integers(0, 2**32, 100, np.uint32),
    )
    parts = [codec.ready_args(b, 105, 12) for _, _, b in codec.ready_bodies(ready, 1_000)]
    assert len(parts) > 10
    assert [p.lo for p in parts[1:]] == [p.hi for p in parts[:-1]]
    assert np.array_equal(np.concatenate([p.digests for p in parts]), ready.digests)
    assert np.array_equal(np.concatenate([p.gens for p in parts]), ready.gens)


def test_ready_beyond_the_prompt_is_refused() -> None:
    body = pb.Ready(lo=0, hi=9, block_gens=bytes(72), digests=bytes(72), source_blocks=bytes(36))
    with pytest.raises(WireError, match="ready_range"):
        codec.ready_args(body.SerializeToString(), 8, 1)
    assert codec.ready_args(body.SerializeToString(), 9, 1).hi == 9


def test_final_keeps_first_tokens_and_their_logprobs() -> None:
    first = (FirstTokenInfo(0, 5, -0.25, ((5, -0.25), (6, -2.0))), FirstTokenInfo(2, 8))
    final = FinalArgs(first, 100, 6, 4, 9, 2, 2**63 + 1, 77)
    assert codec.final_args(codec.final_body(final)) == final


def test_final_of_the_largest_request_fits_its_message() -> None:
    """Whatever the limits may be set to, a prefill that worked can be handed off."""
    top = tuple((2**31 - token, -0.5) for token in range(MAX_LOGPROBS))
    first = tuple(FirstTokenInfo(choice, 2**31, -0.5, top) for choice in range(MAX_CHOICES))
    body = codec.final_body(FinalArgs(first, 2**31, 2**27, 4, 2**31, 2**63, 2**63, 2**40))

    assert codec.final_args(body).first == first
    header = Header(MessageType.FINAL, incarnation=1, xfer_id=1, attempt=1)
    assert decode(encode(header, body)).body == body


def test_an_unknown_reject_code_is_a_refusal_all_the_same() -> None:
    """RB-029."""
    body = pb.Reject(detail="later version").SerializeToString() + b"\x08\x63"
    code, _, detail = codec.reject_args(body)
    assert (code, detail) == (RejectCode.UNSPECIFIED, "later version")


def test_an_unknown_plane_is_refused() -> None:
    body = pb.Open(plane=PLANE_MEMORY, have=b"\0").SerializeToString()  # a plane this build has not
    with pytest.raises(WireError, match="plane"):
        codec.open_args(codec.parse(pb.Open, body), 8)
