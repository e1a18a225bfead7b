"""A worker's metrics are one GET away, and nothing else is."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from services.common.errors import ConfigError
from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer

pytestmark = pytest.mark.integration


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics.enabled()
    yield made
    made.shutdown()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    running = MetricsServer(metrics, "127.0.0.1", 0)
    running.start()
    yield running
    running.stop()


def ask(server: MetricsServer, method: str, path: str) -> tuple[int, bytes, int]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    answer = response.status, response.read(), int(response.headers.get("Content-Length", "0"))
    connection.close()
    return answer


def test_get_and_head_of_metrics(server: MetricsServer, metrics: Metrics) -> None:
    metrics.add(catalog.STEPS, 3)
    status, body, length = ask(server, "GET", "/metrics")
    assert (status, length) == (200, len(body))
    assert b"isthmus_steps_total 3.0" in body
    assert ask(server, "HEAD", "/metrics") == (200, b"", length)


def test_other_paths_and_methods_are_refused(server: MetricsServer) -> None:
    assert ask(server, "GET", "/")[0] == 404
    assert ask(server, "POST", "/metrics")[0] == 501


def test_taken_port_is_a_clear_error(server: MetricsServer, metrics: Metrics) -> None:
    with pytest.raises(ConfigError, match=str(server.port)):
        MetricsServer(metrics, "127.0.0.1", server.port)
