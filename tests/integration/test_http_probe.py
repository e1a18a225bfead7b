"""The health check of a container, asked as a container asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.common.address import HeldPort
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer
from services.telemetry.vitals import Verdict

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    probes = {"/live": lambda: Verdict(is_good=True), "/ready": lambda: Verdict(False, "starting")}
    running = MetricsServer(Metrics.enabled(), "127.0.0.1", 0, probes=probes)
    running.start()
    yield running
    running.stop()


def probe(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "services.runtime.http_probe", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, run.stdout.strip()


def test_it_ends_with_what_the_process_says(server: MetricsServer) -> None:
    at = f"http://127.0.0.1:{server.port}"
    assert probe(f"{at}/live") == (0, "ok")
    assert probe(f"{at}/ready") == (1, "503 starting")


def test_nobody_there_is_not_well() -> None:
    held = HeldPort("127.0.0.1")
    status, said = probe(f"http://127.0.0.1:{held.number}/live")
    held.release()
    assert status == 1
    assert "refused" in said


def test_it_asks_http_only() -> None:
    assert probe("file:///etc/passwd")[0] == 2
    assert probe()[0] == 2
