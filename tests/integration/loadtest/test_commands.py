"""`python -m loadtest`: exit codes, files, and an end by Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest import cli
from loadtest.raw_file import read_records
from loadtest.records import Status
from loadtest.results import RAW_FILE, load_result

pytestmark = pytest.mark.integration

SCENARIO = """
name: tiny
arrivals: {kind: constant, rate_rps: 20}
workload: {kind: fixed, isl: 8, osl: 3}
slo: {e2e_s: 60}
phases: {measure_s: 1}
"""
MODELS = b'{"data":[{"id":"m"}]}'


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


class Silent(ThreadingHTTPServer):
    """Lists a model, and never answers what it is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.was_asked = threading.Event()
        self.may_end = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Silent

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def do_POST(self) -> None:
        self.server.was_asked.set()
        self.server.may_end.wait(60)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.may_end.set()
        server.shutdown()
        thread.join(60)
        server.server_close()


def test_a_run_ends_with_its_files(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    target = "mock://http?service_ms=1&itl_ms=1"
    code = cli.run(["run", str(scenario), "--target", target, "--out", str(out), "--attain", "1"])

    (directory,) = out.iterdir()
    result = load_result(directory)
    assert result.kind == "run"
    assert result.counts["ok"] == result.counts["measured"] == 20
    # A machine that stands still makes the client late, which is its verdict and not a fault.
    assert code == (1 if result.verdict == "CLIENT_BOUND" else 0)


def test_a_share_that_is_missed_ends_with_1(scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(SCENARIO.replace("e2e_s: 60", "e2e_s: 0.000001"))
    target = "sim:prefill=1,decode=1"
    flags = ["--target", target, "--out", str(tmp_path / "out"), "--attain", "0.5", "--json"]

    assert cli.run(["run", str(scenario), *flags]) == 1
    assert cli.run(["run", str(scenario), *flags[:-3]]) == 0


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "data/mooncake_conversation_first_120.jsonl.gz"
    flags = ["--target", "sim:", "--to-s", "9", "--max-isl", "9000", "--ttft-s", "60"]

    assert cli.run(["replay", str(trace), *flags, "--out", str(tmp_path), "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["scenario"]["workload"]["file"] == trace.name
    assert 0 < result["counts"]["ok"] < 120
    assert result["attainment"]["value"] == 1.0


def test_interference_is_told_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--quick", "--rate", "20", "--blocks", "2", "--target", "sim:prefill=2,decode=2"]
    code = cli.run(["interference", "long8k", *flags, "--out", str(tmp_path), "--json"])

    told = capsys.readouterr()
    result = json.loads(told.out)
    assert code == 0, told.err
    assert result["name_a"] == "long8k without long"
    assert result["figures"]["interference"] >= 1
    assert "warning: fewer than 11 blocks" in told.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "nope", "--target", "sim:"], 2, "there is no scenario nope"),
        (["run", "chat_rt", "--target", "http://127.0.0.1:1"], 5, "no connection"),
        (["run", "chat_rt", "--target", "x"], 5, "x is no target"),
        (["run", "chat_rt"], 2, "--target"),
        (["run", "chaos", "--target", "sim:"], 2, "give --cluster FILE"),
        (["interference", "chat_rt", "--target", "sim:"], 2, "has no part long"),
        (["report", "/nowhere"], 2, "No such file"),
        (["replay", "x.txt", "--target", "sim:"], 2, "neither .jsonl"),
        (["run", "offline", "--target", "sim:", "--rate", "3"], 2, "have no rate"),
        (["run", "chat_rt", "--target", "sim:", "--out", "/dev/null"], 2, "cannot be written"),
        (["search", "chat_rt", "--target", "sim:", "--out", "/dev/null"], 2, "cannot be written"),
        (["run", "chat_rt", "--target", "sim:", "--rate", "1e9"], 2, "--rate"),
    ],
)
def test_what_people_can_mend_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == code
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_a_run_with_what_there_is(
    scenario: Path, tmp_path: Path, silent: Silent
) -> None:
    scenario.write_text(SCENARIO.replace("measure_s: 1", "measure_s: 500"))
    out = tmp_path / "out"
    command = (
        *(sys.executable, "-m", "loadtest", "run", str(scenario), "--out", str(out)),
        *("--target", f"http://127.0.0.1:{silent.server_port}"),
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert silent.was_asked.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()

    (directory,) = out.iterdir()
    records = read_records(directory / RAW_FILE)
    assert "* note: the run was stopped from outside" in (directory / "summary.md").read_text()
    assert records
    assert {record.status for record in records} == {Status.CENSORED}


def test_the_program_loads_no_model_code() -> None:
    code = (
        "import sys, loadtest.cli, loadtest.launch, loadtest.grpc_target, loadtest.http_target, "
        "loadtest.sim_target, loadtest.analysis, loadtest.outputs\n"
        "found = {'torch', 'transformers', 'tokenizers', 'services.engine.scheduler'}\n"
        "sys.exit(str(found & set(sys.modules)) if found & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
