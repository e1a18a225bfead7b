"""Rates of `isthmus top` from two looks, also across a router's restart."""

from __future__ import annotations

from services.cli.top import plain_lines, pool_rows, router_rows, worker_rows
from services.pb import admin_pb2, worker_pb2


def status(**totals: int) -> admin_pb2.ClusterStatusResponse:
    """Make what a router says."""
    return admin_pb2.ClusterStatusResponse(
        router_id="r0", model="toy", totals=admin_pb2.Totals(**totals)
    )


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = status(
        uptime_ms=10_000, requests_ok=5, prompt_tokens=100, cached_tokens=0, completion_tokens=40
    )
    now = status(
        uptime_ms=12_000, requests_ok=9, prompt_tokens=300, cached_tokens=150, completion_tokens=240
    )
    [row] = router_rows({"a": before}, {"a": now})
    assert (row.requests_per_s, row.tokens_per_s, row.hit_share) == (2.0, 100.0, 0.75)


def test_restarted_router_is_compared_with_its_start() -> None:
    before = status(uptime_ms=90_000, requests_ok=500, completion_tokens=9_000)
    now = status(uptime_ms=2_000, requests_ok=4, completion_tokens=100)
    [row] = router_rows({"a": before}, {"a": now})
    assert (row.requests_per_s, row.tokens_per_s, row.hit_share) == (2.0, 50.0, None)


def test_worker_that_two_routers_know_is_shown_once() -> None:
    load = worker_pb2.Load(
        kv_free=25, kv_total=100, tbt_a_us=2_000, tbt_b_us=1, resident_tokens=500
    )
    seen = admin_pb2.WorkerView(worker_id="d0", role="decode", state="live", load=load)
    silent = admin_pb2.WorkerView(worker_id="p0", role="prefill", state="suspect")
    one = admin_pb2.ClusterStatusResponse(router_id="r0", workers=[seen])
    two = admin_pb2.ClusterStatusResponse(router_id="r1", workers=[silent, seen])
    rows = worker_rows([one, two])
    assert [row.worker_id for row in rows] == ["d0", "p0"]
    assert (rows[0].kv_used, rows[0].step_ms, rows[1].kv_used) == (0.75, 2.5, None)
    lines = list(plain_lines([], rows))
    assert lines[0].startswith("worker d0 role=decode state=live running=0")
    assert "kv=75%" in lines[0]
    assert "kv=-" in lines[1]


def pools_of(at_unix_ms: int, desired: int, limited_by: str = "") -> admin_pb2.Autoscaler:
    pool = admin_pb2.AutoscaledPool(
        pool="decode", ready=2, pending=1, draining=3, desired=desired, limited_by=limited_by,
        reason="ITL: above its target",
    )  # fmt: skip
    return admin_pb2.Autoscaler(policy="chat", mode="Auto", at_unix_ms=at_unix_ms, pools=[pool])


def test_pools_are_those_of_the_router_that_heard_last() -> None:
    one = admin_pb2.ClusterStatusResponse(router_id="r0", autoscaler=pools_of(1, 5))
    two = admin_pb2.ClusterStatusResponse(router_id="r1", autoscaler=pools_of(2, 4, "budget"))
    none = admin_pb2.ClusterStatusResponse(router_id="r2")
    lines = list(plain_lines([], [], pool_rows([one, two, none])))
    assert lines == [
        "pool decode desired=4 ready=2 pending=1 draining=3 limited_by=budget "
        "reason='ITL: above its target'"
    ]
    assert pool_rows([none]) == []
