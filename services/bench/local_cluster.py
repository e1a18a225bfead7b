"""A cluster on this machine as a child process: `isthmus up`, driven by its status file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from services.bench.result import BenchFailed
from services.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
RPC_TIMEOUT_S = 5.0
POLL_S = 0.05
_BYPASS = "ISTHMUS_ROUTER__BYPASS_TOKENS"


class ClusterFailed(BenchFailed):
    """The cluster did not start, did not stop, or lost blocks; the message quotes its output."""


class LocalCluster:
    """Starts on entry, stops on exit; its state is read over the wire or from its status file."""

    def __init__(
        self,
        model: Path | str,
        *,
        prefill: int,
        decode: int,
        flags: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        api_key: str = "",
    ) -> None:
        """Prepare; `settings` maps ISTHMUS_SECTION__FIELD to a value, `api_key` may monitor."""
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._dir = Path(tempfile.mkdtemp(prefix="isthmus-local-"))
        self.status_file = self._dir / "status.json"
        self._log_file = self._dir / "up.log"
        self._command = [
            *(sys.executable, "-m", "services.cli.main", "up", "--model", str(model)),
            *("--prefill", str(prefill), "--decode", str(decode)),
            *("--grpc-port", "0", "--http-port", "0"),
            *("--json-status", str(self.status_file)),
            *flags,
        ]
        # What is measured and tested here are two pools: short prompts take the whole way too.
        self._environ = {_BYPASS: "0", **os.environ, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        """Start and wait until every process is ready."""
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait(lambda: self.status().get("state") == "ready", START_TIMEOUT_S, "ready")
            self._wait(self._routers_know_all_workers, START_TIMEOUT_S, "ready for every mode")
        except BaseException:
            # Asked first: only then does it remove its sockets and logs. The error quotes them.
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self._kill()
            self._cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop with SIGTERM; a cluster that does not stop in time is an error."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            self.returncode = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            log = self.log()
            self._cleanup()
            raise ClusterFailed(f"not stopped within {STOP_TIMEOUT_S} s\n{log}") from None
        self._cleanup()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    def _cleanup(self) -> None:
        for path in self._dir.iterdir():
            path.unlink()
        self._dir.rmdir()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                raise ClusterFailed(f"`isthmus up` ended with {code}\n{self.log()}")
            if time.monotonic() > end:
                raise ClusterFailed(f"not {what} within {timeout_s} s\n{self.log()}")
            time.sleep(POLL_S)

    def log(self) -> str:
        """The last part of what `isthmus up` printed."""
        return self._log_file.read_text(errors="replace")[-8_000:]

    # -- the status file -------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The status file; empty while there is none. Any: JSON of our own making."""
        try:
            loaded: dict[str, Any] = json.loads(self.status_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return loaded

    @property
    def processes(self) -> list[dict[str, Any]]:
        """One entry per child: name, role, pid, grpc, http, state."""
        found: list[dict[str, Any]] = self.status()["processes"]
        return found

    def _of_role(self, *roles: str) -> list[dict[str, Any]]:
        return [p for p in self.processes if p["role"] in roles]

    @property
    def grpc(self) -> str:
        """Address of the first router's gRPC front door."""
        return str(self._of_role("router")[0]["grpc"])

    @property
    def http(self) -> str:
        """URL of the first router's HTTP front door."""
        return f"http://{self._of_role('router')[0]['http']}"

    def pids(self) -> list[int]:
        """Every process of the cluster, its supervisor included."""
        assert self._process is not None
        return [self._process.pid, *(int(p["pid"]) for p in self.processes)]

    def pid_of(self, role: str) -> int:
        """Pid of the first process of a role: store, router, prefill or decode."""
        return int(self._of_role(role)[0]["pid"])

    def runtime_dir(self) -> Path:
        """Where sockets and logs lie while the cluster runs."""
        return Path(self.status()["runtime_dir"])

    # -- over the wire ---------------------------------------------------------------------

    def worker_statuses(self) -> list[worker_pb2.StatusResponse]:
        """Ask every worker for its counters; a worker that is down is left out."""
        found = []
        for process in self._of_role("prefill", "decode"):
            with grpc.insecure_channel(process["grpc"]) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                try:
                    found.append(stub.Status(worker_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S))
                except grpc.RpcError:
                    continue
        return found

    def cluster_status(self) -> admin_pb2.ClusterStatusResponse:
        """Ask the first router for its view."""
        with grpc.insecure_channel(self.grpc) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return stub.ClusterStatus(
                admin_pb2.ClusterStatusRequest(), timeout=RPC_TIMEOUT_S, metadata=self._metadata
            )

    def _routers_know_all_workers(self) -> bool:
        """Whether every router uses every worker; to serve at all, one worker is enough for it."""
        num_workers = len(self._of_role("prefill", "decode"))
        for router in self._of_role("router"):
            with grpc.insecure_channel(router["grpc"]) as channel:
                stub = admin_pb2_grpc.AdminStub(channel)
                try:
                    status = stub.ClusterStatus(
                        admin_pb2.ClusterStatusRequest(),
                        timeout=RPC_TIMEOUT_S,
                        metadata=self._metadata,
                    )
                except grpc.RpcError:
                    return False
            if sum(worker.state == "live" for worker in status.workers) < num_workers:
                return False
        return True

    def blocks_in_use(self) -> dict[str, int]:
        """Blocks, transfers and requests still held, per worker that holds any."""
        held = {}
        for status in self.worker_statuses():
            count = status.blocks_in_use + status.transfers_open + status.requests_open
            if count:
                held[status.worker_id] = count
        return held

    def assert_no_blocks_in_use(self, within_s: float = 5.0) -> None:
        """Wait until no worker holds anything; raise ClusterFailed when one still does."""
        self._wait(lambda: not self.blocks_in_use(), within_s, "free of blocks in use")
