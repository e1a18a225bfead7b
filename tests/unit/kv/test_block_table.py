"""Block tables map tokens to slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.ids import BlockId
from services.kv.block_table import BlockTable


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.data())
def test_slots_are_those_of_each_token(block_ids: list[int], data: st.DataObject) -> None:
    table = BlockTable(16, [BlockId(b) for b in block_ids])
    lo = data.draw(st.integers(0, table.num_slots))
    hi = data.draw(st.integers(lo, table.num_slots))
    expected = [table[i // 16] * 16 + i % 16 for i in range(lo, hi)]
    assert table.slots(lo, hi).tolist() == expected
    assert table.as_array().tolist() == block_ids


def test_slots_past_the_end_are_refused() -> None:
    table = BlockTable(16)
    table.append(BlockId(3))
    with pytest.raises(ValueError, match="slots"):
        table.slots(0, 17)
