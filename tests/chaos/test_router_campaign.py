"""A slice of `isthmus chaos router`: two pools, two routers, a store; no client notices a fault."""

from __future__ import annotations

import pytest

from services.chaos.attack import Load
from services.chaos.router import RouterCampaign, run

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]


def test_no_client_notices_that_every_process_dies_in_turn() -> None:
    """RB-021, RB-048, RB-051, RB-097, G6, G7, G8: one retry by key when a router dies, no more."""
    result = run(RouterCampaign(seed=7, seconds=25.0, load=Load(clients=6), is_whole=False))
    assert not [bar for bar in result.bars if not bar.is_met], result.to_json()
