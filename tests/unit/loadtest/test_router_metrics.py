"""Workers by pool from a router's own metrics page, and nothing from others."""

from __future__ import annotations

from loadtest.router_metrics import look_at
from loadtest.target import ClusterLook
from services.telemetry import catalog
from services.telemetry.metrics import Metrics


def test_live_workers_are_counted_by_role_on_a_page_of_ours() -> None:
    metrics = Metrics.enabled()
    metrics.watch(
        catalog.WORKERS,
        lambda: [
            (2, {"role": "prefill", "state": "live"}),
            (3, {"role": "decode", "state": "live"}),
            (1, {"role": "decode", "state": "draining"}),
        ],
    )
    metrics.watch(catalog.QUEUED, lambda: 7.0)

    assert look_at(metrics.render().decode()) == ClusterLook({"prefill": 2, "decode": 3}, 7)


def test_a_page_of_another_server_tells_nothing() -> None:
    assert look_at("") is None
    assert look_at('# HELP x y\nvllm:num_requests_running{model="m"} 3.0\nnonsense\n') is None
    assert look_at('isthmus_queued NaN\nisthmus_workers{state="live"} x\n') is None
