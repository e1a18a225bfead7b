"""What becomes of a Ray that hangs; all else of its driver is tested on a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container
from typing import Any

import pytest

from services.autoscaler.driver import DriverError
from services.autoscaler.ray_driver import LocalRay
from tests.support.cluster import eventually

pytest.importorskip("ray")


class HangingCluster:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.num_calls = 0

    def adopt(self, known: Container[str]) -> list[Any]:
        self.num_calls += 1
        self.asked.set()
        assert self.go_on.wait(30)
        return []


async def test_call_that_was_given_up_is_the_only_one_until_it_ends() -> None:
    """Else every tick would leave a thread behind, and a start that comes when it is too late."""
    cluster: Any = HangingCluster()
    driver = LocalRay(cluster, {}, lambda: 0.0)
    given_up = asyncio.create_task(driver.replicas())
    await eventually(cluster.asked.is_set)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    for _ in range(3):
        with pytest.raises(DriverError, match="has not answered"):
            await driver.replicas()
    await driver.close()  # does not wait for it
    assert cluster.num_calls == 1
    cluster.go_on.set()
    await eventually(lambda: not driver._thread.is_busy)
    assert await driver.replicas() == {}
