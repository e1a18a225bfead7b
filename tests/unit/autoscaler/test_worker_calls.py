from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.autoscaler import worker_calls
from services.autoscaler.worker_calls import WorkerCalls


async def test_many_workers_that_do_not_answer_cost_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked so many at once they would make a tick as long as there are of them."""
    monkeypatch.setattr(worker_calls, "_STATUSES_TIMEOUT_S", 0.05)
    num_asked = 0

    async def never(_request: object, **_options: object) -> None:
        nonlocal num_asked
        num_asked += 1
        await asyncio.Event().wait()

    stub: Any = SimpleNamespace(Status=never)
    calls = WorkerCalls()
    monkeypatch.setattr(calls, "_stub", lambda address: stub)
    addresses = {f"decode-{i}": f"127.0.0.1:{i}" for i in range(1, 500)}
    assert await calls.statuses(addresses) == dict.fromkeys(addresses)
    assert num_asked < len(addresses)  # the others had no turn before it was over
    await calls.close()
