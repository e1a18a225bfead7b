"""Transfers of one receive bring every layer and head once, or it is not opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.form import EXACT, UNKNOWN
from services.kv.layout import KvLayout
from services.transfer.api import (
    FinalInfo,
    FirstTokenInfo,
    ReceiveEnd,
    SinkReady,
    SinkReleased,
    TransferStats,
)
from services.transfer.cover import MAX_SHARDS, Shard, cover_fault
from services.transfer.pairing import Range
from services.transfer.shards import ShardGroup
from services.transfer.ticket import Ticket

MODEL = KvLayout(num_layers=12, num_kv_heads=8, head_dim=64)


def _ranges(total: int) -> st.SearchStrategy[Range]:
    ends = st.tuples(st.integers(0, total), st.integers(0, total))
    return ends.filter(lambda r: r[0] != r[1]).map(lambda r: (min(r), max(r)))


LAYERS, HEADS = _ranges(12), _ranges(8)
SHARDS = st.lists(st.builds(Shard, LAYERS, HEADS), min_size=1, max_size=6)


def _counts(own: KvLayout, shards: list[Shard]) -> np.ndarray:
    counts = np.zeros((12, 8), int)
    for shard in shards:
        counts[slice(*shard.layers), slice(*shard.heads)] += 1
    return counts[slice(*own.layers), slice(*own.heads)]


@given(LAYERS, HEADS, SHARDS)
def test_a_cover_is_one_just_when_every_cell_comes_once(
    layers: Range, heads: Range, shards: list[Shard]
) -> None:
    own = MODEL.part(layers, heads)
    sharing = [s for s in shards if _counts(own, [s]).any()]
    is_cover = len(sharing) == len(shards) and bool((_counts(own, shards) == 1).all())
    assert (cover_fault(own, shards) is None) == is_cover


def _cuts(total: int) -> st.SearchStrategy[list[Range]]:
    inner = st.sets(st.integers(1, total - 1), max_size=3)
    return inner.map(
        lambda cuts: list(zip([0, *sorted(cuts)], [*sorted(cuts), total], strict=True))
    )


@given(_cuts(12), _cuts(8), _cuts(12), _cuts(8), st.data())
def test_any_grid_covers_any_other_and_not_with_one_missing_or_twice(
    layers: list[Range],
    heads: list[Range],
    own_layers: list[Range],
    own_heads: list[Range],
    data: st.DataObject,
) -> None:
    """n to m, in both directions."""
    for layer_range in own_layers:
        for head_range in own_heads:
            own = MODEL.part(layer_range, head_range)
            grid = [Shard(a, b) for a in layers for b in heads]
            sharing = [s for s in grid if _counts(own, [s]).any()]
            assert cover_fault(own, sharing) is None
            one = data.draw(st.sampled_from(sharing))
            fewer = [s for s in sharing if s is not one]
            missing = cover_fault(own, fewer)
            assert missing is not None
            assert "no transfer" in missing or not fewer
            twice = cover_fault(own, [*sharing, one])
            assert twice is not None
            assert "2 transfers" in twice


def test_faults_name_what_is_wrong() -> None:
    own = MODEL.part((6, 12), (0, 4))
    for shards, why in (
        ([], "0 transfers"),
        ([Shard((0, 12), (0, 8))] * (MAX_SHARDS + 1), "65 transfers"),
        ([Shard((0, 6), (0, 8))], "no layer in common with layers 0-6"),
        ([Shard((0, 12), (4, 8))], "no KV head in common"),
        ([Shard((6, 13), (0, 4))], "layers 6-13 of 12 are no range"),
        ([Shard((7, 7), (0, 4))], "no range"),
        ([Shard((0, 12), (0, 3))], "layers 6-12 of heads 3-4 come from no transfer"),
        ([Shard((6, 12), (0, 3)), Shard((6, 12), (2, 4))], "heads 2-3 come from 2 transfers"),
    ):
        fault = cover_fault(own, shards)
        assert fault is not None
        assert why in fault
    assert cover_fault(own, [Shard((0, 12), (0, 8))]) is None, "more than ours is cut off"


def test_a_ticket_that_names_no_range_holds_all() -> None:
    ticket = Ticket(1, "p", "tcp://127.0.0.1:1", "", 1, "fp", 16, (), "", 0, "r")
    assert Shard.of(ticket, MODEL) == Shard((0, 12), (0, 8))
    half = replace(ticket, layers=(0, 6), heads=(2, 4))
    assert Shard.of(half, MODEL) == Shard((0, 6), (2, 4))
    assert Shard.of(half, MODEL).is_of(MODEL.part((0, 6), (2, 4)))
    assert not Shard.of(half, MODEL).is_of(MODEL)


# ---- groups -------------------------------------------------------------------------------------

PARTS = ("k#0", "k#1", "k#2")
FINAL = FinalInfo((FirstTokenInfo(0, 42),), 40, None, 8, 5)
STATS = TransferStats("memfd", "p", 100, 3, 1, 10, 20, 1)


def _ready(part: str, form: str = EXACT, final: FinalInfo = FINAL) -> SinkReady:
    return SinkReady(part, final, STATS, form)


def _failed(part: str, code: str = "handoff_failed") -> SinkReleased:
    return SinkReleased(part, code, f"{part} failed", code != "cancelled", STATS)


@given(st.permutations(PARTS), st.lists(st.sampled_from(["ready", "failed"]), min_size=3))
def test_a_group_ends_once_with_its_last_shard(order: list[str], ends: list[str]) -> None:
    """Ready only when all are; failed by the first fault, and only when nobody writes."""
    group = ShardGroup("k", PARTS)
    events: list[ReceiveEnd] = [
        _ready(part) if end == "ready" else _failed(part)
        for part, end in zip(order, ends, strict=False)
    ]
    for number, event in enumerate(events):
        assert group.outcome() is None
        is_first_fault = "failed" not in ends[:number] and ends[number] == "failed"
        assert group.note(event.key, event) == is_first_fault
        assert event.key not in group.open_parts()
    outcome = group.outcome()
    assert outcome is not None
    assert outcome.key == "k"
    assert outcome.stats == TransferStats("memfd", "p,p,p", 300, 9, 3, 10, 20, 3)
    if "failed" in ends[:3]:
        assert isinstance(outcome, SinkReleased)
        assert outcome.message == f"{order[ends.index('failed')]} failed"
    else:
        assert outcome == SinkReady("k", FINAL, outcome.stats, EXACT)


def test_shards_that_disagree_are_not_used() -> None:
    group = ShardGroup("k", PARTS[:2])
    group.note("k#0", _ready("k#0"))
    group.note("k#1", _ready("k#1", final=replace(FINAL, first=(FirstTokenInfo(0, 43),))))
    outcome = group.outcome()
    assert isinstance(outcome, SinkReleased)
    assert "different first tokens" in outcome.message


@pytest.mark.parametrize(("other", "form"), [(EXACT, EXACT), ("float32>int8", UNKNOWN)])
def test_shards_of_two_forms_are_of_none(other: str, form: str) -> None:
    group = ShardGroup("k", PARTS[:2])
    group.note("k#0", _ready("k#0"))
    group.note("k#1", _ready("k#1", other))
    outcome = group.outcome()
    assert isinstance(outcome, SinkReady)
    assert outcome.kv_form == form
