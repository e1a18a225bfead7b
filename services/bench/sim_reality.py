"""`isthmus bench sim`: one minute of load on real processes, and the same minute simulated.

Two prefill and two decode workers answer over the real wire, from a scripted engine whose steps
take a known time. Single requests of the idle cluster say what a prompt of each length takes with
the wire; the simulator is given this line and the same schedule. Both go through the load test, so
requests, clocks and percentiles are the same. With a real model the performance model is a file
(`isthmus profile`), and what differs is told without a bar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchFailed, BenchResult
from services.common.config import RouterSettings
from services.common.progress import Progress, silent
from services.kv.layout import BLOCK_TOKENS
from services.pb import inference_pb2, inference_pb2_grpc
from services.sim.fit import PromptSample, fit_prefill

WORKERS = 2  # of each pool
WARMUP_S, COOLDOWN_S, DRAIN_S = 5.0, 2.0, 30.0
NUM_BLOCKS = 4096
P50_OFF, P95_OFF = 0.15, 0.25
MIN_REQUESTS = 200  # ten of them are beyond the p95
# Prompts take 100 to 200 ms and a token 10 ms: what the wire adds is little of it, as on a GPU.
STEP_S, TOKENS_S = 0.010, 5000.0
_CHUNK_TARGET_S = 0.100  # worker.chunk_target_alone_ms
_KV_BYTES = 2048  # a token of the scripted model
_PROBE_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536)
_PROBE_ROUNDS = 4  # the first one warms up
_PROBE_TIMEOUT_S = 30.0
_SPEED = "ISTHMUS_SCRIPTED_SPEED"
_BYPASS = "ISTHMUS_ROUTER__BYPASS_TOKENS"
_VOCAB = 256  # the least a scripted model has
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Setup:
    """What is compared."""

    model: Path | str
    performance: Path | None = None  # of a real model; None: the scripted engine's own
    seconds: float = 60.0
    rate_rps: float = 8.0
    seed: int = 0


def run(setup: Setup, progress: Progress = silent) -> BenchResult:
    """Send one schedule to a cluster and to its simulation.

    Raises:
        BenchFailed: requests failed, or a load test did.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as made:
        scenario, chosen = Path(made) / "scenario.json", Path(made) / "performance.json"
        scenario.write_text(json.dumps(_scenario(setup)))
        progress("starting 2 + 2 workers", 0.0)
        with _cluster(setup) as cluster:
            if setup.performance is None:
                progress("single requests", 0.05)
                chosen.write_text(json.dumps(scripted_performance(_probe(cluster, setup.seed))))
            else:
                chosen.write_text(setup.performance.read_text())
            progress(f"{setup.seconds:.0f} s on real processes", 0.1)
            real = _load_test(scenario, f"grpc://{cluster.grpc}", Path(made) / "real")
        progress("the same in virtual time", 0.9)
        target = f"sim:prefill={WORKERS},decode={WORKERS},model={chosen}"
        simulated = _load_test(scenario, target, Path(made) / "simulated")
    result = compare(real, simulated, has_bars=setup.performance is None)
    result.reference["load_average_before"] = round(load_before, 2)
    return result


def scripted_performance(probes: Sequence[PromptSample]) -> dict[str, Any]:
    """Describe the scripted engine as the simulator reads it."""
    return {
        "format": 1,
        "name": "scripted",
        "source": "single requests of the idle cluster, and the sleeps of the scripted engine",
        "prefill": fit_prefill(probes).model_dump(),
        "decode": {"fixed_s": STEP_S},
        "chunk_tokens": round((_CHUNK_TARGET_S - STEP_S) * TOKENS_S),
        "kv_blocks": NUM_BLOCKS,
        "network": {"token_bytes": _KV_BYTES, "bytes_s": 5e9, "latency_s": 0.002},
    }


def compare(real: Any, simulated: Any, *, has_bars: bool) -> BenchResult:
    """Judge two results of the load test; they are JSON of its form."""
    result = BenchResult("sim")
    for name, found in (("real", real), ("simulated", simulated)):
        counts = found["counts"]
        wanted = MIN_REQUESTS if has_bars else 1
        if counts["ok"] != counts["measured"] or counts["measured"] < wanted:
            raise BenchFailed(f"{name}: {counts['ok']} of {counts['measured']} requests answered")
        result.figures[f"requests_{name}"] = counts["measured"]
        result.figures[f"cached_share_{name}"] = _round(found["figures"].get("hit_ratio"))
    for figure in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for name, one in (("simulated", simulated), ("real", real)):
            result.figures[f"{figure}_mean_{name}"] = _round(one["distributions"][figure]["mean"])
        for label, share in _SHARES.items():
            ours, theirs = (_percentile(f, figure, share) for f in (simulated, real))
            result.figures[f"{figure}_{label}_simulated"] = _round(ours)
            result.figures[f"{figure}_{label}_real"] = _round(theirs)
    for label, most in (("p50", P50_OFF), ("p95", P95_OFF)):
        share = _SHARES[label]
        ours, theirs = (_percentile(f, "ttft_ms", share) for f in (simulated, real))
        # With a real model there may be too few requests for a percentile.
        off = None if ours is None or theirs is None else round(abs(ours / theirs - 1), 4)
        result.figures[f"ttft_{label}_off"] = off
        if has_bars:
            assert off is not None, "there are enough requests"
            result.bars.append(Bar(f"TTFT {label}, off by at most", off, most, "<="))
    return result


def _scenario(setup: Setup) -> dict[str, Any]:
    return {
        "name": "reality",
        "arrivals": {"kind": "poisson", "rate_rps": setup.rate_rps},
        "workload": {
            "kind": "prefix_groups",
            "groups": 16,
            "prefix": 32 * BLOCK_TOKENS,
            "suffix": {"median": 400, "sigma": 0.5, "min": 64, "max": 1500},
            "osl": {"median": 24, "sigma": 0.5, "min": 8, "max": 96},
        },
        "phases": {
            "warmup_s": WARMUP_S,
            "measure_s": setup.seconds,
            "cooldown_s": COOLDOWN_S,
        },
        "client": {"drain_s": DRAIN_S},
        "seed": setup.seed,
    }


def _cluster(setup: Setup) -> LocalCluster:
    flags = ["--num-blocks", str(NUM_BLOCKS)]
    # As users have it, where other benchmarks send short prompts the whole way.
    settings = {_BYPASS: str(RouterSettings().bypass_tokens)}
    if setup.performance is None:
        flags += ["--engine", "scripted"]
        settings[_SPEED] = f"{TOKENS_S}:{STEP_S * 1000}"
    return LocalCluster(
        setup.model, prefill=WORKERS, decode=WORKERS, flags=flags, settings=settings
    )


def _probe(cluster: LocalCluster, seed: int) -> list[PromptSample]:
    """Time first tokens of prompts that nobody has cached, one at a time."""
    rng = np.random.default_rng(seed)
    found = []
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number in range(_PROBE_ROUNDS):
            for num_tokens in _PROBE_TOKENS:
                ids = rng.integers(1, _VOCAB, num_tokens).astype("<u4")
                body = inference_pb2.GenerateRequest(
                    token_ids=ids.tobytes(), max_tokens=2, ignore_eos=True
                )
                started = time.perf_counter()
                answer = stub.Generate(body, timeout=_PROBE_TIMEOUT_S)
                first_s = next(time.perf_counter() - started for f in answer if f.num_tokens)
                answer.cancel()
                if number:
                    found.append(PromptSample(num_tokens, 0, first_s))
    return found


def _load_test(scenario: Path, target: str, out: Path) -> Any:
    """Run it as a program, which stands above this one, and read what it wrote."""
    command: Sequence[str] = (
        *(sys.executable, "-m", "loadtest", "run", str(scenario)),
        *("--target", target, "--out", str(out), "--json"),
    )
    limit_s = 600.0 + DRAIN_S
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, text=True)
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"the load test of {target} did not end within {limit_s:.0f} s") from None
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        raise BenchFailed(f"the load test of {target} failed: {done.stderr[-2000:]}") from None


def _percentile(found: Any, figure: str, share: float) -> float | None:
    for percentile in found["distributions"][figure]["percentiles"]:
        if percentile["share"] == share:
            value: float | None = percentile["value"]
            return value
    return None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
