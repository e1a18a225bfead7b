"""A service held from another thread ends as one that is signalled, and leaves signals alone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.runtime.run import Leash, Phases, run_service

JOIN_S = 30.0


class Service:
    """Notes its phases; draining never ends by itself."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.is_draining = threading.Event()

    async def start(self) -> None:
        self.steps.append("started")

    async def drain(self) -> None:
        self.steps.append("draining")
        self.is_draining.set()
        await asyncio.sleep(3_600)

    async def stop(self) -> None:
        self.steps.append("stopped")


def run_on_thread(
    service: Service, leash: Leash, drain_s: float
) -> tuple[threading.Thread, list[int]]:
    statuses: list[int] = []
    phases = Phases(service.start, service.drain, service.stop)

    def run() -> None:
        statuses.append(run_service(phases, drain_s=drain_s, leash=leash))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, statuses


def test_pulled_by_another_thread_it_drains_for_as_long_as_it_is_told() -> None:
    ready = threading.Event()
    service, leash = Service(), Leash(ready.set)
    thread, statuses = run_on_thread(service, leash, drain_s=3_600)
    assert ready.wait(JOIN_S)
    leash.pull(0.05)  # much less than the service's own limit
    thread.join(JOIN_S)
    assert statuses == [0]
    assert service.steps == ["started", "draining", "stopped"]


def test_only_the_first_pull_counts() -> None:
    ready = threading.Event()
    service, leash = Service(), Leash(ready.set)
    thread, statuses = run_on_thread(service, leash, drain_s=0.2)
    assert ready.wait(JOIN_S)
    leash.pull()
    leash.pull(3_600)
    thread.join(JOIN_S)
    assert statuses == [0]
    assert leash.drain_s is None


def test_pulled_before_it_runs_it_ends_without_having_served() -> None:
    is_ready = threading.Event()
    service, leash = Service(), Leash(is_ready.set)
    leash.pull()
    thread, statuses = run_on_thread(service, leash, drain_s=0.05)
    thread.join(JOIN_S)
    assert statuses == [0]
    assert service.steps[-1] == "stopped"


def test_pulled_after_its_end_nothing_happens() -> None:
    service, leash = Service(), Leash()
    leash.pull(0.01)
    thread, _ = run_on_thread(service, leash, drain_s=0.05)
    thread.join(JOIN_S)
    leash.pull()
    assert leash.drain_s == pytest.approx(0.01)
