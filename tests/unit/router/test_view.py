from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.ids import Incarnation, WorkerId
from services.registry.base import LoadReport, WorkerInfo, WorkerRecord
from services.registry.cost import Booked
from services.router.view import (
    LinkState,
    LinkStatus,
    ViewInputs,
    ViewMaker,
    WorkerView,
    pair_mismatch,
)
from tests.support.registry import make_worker_info

W0 = WorkerId("w0")
NOW = 100.0


def record(info: WorkerInfo | None = None, **changes: Any) -> WorkerRecord:
    """Build a record that is 1,500 ms from expiry."""
    base = WorkerRecord(3, 7, "live", 1500, LoadReport(), info or make_worker_info())
    return replace(base, **changes)


def link(status: LinkStatus = LinkStatus.UP, **changes: Any) -> LinkState:
    """Build a Link's state."""
    info = changes.pop("info", None) or make_worker_info()
    base = LinkState(info, status, since=50.0, incarnation=Incarnation(1))
    return replace(base, **changes)


def judge(
    rec: WorkerRecord | None, lnk: LinkState | None, *, now: float = NOW, **inputs: Any
) -> WorkerView:
    """Judge one worker."""
    made = ViewInputs(
        records={W0: rec} if rec else {},
        records_at=NOW,
        links={W0: lnk} if lnk else {},
        booked={},
        expected={},
    )
    (worker,) = ViewMaker().build(replace(made, **inputs), now).workers
    return worker


@pytest.mark.parametrize(
    ("rec", "lnk", "state"),
    [
        (record(), link(), "live"),
        (record(lease_left_ms=-5000), link(), "live"),  # the store's trouble is not the worker's
        (None, link(), "live"),  # the store was emptied
        (record(), None, "suspect"),
        (record(), link(LinkStatus.CONNECTING), "suspect"),
        (record(), link(LinkStatus.DOWN), "suspect"),
        (record(), link(LinkStatus.LAGGING), "suspect"),
        (record(lease_left_ms=0), None, "gone"),
        (record(lease_left_ms=-1), link(LinkStatus.DOWN), "gone"),
        (None, link(LinkStatus.DOWN), "gone"),
        (record(state="draining"), link(), "draining"),
        (record(), link(is_draining=True), "draining"),
    ],
)
def test_state_of_a_worker(rec: WorkerRecord | None, lnk: LinkState | None, state: str) -> None:
    worker = judge(rec, lnk)
    assert worker.state == state
    assert bool(worker.reason) == (state != "live")


def test_lease_runs_out_between_snapshots() -> None:
    """RB-101, RB-102: aged by the monotonic time since the store judged it."""
    assert judge(record(), None, now=NOW + 1.4).state == "suspect"
    assert judge(record(), None, now=NOW + 1.6).state == "gone"


def test_open_breaker_keeps_work_away() -> None:
    assert judge(record(), link(), broken=frozenset({W0})).state == "suspect"


def test_worker_of_another_model_is_incompatible_and_the_field_is_named() -> None:
    """RB-022: the reason has the field and both values."""
    worker = judge(record(), link(), expected={"weights_digest": "other"})
    assert worker.state == "incompatible"
    assert "weights_digest" in worker.reason
    assert "other" in worker.reason
    missing = judge(record(), link(), expected={"rope": "x"})
    assert "rope is '<absent>'" in missing.reason


def test_a_record_of_an_earlier_life_lends_no_slot() -> None:
    """RB-044: hints of the earlier life must not be credited to the new one."""
    worker = judge(record(), link(incarnation=Incarnation(2), slot_gen=9))
    assert (worker.slot, worker.slot_gen, worker.incarnation) == (None, 9, 2)
    same = judge(record(), link(slot_gen=9))
    assert (same.slot, same.slot_gen) == (3, 7)


def test_newest_load_wins() -> None:
    old, new = LoadReport(running=1), LoadReport(running=2)
    assert judge(record(load=old), link(load=new, load_at=NOW + 0.1)).load == new
    assert judge(record(load=new), link(load=old, load_at=NOW - 0.1)).load == new
    assert judge(record(load=new), link()).load == new


def test_bookings_and_up_time_are_shown() -> None:
    worker = judge(record(), link(), booked={W0: Booked(2, 30, 40)})
    assert worker.booked == Booked(2, 30, 40)
    assert worker.up_since == 50.0


@pytest.mark.parametrize(
    ("change", "later_s"),
    [
        ({}, 0.0),
        ({}, 0.019),
        ({}, 2.0),  # a lease ran out
        ({"records": {W0: record(lease_left_ms=1)}}, 0.002),
        ({"records": {}}, 0.0),
        ({"links": {W0: link(is_draining=True)}}, 0.0),
        ({"links": {}}, 0.0),
        ({"booked": {W0: Booked(2, 30, 40)}}, 0.001),
        ({"broken": frozenset({W0})}, 0.0),
        ({"broken": frozenset({W0}), "booked": {W0: Booked(1, 1, 1)}}, 0.001),
    ],
)
def test_a_view_made_after_another_is_as_one_made_afresh(
    change: dict[str, Any], later_s: float
) -> None:
    first = ViewInputs(
        records={W0: record()}, records_at=NOW, links={W0: link()}, booked={}, expected={}
    )
    second, maker = replace(first, **change), ViewMaker()
    assert maker.build(first, NOW) == ViewMaker().build(first, NOW)
    assert maker.build(second, NOW + later_s).at == NOW + later_s
    again = maker.build(second, NOW + later_s).workers
    fresh = ViewMaker().build(second, NOW + later_s).workers
    ages = [0 if w.lease_left_ms is None else w.lease_left_ms for w in (*again, *fresh)]
    assert max(ages, default=0) - min(ages, default=0) < 20
    assert [replace(w, lease_left_ms=0) for w in again] == [
        replace(w, lease_left_ms=0) for w in fresh
    ]


def test_pairs_are_compared_by_fingerprint_and_explained_by_field() -> None:
    p0 = make_worker_info("p0", role="prefill", rope="a")
    d0 = make_worker_info("d0", rope="b")
    assert pair_mismatch(p0, make_worker_info("d1", rope="a")) is None
    assert pair_mismatch(p0, d0) == (
        "rope differs: 'a' of prefill worker p0, 'b' of decode worker d0"
    )
    odd = replace(d0, identity_fields=p0.identity_fields)
    assert "equal fields" in (pair_mismatch(p0, odd) or "")


def test_why_unusable_speaks_of_the_first_few() -> None:
    records = {
        WorkerId(f"w{i}"): record(make_worker_info(f"w{i}"), lease_left_ms=0) for i in range(9)
    }
    view = ViewMaker().build(
        ViewInputs(records=records, records_at=NOW, links={}, booked={}, expected={}), NOW
    )
    assert view.why_unusable().count("is gone") == 4
