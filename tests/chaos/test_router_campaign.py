"""Slices of `isthmus chaos router`, `rolling`, `store` and `scale`: no client notices anything."""

from __future__ import annotations

import pytest

from services.chaos.attack import Load
from services.chaos.rolling import RollingPlan
from services.chaos.rolling import run as run_rolling
from services.chaos.router import RouterCampaign, run
from services.chaos.scale import ScalePlan
from services.chaos.scale import run as run_scale
from services.chaos.store import StorePlan
from services.chaos.store import run as run_store

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]


def test_no_client_notices_that_every_process_dies_in_turn() -> None:
    """RB-021, RB-048, RB-051, RB-097, G6, G7, G8: one retry by key when a router dies, no more."""
    result = run(RouterCampaign(seed=7, seconds=20.0, load=Load(clients=6), is_whole=False))
    assert not [bar for bar in result.bars if not bar.is_met], result.to_json()


def test_a_rolling_restart_of_the_routers_loses_nothing() -> None:
    """G7, G10: one retry by key. A busy machine's slow store is no part of this test."""
    result = run_rolling(RollingPlan(seed=3, rounds=1, quiet_s=0.5, load=Load(clients=6)))
    missed = [bar for bar in result.bars if not bar.is_met and bar.name != "blind_share_during"]
    assert not missed, result.to_json()


def test_a_hurt_store_fails_no_request_and_hints_come_back() -> None:
    """G8, I7: times to the first token say nothing on a busy machine."""
    result = run_store(StorePlan(seed=5, rounds=1, span_s=0.7, load=Load(clients=4)))
    times = {"ttft_p99_hurt_to_undisturbed", "hints_back_s"}
    missed = [bar for bar in result.bars if not bar.is_met and bar.name not in times]
    assert not missed, result.to_json()
    backs = [value for name, value in result.figures.items() if name.startswith("hints_back")]
    assert len(backs) == 7
    assert all(isinstance(value, float) and value < 30 for value in backs), result.to_json()


def test_pools_grow_and_shrink_and_no_client_notices() -> None:
    """RB-105, RB-108, G10, G11: who leaves refuses work, empties, and then ends.

    How large the load gets says nothing on a busy machine.
    """
    result = run_scale(ScalePlan(seed=2, rounds=1, share=0.0, load=Load(clients=6)))
    assert not [bar for bar in result.bars if not bar.is_met], result.to_json()
