"""`isthmus admin`, `explain` and `top` against a cluster of scripted workers."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.bench.local_cluster import LocalCluster
from services.chaos.scripted_model import make_scripted_model
from services.cli import exits
from services.cli.main import run
from services.pb import admin_pb2, admin_pb2_grpc
from tests.support.generate import generate, request
from tests.support.waiting import wait_for

pytestmark = pytest.mark.integration

PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model_dir = make_scripted_model(tmp_path_factory.mktemp("model"))
    flags = ("--engine", "scripted")
    with LocalCluster(model_dir, prefill=2, decode=1, flags=flags) as running:
        yield running


def admin(cluster: LocalCluster, *arguments: str) -> int:
    """Run a command of the group."""
    return run(["admin", "--server", cluster.grpc, *arguments])


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the router comes to see."""
    wait_for(condition, 20.0, "the router sees it")


def seen(cluster: LocalCluster, worker_id: str) -> tuple[str, str]:
    """Role and state of a worker as the router sees it."""
    [found] = [w for w in cluster.cluster_status().workers if w.worker_id == worker_id]
    return found.role, found.state


def ask(cluster: LocalCluster) -> httpx.Response:
    """Send a prompt to the HTTP door and have its timing with the answer."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.http}/v1/completions", json=body, headers={"x-isthmus-timing": "1"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer


class Strange(admin_pb2_grpc.AdminServicer):
    """A router that has never heard of any request."""

    def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListRequestsResponse:
        return admin_pb2.ListRequestsResponse(router_id="stranger")

    def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        context.abort(grpc.StatusCode.NOT_FOUND, "not_found: who?")


@pytest.fixture
def stranger() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    strange = Strange()  # type: ignore[abstract]  # only this one is called
    admin_pb2_grpc.add_AdminServicer_to_server(strange, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_header_of_an_answer_finds_its_explanation_whichever_router_has_it(
    cluster: LocalCluster, stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(cluster)
    request_id = answer.headers["x-isthmus-request-id"]
    servers = ["--server", stranger, "--server", cluster.grpc]
    assert run(["explain", request_id, *servers, "--json"]) == exits.OK
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    timing = answer.json()["isthmus"]
    assert report["outcome"] == "ok"
    candidates = report["choices"][0]["candidates"]
    assert candidates[0]["worker_id"] == report["choices"][0]["worker_id"]
    assert {"prefill-0", "prefill-1"} <= {found["worker_id"] for found in candidates}
    ttft_us = int(report["ttft_us"])
    assert ttft_us == timing["ttft_us"] > 0
    assert abs(sum(int(s["us"]) for s in report["ttft_stages"]) - ttft_us) <= 0.01 * ttft_us
    assert run(["explain", request_id, *servers]) == exits.OK
    shown = capsys.readouterr().out
    assert "time to first token" in shown
    assert "chosen" in shown
    assert run(["explain", "nobody", *servers]) == exits.FAILED
    assert "not_found" in capsys.readouterr().err


def test_drained_worker_gets_no_work_until_it_is_undrained(cluster: LocalCluster) -> None:
    assert admin(cluster, "drain", "prefill-0", "--wait", "20") == exits.OK
    until(lambda: seen(cluster, "prefill-0") == ("prefill", "draining"))
    for index in range(4):
        answer = generate(cluster.grpc, request([*PROMPT, index], max_tokens=2), mode="REMOTE")
        assert answer.timing is not None
        assert answer.timing.prefill_worker == "prefill-1"
    assert admin(cluster, "undrain", "prefill-0") == exits.OK
    until(lambda: seen(cluster, "prefill-0") == ("prefill", "live"))
    assert admin(cluster, "drain", "nobody") == exits.FAILED


def test_worker_changes_its_pool_and_comes_back(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = cluster.pids()
    expected = generate(cluster.grpc, request(PROMPT, max_tokens=6), mode="REMOTE").token_ids
    assert admin(cluster, "role", "prefill-1", "decode") == exits.OK
    until(lambda: seen(cluster, "prefill-1") == ("decode", "live"))
    # The others leave it alone with the decoding.
    assert admin(cluster, "drain", "decode-0", "--wait", "20") == exits.OK
    until(lambda: seen(cluster, "decode-0")[1] == "draining")
    answer = generate(cluster.grpc, request(PROMPT, max_tokens=6), mode="REMOTE")
    assert answer.timing is not None
    assert (answer.timing.decode_worker, answer.token_ids) == ("prefill-1", expected)
    assert admin(cluster, "undrain", "decode-0") == exits.OK
    assert admin(cluster, "role", "prefill-1", "prefill") == exits.OK
    until(lambda: seen(cluster, "prefill-1") == ("prefill", "live"))
    until(lambda: seen(cluster, "decode-0") == ("decode", "live"))
    assert cluster.pids() == pids
    assert admin(cluster, "role", "prefill-1", "draft") == exits.FAILED
    assert "role must be one of" in capsys.readouterr().err
    cluster.assert_no_blocks_in_use()


def test_flushed_cache_holds_nothing(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(cluster.grpc, request(PROMPT, max_tokens=2), mode="LOCAL")
    cluster.assert_no_blocks_in_use()
    assert admin(cluster, "flush", "decode-0") == exits.OK
    assert "blocks dropped, 0 kept" in capsys.readouterr().out
    [status] = [w for w in cluster.worker_statuses() if w.worker_id == "decode-0"]
    assert (status.blocks_cached, status.blocks_free) == (0, status.blocks_total)
    answer = generate(cluster.grpc, request(PROMPT, max_tokens=2), mode="LOCAL")
    assert answer.usage is not None
    assert answer.usage.cached_tokens == 0


def test_log_levels_change_at_run_time(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(cluster, "log-level", "error", "--worker", "decode-0") == exits.OK
    assert admin(cluster, "log-level", "info", "--worker", "decode-0") == exits.OK
    assert capsys.readouterr().out.splitlines()[-1] == "decode-0: info, was error"
    assert admin(cluster, "log-level", "error") == exits.OK
    assert admin(cluster, "log-level", "info") == exits.OK
    assert capsys.readouterr().out.splitlines()[-1].endswith("info, was error")
    assert admin(cluster, "log-level", "loud") == exits.FAILED


def test_bundle_describes_every_process_and_holds_no_secret(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    ask(cluster)
    path = tmp_path / "bundle.tar.gz"
    assert admin(cluster, "bundle", str(path)) == exits.OK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        root = f"isthmus-diagnostics/{cluster.grpc}"
        files = {
            member.name.removeprefix(f"{root}/"): archive.extractfile(member).read()  # type: ignore[union-attr]  # all are files
            for member in archive.getmembers()
        }
    own = {"config.json", "versions.json", "metrics.txt", "stacks.txt"}
    expected = {f"workers/{w}/{f}" for w in ("prefill-0", "prefill-1", "decode-0") for f in own}
    more = {"status.json", "requests.json", "decisions.json"}
    assert set(files) == expected | {f"router/{name}" for name in own | more}
    assert json.loads(files["router/config.json"])["store.url"] == "[redacted]"
    assert all(b"unix:///" not in content and b"redis://" not in content
               for content in files.values())  # fmt: skip
    assert json.loads(files["router/decisions.json"])[0]["outcome"] == "ok"
    assert b"isthmus_requests_total" in files["router/metrics.txt"]
    assert b"thread engine" in files["workers/decode-0/stacks.txt"]
    assert admin(cluster, "bundle", str(path)) == exits.FAILED  # nothing is overwritten


def test_top_writes_plain_lines_into_a_pipe(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(cluster)
    flags = ["--server", cluster.grpc, "--interval", "0.1", "--count", "2"]
    assert run(["top", *flags]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["router", "worker", "worker", "worker"] * 2
    assert "tok/s=" in lines[0]
    assert lines[1].startswith("worker decode-0 role=decode state=live")


def test_running_requests_are_none_when_idle(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(cluster, "requests", "--json") == exits.OK
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["requests"] == []
    assert admin(cluster, "kill", "nobody") == exits.FAILED
