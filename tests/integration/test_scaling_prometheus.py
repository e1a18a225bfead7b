from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from services.autoscaler.observation import Reading
from services.autoscaler.prometheus import PrometheusReader, queries_of
from tests.support.scaling_policy import make_policy


class Server:
    """Answers instant queries from a table."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        table = self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)["query"][0]
                found = table.get(query)
                self.send_response(200 if found is not None else 500)
                self.end_headers()
                if found is not None:
                    self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.thread.join()
    made.http.server_close()


pytestmark = pytest.mark.integration


def sample(value: str, at: float = 90.0) -> dict[str, object]:
    return {"status": "success", "data": {"result": [{"metric": {}, "value": [at, value]}]}}


async def test_figures_are_read_with_their_time(server: Server) -> None:
    server.answers["sum(depth)"] = sample("12.5")
    reader = PrometheusReader(server.url + "/", {"depth": "sum(depth)"}, timeout_s=20.0)
    assert await reader.read(100.0) == {"depth": Reading(12.5, 90.0)}


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"data": {"result": []}}, sample("NaN"), sample("many"), [1],
     {"data": {"result": [{"value": [1.0]}]}}],
    ids=["error", "empty", "no sample", "nan", "word", "list", "short"],
)  # fmt: skip
async def test_what_is_no_figure_is_left_out_and_the_rest_is_read(
    server: Server, answer: object
) -> None:
    if answer is not None:
        server.answers["sum(bad)"] = answer
    server.answers["sum(good)"] = sample("1")
    queries = {"bad": "sum(bad)", "good": "sum(good)"}
    reader = PrometheusReader(server.url, queries, timeout_s=20.0)
    assert await reader.read(100.0) == {"good": Reading(1.0, 90.0)}


async def test_server_that_is_not_there_gives_no_figures() -> None:
    reader = PrometheusReader("http://127.0.0.1:1", {"depth": "sum(depth)"}, timeout_s=20.0)
    assert await reader.read(100.0) == {}


def test_queries_are_those_of_the_policy() -> None:
    external = {
        "type": "External", "external": {"metric": {"name": "backlog_bytes"}},
        "target": {"type": "AverageValue", "averageValue": "1Mi"},
    }  # fmt: skip
    spec = make_policy({"decode": {"metrics": [external]}}).spec
    assert queries_of(spec) == {"backlog_bytes": "sum(backlog_bytes)"}
    spec = make_policy(
        metrics={"source": "Prometheus"},
        slo={"ttft": {"percentile": "p99", "targetMilliseconds": 9}},
    ).spec
    queries = queries_of(spec)
    assert queries["TTFT"] == (
        "histogram_quantile(0.99, sum by (le) (rate(isthmus_ttft_seconds_bucket[1m])))"
    )
    assert queries["ITL"].startswith("histogram_quantile(0.95, ")
