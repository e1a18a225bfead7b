from __future__ import annotations

import contextlib
import math

from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import StoreUnavailable
from services.registry.answers import parse_join, parse_route, parse_snapshot, parse_status
from services.registry.base import LoadReport
from services.registry.schema import decode_info, encode_info, pack_record, unpack_record
from tests.support.registry import make_worker_info

OPTION_BYTES = 92
Scalar = st.none() | st.integers() | st.binary(max_size=70) | st.text(max_size=8) | st.booleans()
Answer = st.recursive(Scalar, lambda inner: st.lists(inner, max_size=6), max_leaves=30)


@given(Answer | st.lists(Answer, min_size=4, max_size=4))
def test_any_answer_is_read_or_refused_as_a_store_failure(answer: object) -> None:
    """I7: whatever a hostile store says, nothing but StoreUnavailable comes out."""
    with contextlib.suppress(StoreUnavailable):
        parse_snapshot(answer, {}, "")
    with contextlib.suppress(StoreUnavailable):
        parse_route(answer, 1)
    with contextlib.suppress(StoreUnavailable):
        parse_route([answer], 1)
    with contextlib.suppress(StoreUnavailable):
        parse_join(answer)
    with contextlib.suppress(StoreUnavailable):
        parse_status(answer)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    record = unpack_record(data)
    assert record is None or len(data) == 64
    decode_info(data)


@given(st.binary(min_size=64, max_size=64))
def test_numbers_of_a_record_are_sane(data: bytes) -> None:
    record = unpack_record(data)
    if record is not None:
        assert 0 <= record.load.rate_tok_s < 1e12
        assert record.load.kv_free >= 0


def test_record_and_info_survive_the_trip() -> None:
    load = LoadReport(1, 2, 3, 4, 5.5, 6.5, 7.5, 8, 9)
    packed = unpack_record(pack_record("prefill", "draining", load))
    assert packed is not None
    assert (packed.role, packed.state, packed.load) == ("prefill", "draining", load)
    info = make_worker_info(incarnation=2**63 - 1)
    assert decode_info(encode_info(info).encode()) == info


def test_huge_loads_are_clamped() -> None:
    packed = unpack_record(pack_record("decode", "live", LoadReport(2**40, -1, running=10**6)))
    assert packed is not None
    assert packed.load.queued_uncached_tokens == 2**32 - 1
    assert packed.load.resident_tokens == 0
    assert packed.load.running == 65535


@given(st.binary(max_size=300))
def test_any_packed_options_are_read_or_refused(packed: bytes) -> None:
    """I7: no NaN and no unknown kind comes out of what a store says it chose."""
    padded = packed.ljust(-(-len(packed) // OPTION_BYTES) * OPTION_BYTES, b"\0")
    for row in (packed, padded):
        with contextlib.suppress(StoreUnavailable):
            (verdict,) = parse_route([[b"OK", 1, 1, row]], 1)
            assert verdict is not None
            assert all(math.isfinite(option.cost_s) for option in verdict.options)
