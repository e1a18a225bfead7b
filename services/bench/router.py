"""`isthmus bench router`: what a router adds to a request, and what it gets out of a core.

The cluster is real but for the model: store, router, and workers whose engine is scripted, each a
process. The router has one core to run on, with keys, tenants' limits, metrics and policy on; its
clients are processes of their own. Rates are per second of the router's own CPU time, so that
neighbours on the machine, workers and clients do not count. Bare servers of the same kind, on the
same core and loaded by the same clients, tell what the machine gave at that time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import psutil

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchFailed, BenchResult
from services.bench.router_load import LoadOrder, LoadReport
from services.bench.router_reference import HOST, Kind
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.gateway.keys import create_key
from services.gateway.namespaces import make_secret
from services.runtime.process import wait_or_kill

SHORT_PROMPT, LONG_PROMPT = 1_100, 16_000
CASES = ("idle", "requests", "text", "long", "grpc", "sse")
RSS = "rss"  # a case that takes minutes, and so is measured only when it is asked for
WORKERS = 2  # of each pool
# Streams run at the decode workers, whose steps then have half of them each. Left to choose, the
# router has idle prefill workers keep their short requests, and every step has a quarter.
STREAM_MODE = "REMOTE"
LOAD_TIMEOUT_S = 600.0
START_TIMEOUT_S = 60.0
BAR_P50_MS, BAR_P99_MS = 3.0, 10.0
BAR_REQUESTS_PER_CPU_S = 1_000.0
BAR_TOKENS_PER_CPU_S = 100_000.0
BAR_RSS_MB = 200.0
BAR_RSS_GROWTH = 200.0  # bytes a request
LONG_CLIENTS = 8  # more long prompts at once would measure the workers' memory
_SLICES = 10
_RSS_SLICES = 40  # caches fill in the first half of them; growth after that is a leak
_SPEED = "1000000000:0"  # workers do not wait for a model they do not have
_NUM_BLOCKS = 24_576  # of each worker: 64 streams, or a few long prompts
_SEED_STEP = 1_000_003
_MB = 1e6
_NAMES: Mapping[Kind, str] = {"grpc": "grpc_bare", "sse": "sse_bare", "starlette": "starlette"}


@dataclass(frozen=True, slots=True)
class Setup:
    """How much is measured."""

    cases: Sequence[str] = CASES
    requests: int = 2_000  # of the case that is about requests; others take a share of it
    rss_requests: int = 60_000  # of the case that is about memory; tables are full after 22,000
    clients: int = 64
    stream_tokens: int = 1_024  # long enough for the price of a token, not of a request
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one server."""

    report: LoadReport
    cpu_s: float  # of the server's process

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests a second of CPU time."""
        return self.report.requests / max(self.cpu_s, 1e-9)

    @property
    def frames_per_cpu_s(self) -> float:
        """Frames with text a second of CPU time."""
        return self.report.frames / max(self.cpu_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load: where it listens, and the process whose CPU time counts."""

    grpc: str
    http: str
    pid: int


def run(model_dir: Path, setup: Setup, progress: Progress = silent) -> BenchResult:
    """Measure; `model_dir` holds the files of a scripted model of little KV."""
    result = BenchResult("router")
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-router-") as made:
        keys_file = Path(made) / "keys.json"
        make_secret(Path(made) / "tenant.secret")
        api_key, _ = create_key(keys_file, "bench", "", 1, ("inference", "monitor"))
        cluster = LocalCluster(
            model_dir,
            prefill=WORKERS,
            decode=WORKERS,
            flags=("--engine", "scripted", "--num-blocks", str(_NUM_BLOCKS)),
            settings=_settings(keys_file),
            api_key=api_key,
        )
        with cluster:
            bench = _Bench(cluster, model_dir, setup, api_key, result, progress)
            bench.run()
    return result


def _settings(keys_file: Path) -> dict[str, str]:
    return {
        "ISTHMUS_SCRIPTED_SPEED": _SPEED,
        "ISTHMUS_AUTH__KEYS_FILE": str(keys_file),
        "ISTHMUS_WORKER__MAX_STEP_TOKENS": "16384",
        "ISTHMUS_WORKER__MAX_NUM_SEQS": "128",
        "ISTHMUS_TELEMETRY__LOG_LEVEL": "warning",
    }


class _Bench:
    """One run: a cluster and the result that fills."""

    def __init__(
        self,
        cluster: LocalCluster,
        model_dir: Path,
        setup: Setup,
        api_key: str,
        result: BenchResult,
        progress: Progress,
    ) -> None:
        self._setup = setup
        self._result = result
        self._progress = progress
        self._server_core, self._client_core = _cores()
        self._router = Target(
            cluster.grpc, cluster.http.removeprefix("http://"), cluster.pid_of("router")
        )
        self._process = psutil.Process(self._router.pid)
        self._order = LoadOrder(
            door="grpc",
            address="",
            prompt="ids",
            prompt_tokens=SHORT_PROMPT,
            max_tokens=1,
            clients=setup.clients,
            requests=1,
            vocab_size=read_manifest(model_dir).vocab_size,
            seed=setup.seed,
            api_key=api_key,
            core=self._client_core,
        )

    def run(self) -> None:
        """Measure every case asked for, its reference just before or after it."""
        pin(self._router.pid, self._server_core)
        figures = self._result.figures
        figures["router_core"] = self._server_core
        cases: dict[str, Callable[[], None]] = {
            "idle": self._idle,
            "requests": self._requests,
            "text": lambda: self._more_requests("text", SHORT_PROMPT),
            "long": lambda: self._more_requests("ids", LONG_PROMPT),
            "grpc": lambda: self._streams("grpc"),
            "sse": lambda: self._streams("sse"),
            RSS: self._memory,
        }
        warm_up = max(200, self._setup.clients * 4)
        self._load(self._router, "warm-up", requests=warm_up, max_tokens=2)
        for case in self._setup.cases:
            cases[case]()
        rss = self._process.memory_info().rss / _MB
        figures["rss_mb"] = round(rss, 1)
        self._bar("router RSS, MB", rss, BAR_RSS_MB, "<=")

    # -- cases -------------------------------------------------------------------------------

    def _idle(self) -> None:
        """One client: nobody waits for anybody, so what is not the worker's is the router's."""
        count = max(50, min(400, self._setup.requests // 4))
        with self._reference("grpc", 1) as echo:
            bare = self._load(echo, "reference, one client", clients=1, requests=count)
        reference = self._result.reference
        reference["grpc_echo_p50_ms"], reference["grpc_echo_p99_ms"] = _p50_p99(
            bare.report.total_ms
        )
        for name, prompt, length in (
            ("ids_1100", "ids", SHORT_PROMPT),
            ("text_1100", "text", SHORT_PROMPT),
            ("ids_16000", "ids", LONG_PROMPT),
        ):
            # Long prompts cost workers seconds of hashing and say the same with fewer of them.
            few = count if length == SHORT_PROMPT else count // 4
            measured = self._load(
                self._router, f"one client, {name}", clients=1, requests=few,
                prompt=prompt, prompt_tokens=length,
            )  # fmt: skip
            report = measured.report
            added = [a - b for a, b in zip(report.total_ms, report.worker_ms, strict=True)]
            p50, p99 = _p50_p99(added)
            self._result.figures[f"added_p50_ms_{name}"] = p50
            self._result.figures[f"added_p99_ms_{name}"] = p99
            if name == "ids_1100":
                self._bar("added latency p50, ms", p50, BAR_P50_MS, "<=")
                self._bar("added latency p99, ms", p99, BAR_P99_MS, "<=")

    def _requests(self) -> None:
        """Requests of one token each: the price of a request."""
        setup, figures = self._setup, self._result.figures
        with self._reference("grpc", 1) as echo:
            bare = self._load(echo, "reference, requests", requests=max(500, setup.requests // 4))
        self._result.reference["grpc_echo_requests_per_cpu_s"] = round(bare.requests_per_cpu_s)
        parts: list[Measured] = []
        for part in range(_SLICES):
            count = setup.requests // _SLICES
            parts.append(
                self._load(
                    self._router, "requests of one token", requests=count, share=part / _SLICES
                )
            )
        total = sum(part.report.requests for part in parts)
        rate = total / sum(part.cpu_s for part in parts)
        figures["requests_ids_1100"] = total
        figures["requests_per_cpu_s_ids_1100"] = round(rate)
        figures["requests_to_grpc_echo"] = round(rate / bare.requests_per_cpu_s, 3)
        figures["requests_per_s_ids_1100"] = round(
            total / sum(part.report.wall_s for part in parts)
        )
        self._bar("requests per CPU-second, 1.1k token ids", rate, BAR_REQUESTS_PER_CPU_S, ">=")

    def _memory(self) -> None:
        """Many requests of one token: what the router still holds of them when they are over."""
        count = max(1, self._setup.rss_requests // _RSS_SLICES)
        rss = [self._process.memory_info().rss]
        for part in range(_RSS_SLICES):
            self._load(self._router, RSS, requests=count, share=part / _RSS_SLICES)
            rss.append(self._process.memory_info().rss)
        growth, figures = growth_per_request(rss, count), self._result.figures
        figures["rss_requests"] = count * _RSS_SLICES
        for name, at in (("before", 0), ("half_way", _RSS_SLICES // 2), ("after", -1)):
            figures[f"rss_{name}_mb"] = round(rss[at] / _MB, 1)
        figures["rss_growth_bytes_per_request"] = round(growth, 1)
        figures["rss_growth_mb_per_100k"] = round(growth * 1e5 / _MB, 2)
        self._bar("RSS growth, bytes a request", growth, BAR_RSS_GROWTH, "<=")

    def _more_requests(self, prompt: Literal["ids", "text"], length: int) -> None:
        name = f"{prompt}_{length}"
        is_long = length > SHORT_PROMPT
        measured = self._load(
            self._router, f"requests, {name}", prompt=prompt, prompt_tokens=length,
            clients=min(LONG_CLIENTS, self._setup.clients) if is_long else self._setup.clients,
            requests=max(50, self._setup.requests // (10 if is_long else 4)),
        )  # fmt: skip
        self._result.figures[f"requests_per_cpu_s_{name}"] = round(measured.requests_per_cpu_s)

    def _streams(self, door: Literal["grpc", "sse"]) -> None:
        """All clients stream at once: the price of a token that is sent on its own."""
        setup = self._setup
        kinds: tuple[Kind, ...] = ("sse", "starlette") if door == "sse" else ("grpc",)
        bare = {kind: self._bare_streams(kind, door) for kind in kinds}
        measured = self._load(
            self._router, f"{door} streams", door=door, requests=setup.clients,
            max_tokens=setup.stream_tokens, prompt_tokens=64, mode=STREAM_MODE,
        )  # fmt: skip
        report = measured.report
        rate = measured.frames_per_cpu_s
        self._result.figures[f"{door}_tokens_per_cpu_s"] = round(rate)
        self._result.figures[f"{door}_tokens_per_s"] = round(report.frames / report.wall_s)
        share = report.frames / (report.requests * setup.stream_tokens)
        self._result.figures[f"{door}_frames_per_token"] = round(share, 3)
        for kind, bare_rate in bare.items():
            self._result.figures[f"{door}_tokens_to_{_NAMES[kind]}"] = round(rate / bare_rate, 3)
        if door == "sse":
            self._bar("streamed tokens per CPU-second, SSE", rate, BAR_TOKENS_PER_CPU_S, ">=")

    def _bare_streams(self, kind: Kind, door: Literal["grpc", "sse"]) -> float:
        """Return the tokens per CPU-second of a reference under the same load."""
        setup = self._setup
        with self._reference(kind, setup.stream_tokens) as server:
            bare = self._load(
                server, f"reference, {_NAMES[kind]} streams", door=door, requests=setup.clients,
                max_tokens=setup.stream_tokens, prompt_tokens=16,
            )  # fmt: skip
        self._result.reference[f"{_NAMES[kind]}_tokens_per_cpu_s"] = round(bare.frames_per_cpu_s)
        return bare.frames_per_cpu_s

    def _bar(self, name: str, value: float, bar: float, sense: Literal[">=", "<="]) -> None:
        self._result.bars.append(Bar(name, round(value, 3), bar, sense))

    # -- doing -------------------------------------------------------------------------------

    def _load(
        self, target: Target, what: str, *, share: float = 0.0, **changes: object
    ) -> Measured:
        """Run one load; every one draws prompts of its own."""
        self._progress(what, share)
        self._order = replace(self._order, seed=self._order.seed + _SEED_STEP)
        order = replace(self._order, **changes)  # type: ignore[arg-type]  # fields by name
        order = replace(order, address=target.http if order.door == "sse" else target.grpc)
        return measure(order, target.pid)

    def _reference(self, kind: Kind, num_frames: int) -> AbstractContextManager[Target]:
        return bare_server(kind, num_frames, self._server_core)


@contextmanager
def bare_server(kind: Kind, num_frames: int, core: int | None = None) -> Iterator[Target]:
    """Run a reference server for the duration of a block, on one core if given."""
    module = "services.bench.router_reference"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, kind, str(num_frames)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise BenchFailed(f"the bare {kind} server did not start")
        if core is not None:
            pin(process.pid, core)
        yield Target(f"{HOST}:{port}", f"{HOST}:{port}", process.pid)
    finally:
        process.stdin.close()
        wait_or_kill(process, START_TIMEOUT_S)
        process.stdout.close()


def measure(order: LoadOrder, pid: int) -> Measured:
    """Run a load in a process of its own; count the CPU time of `pid` meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "services.bench.router_load", json.dumps(asdict(order))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise BenchFailed("the clients did not start")
        before = cpu_s(pid)
        answer, _ = process.communicate("go\n", LOAD_TIMEOUT_S)
        spent = cpu_s(pid) - before
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"a load did not end within {LOAD_TIMEOUT_S:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise BenchFailed(f"the clients ended with {process.returncode}")
    report = LoadReport(**json.loads(answer))
    if report.faults:
        raise BenchFailed(f"a request failed: {report.faults[0]}")
    return Measured(report, spent)


def cpu_s(pid: int) -> float:
    """CPU time a process has used, all its threads, user and kernel."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def pin(pid: int, core: int) -> None:
    """Let every thread of a process run on one core only; later ones inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:
            continue  # ended meanwhile


def growth_per_request(rss: Sequence[int], requests_per_slice: int) -> float:
    """Bytes a request: the median slope between any two slices of the later half."""
    later = rss[len(rss) // 2 :]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(later), 2)]
    return median(slopes) / max(1, requests_per_slice)


def _cores() -> tuple[int, int | None]:
    """Give the router the last core; clients take the first, if there is another."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1], cores[0] if len(cores) > 1 else None


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return round(float(p50), 3), round(float(p99), 3)
