"""Slices of `isthmus chaos router` and `isthmus chaos rolling`: no client notices anything."""

from __future__ import annotations

import pytest

from services.chaos.attack import Load
from services.chaos.rolling import RollingPlan
from services.chaos.rolling import run as run_rolling
from services.chaos.router import RouterCampaign, run

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]


def test_no_client_notices_that_every_process_dies_in_turn() -> None:
    """RB-021, RB-048, RB-051, RB-097, G6, G7, G8: one retry by key when a router dies, no more."""
    result = run(RouterCampaign(seed=7, seconds=20.0, load=Load(clients=6), is_whole=False))
    assert not [bar for bar in result.bars if not bar.is_met], result.to_json()


def test_a_rolling_restart_of_the_routers_loses_nothing() -> None:
    """G7, G10: one retry by key. A busy machine's slow store is no part of this test."""
    result = run_rolling(RollingPlan(seed=3, rounds=1, quiet_s=0.5, load=Load(clients=6)))
    missed = [bar for bar in result.bars if not bar.is_met and bar.name != "blind_share_during"]
    assert not missed, result.to_json()
