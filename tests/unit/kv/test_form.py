"""Which KV may stand for which: forms, and the names they give blocks in the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.ids import BlockHash
from services.kv.form import EXACT, UNKNOWN, cache_key, form_of
from services.kv.layout import KV_DTYPES, KvLayout
from services.transfer.pairing import expected_form, wire_layout

DTYPES = st.sampled_from(KV_DTYPES)
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64)


@given(DTYPES, DTYPES, DTYPES)
def test_only_kv_that_was_never_anything_else_is_exact(computed: str, wire: str, own: str) -> None:
    is_exact = form_of(computed, wire, own) == EXACT
    assert is_exact == (computed == wire == own)
    assert form_of("", wire, own) == UNKNOWN


@given(st.tuples(DTYPES, DTYPES, DTYPES), st.tuples(DTYPES, DTYPES, DTYPES))
def test_one_form_means_one_way(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    """Equal forms in one pool went through the same dtypes, but for standing still."""
    if left[2] != right[2] or form_of(*left) != form_of(*right):
        return
    ways = [[d for i, d in enumerate(way) if not i or way[i - 1] != d] for way in (left, right)]
    assert ways[0] == ways[1]


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_keys_of_other_forms_are_other_keys(left: bytes, right: bytes) -> None:
    one, two = BlockHash(left), BlockHash(right)
    assert cache_key(one, EXACT) == one
    keys = {cache_key(h, form) for h in {one, two} for form in ("", "float32>int8", "int8")}
    assert len(keys) == 3 * len({one, two})
    with pytest.raises(ValueError, match="unknown"):
        cache_key(one, UNKNOWN)


@given(DTYPES, DTYPES, st.sampled_from(["", "bfloat16", "int8"]), st.booleans())
def test_what_is_foretold_comes(computed: str, own: str, wire_dtype: str, is_sent: bool) -> None:
    """Blocks that are had are chosen before there is a connection; both must mean the same."""
    decode = replace(LAYOUT, kv_dtype=own)
    prefill = replace(LAYOUT, kv_dtype=computed).part((0, 3), (0, 1))
    agreed = wire_dtype if is_sent else ""
    wire = wire_layout(prefill, decode, agreed)
    comes = form_of(computed, wire.kv_dtype, own)
    assert expected_form(computed, decode, wire_dtype, is_sent) == comes
    foretold = expected_form(computed, decode, wire_dtype, None)
    assert foretold in (comes, UNKNOWN)
    assert foretold == comes or wire_dtype
    assert expected_form("", decode, wire_dtype, is_sent) == UNKNOWN
    assert expected_form("float99", decode, wire_dtype, is_sent) == UNKNOWN
