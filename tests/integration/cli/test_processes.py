"""Router and worker as `isthmus` starts them: exit statuses, and nothing secret in their output."""

from __future__ import annotations

import base64
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.toy_model import make_toy_model

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]
SENTINEL = "s3ntinel/pa+ss-4711"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy") / "model")


@contextmanager
def isthmus(log: Path, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", *arguments],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=out,
            stderr=out,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def wait_for_event(log: Path, event: str, timeout_s: float = 250) -> None:
    end = time.monotonic() + timeout_s
    while event not in log.read_text():
        assert time.monotonic() < end, log.read_text()[-2_000:]
        time.sleep(0.05)


def test_router_with_a_dead_store_waits_and_shows_no_secret(tmp_path: Path, toy: Path) -> None:
    """RB-118 and RB-116: no exit while the store is away, no password in any form in the log."""
    log = tmp_path / "log"
    with isthmus(
        log,
        *("router", "--model", str(toy), "--grpc-port", "0", "--http-port", "0"),
        *("--log-level", "debug"),
        ISTHMUS_STORE__URL=f"redis://user:{quote(SENTINEL, safe='')}@127.0.0.1:1/0",
    ) as process:
        wait_for_event(log, "router.store_unavailable")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    text = log.read_text()
    assert "service.stopped" in text
    for form in (SENTINEL, quote(SENTINEL, safe=""), base64.b64encode(SENTINEL.encode()).decode()):
        assert form not in text


def test_worker_on_a_taken_port_ends_with_2_and_says_which(tmp_path: Path, toy: Path) -> None:
    log = tmp_path / "log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with isthmus(log, "worker", "--model", str(toy), "--grpc-port", port) as process:
            assert process.wait(250) == 2
    assert f"cannot listen on 127.0.0.1:{port} (worker.grpc_port)" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_worker_without_its_device_ends_with_2_and_says_so(tmp_path: Path, toy: Path) -> None:
    """A status the supervisor does not start again for: the device will not appear."""
    log = tmp_path / "log"
    with isthmus(
        log,
        *("worker", "--model", str(toy), "--device", "cuda"),
        CUDA_VISIBLE_DEVICES="",
    ) as process:
        assert process.wait(250) == 2
    assert "worker.device is cuda, but this torch sees no CUDA device" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_router_without_its_keys_file_ends_with_2_and_names_it(tmp_path: Path, toy: Path) -> None:
    log = tmp_path / "log"
    missing = str(tmp_path / "keys.json")
    with isthmus(
        log,
        *("router", "--model", str(toy), "--grpc-port", "0", "--http-port", "0"),
        ISTHMUS_AUTH__KEYS_FILE=missing,
    ) as process:
        assert process.wait(250) == 2
    assert f"auth.keys_file: there is no {missing}" in log.read_text()


def test_missing_model_ends_with_3(tmp_path: Path) -> None:
    log = tmp_path / "log"
    missing = str(tmp_path / "none.gguf")
    with isthmus(log, "router", "--model", missing) as process:
        assert process.wait(250) == 3
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("role", ["router", "worker"])
def test_too_few_open_files_end_with_2_before_the_model_is_loaded(
    tmp_path: Path, toy: Path, role: str
) -> None:
    """libzmq ends a process that runs out of descriptors: SIGABRT under load."""
    command = [sys.executable, "-m", "services.cli.main", role, "--model", str(toy)]
    limited = f"ulimit -n 100; exec {shlex.join(command)}"
    done = subprocess.run(
        ["sh", "-c", limited], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "open files: this process may have 100 at most and needs 256" in done.stderr
    assert "loaded" not in done.stdout + done.stderr
