"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until true; fail with what was waited for."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)
