"""A supervisor over fake processes, run as a program of its own: signals belong to a process.

`python -m tests.support.fake_cluster STATUS_FILE LOG_DIR PROGRAM...` supervises one fake worker
per PROGRAM word, then a fake router. Words: serve, slow-stop, exit-1, exit-2, never-ready; before
them may stand drain-SECONDS.
"""

from __future__ import annotations

import signal
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.cli.status_file import StatusFile
from services.cli.store_unit import StoreUnit
from services.cli.supervisor import Supervisor
from services.cli.unit import Unit
from services.cli.up_plan import PlannedProcess
from services.cli.up_view import PlainView
from services.common.clock import SystemClock

START_TIMEOUT_S = 100.0


def serve(word: str, port: int, log: str) -> int:
    """Be one fake process."""
    signalled: list[int] = []  # no Event: its lock, taken in wait, would be taken again here
    signal.signal(signal.SIGTERM, lambda number, _: signalled.append(number))
    if word.startswith("exit-"):
        print("about to fail", flush=True)
        return int(word.removeprefix("exit-"))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    status = health_pb2.HealthCheckResponse.SERVING
    servicer.set(
        "", health_pb2.HealthCheckResponse.NOT_SERVING if word == "never-ready" else status
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    while not signalled:
        time.sleep(0.05)
    if word == "slow-stop":
        time.sleep(600)
    with Path(log).open("a") as file:
        file.write(f"{word}\n")
    server.stop(0)
    return 0


def supervise(status_file: Path, log_dir: Path, words: list[str]) -> int:
    """Be the supervisor."""
    drain_s = 1.0
    if words[0].startswith("drain-"):
        drain_s, words = float(words[0].removeprefix("drain-")), words[1:]
    plans = [
        PlannedProcess(f"decode-{i}", "decode", (word,), "127.0.0.1", 0)
        for i, word in enumerate(words)
    ]
    plans.append(PlannedProcess("router-0", "router", ("router",), "127.0.0.1", 0, "127.0.0.1"))

    def command(plan: PlannedProcess, grpc_port: int, http_port: int) -> list[str]:
        order = str(log_dir / "stop-order")
        own = [sys.executable, "-m", "tests.support.fake_cluster", "--serve"]
        return [*own, plan.arguments[0], str(grpc_port), order]

    import os

    supervisor = Supervisor(
        units=[Unit(plan, command, os.environ, log_dir) for plan in plans],
        store=StoreUnit.external("redis://none", log_dir),
        status_file=StatusFile(status_file),
        view=PlainView(sys.stdout, str(log_dir)),
        clock=SystemClock(),
        describe=lambda: {"pid": os.getpid()},
        drain_s=drain_s,
    )
    return supervisor.run(START_TIMEOUT_S)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        from services.runtime.process import die_with_parent

        assert die_with_parent(__import__("os").environ)
        sys.exit(serve(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
    sys.exit(supervise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
