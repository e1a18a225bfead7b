"""Router processes on one port: all serve, each counts its own, one that dies comes back."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.bench.local_cluster import LocalCluster
from services.chaos.scripted_model import SLIM, make_scripted_model
from services.cli import exits
from tests.support.waiting import wait_for

pytestmark = pytest.mark.integration

REQUESTS = re.compile(r"^isthmus_requests_total\{.*outcome=\"ok\".*\} (\S+)$", re.MULTILINE)
ROUTER = re.compile(r"^isthmus_router_info\{router_id=\"(\S+)\"\}", re.MULTILINE)
LIVE = re.compile(r"^isthmus_workers\{.*state=\"live\".*\} (\S+)$", re.MULTILINE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    model_dir = make_scripted_model(tmp_path / "model", SLIM)
    flags = ("--engine", "scripted", "--num-blocks", "2048", "--router-processes", "2")
    with LocalCluster(model_dir, prefill=1, decode=1, flags=flags) as running:
        yield running


def members(cluster: LocalCluster) -> list[psutil.Process]:
    return psutil.Process(cluster.pid_of("router")).children()


def metrics_of(member: psutil.Process, doors: set[int]) -> str:
    """Scrape the port that this process has for itself; empty while it has none."""
    try:
        listens = {c.laddr.port for c in member.net_connections("tcp") if c.status == "LISTEN"}
        own = listens - doors
        if not doors <= listens or len(own) != 1:
            return ""
        with urllib.request.urlopen(f"http://127.0.0.1:{own.pop()}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except (psutil.Error, OSError):  # it has just ended
        return ""


def total(pattern: re.Pattern[str], text: str) -> float:
    return sum(float(value) for value in pattern.findall(text))


def complete(url: str) -> int:
    """One request on a connection of its own; return its completion tokens."""
    body = {"prompt": "ABC", "max_tokens": 3, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def test_processes_share_a_port_count_apart_and_come_back(cluster: LocalCluster) -> None:
    entry = next(p for p in cluster.processes if p["role"] == "router")
    doors = {int(entry[door].rpartition(":")[2]) for door in ("grpc", "http")}

    def are_ready() -> bool:
        found = members(cluster)
        return len(found) == 2 and all(total(LIVE, metrics_of(m, doors)) == 2 for m in found)

    wait_for(are_ready, 60, "both processes see both workers")
    before = members(cluster)
    assert [complete(cluster.http) for _ in range(32)] == [3] * 32
    scraped = [metrics_of(member, doors) for member in before]
    counts = [total(REQUESTS, text) for text in scraped]
    assert sum(counts) == 32
    assert all(counts)
    assert len({ROUTER.findall(text)[0] for text in scraped}) == 2

    before[0].kill()
    wait_for(lambda: before[0] not in members(cluster), 30, "its death is noticed")
    # Who is left has the port to itself: nobody is refused while the other is away.
    assert [complete(cluster.http) for _ in range(8)] == [3] * 8
    wait_for(are_ready, 60, "both processes see both workers")
    assert before[1] in members(cluster)
    assert entry["pid"] == cluster.pid_of("router")


def test_a_port_that_others_have_is_refused_and_not_shared(tmp_path: Path) -> None:
    model_dir = make_scripted_model(tmp_path / "model", SLIM)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["router", "--model", str(model_dir), "--processes", "2", "--http-port", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "services.cli.main", *words, "--grpc-port", str(port)],
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == exits.USAGE
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_a_configuration_no_process_can_run_with_ends_the_group(tmp_path: Path) -> None:
    words = ["router", "--model", str(tmp_path / "nothing"), "--processes", "2"]
    words += ["--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == exits.MODEL
