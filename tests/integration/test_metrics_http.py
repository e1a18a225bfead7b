"""A worker's metrics are one GET away, and nothing else is."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError
from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_http import MetricsServer
from services.worker.peer_auth import scrape_guard

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


def test_a_page_with_a_token_is_for_those_who_have_it(metrics: Metrics, tmp_path: Path) -> None:
    """G14: no listener answers anyone but to say whether it is alive."""
    file, clock = tmp_path / "token", ManualClock()
    file.write_text("a-token-of-some-length\n")
    guarded = MetricsServer(metrics, "127.0.0.1", 0, scrape_guard(str(file), clock))
    guarded.start()
    try:

        def status(authorization: str | None) -> int:
            headers = {} if authorization is None else {"Authorization": authorization}
            connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=10)
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            assert (b"isthmus_" in body) is (answer.status == 200)
            return answer.status

        right = "Bearer a-token-of-some-length"
        assert status(right) == 200
        for wrong in (None, "", "Bearer", right + "x", right[:-1], right.lower().upper()):
            assert status(wrong) == 401
        file.write_text("another-token-of-some-length")
        clock.advance(1.0)
        assert (status(right), status("Bearer another-token-of-some-length")) == (401, 200)
    finally:
        guarded.stop()


@pytest.mark.parametrize("content", ["", "short", "x" * 5000])
def test_a_token_that_is_none_ends_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"worker\.metrics_token_file"):
        scrape_guard(str(file), ManualClock())
    with pytest.raises(ConfigError, match="cannot be read"):
        scrape_guard(str(tmp_path / "none"), ManualClock())
