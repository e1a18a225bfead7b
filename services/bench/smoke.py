"""`isthmus bench smoke`: first figures of two pools beside one worker, in the same run.

Requests go in pairs, one through both pools (REMOTE) and one through the decode worker alone
(LOCAL), each with a fresh prompt of the same length so that neither finds a cached prefix; then
the first prompt runs again on the decode worker alone, for its tokens. Figures that depend on
the machine are medians of ratios within pairs; the handoff stands beside a memcpy of the same
size.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchResult
from services.common.progress import Progress, silent
from services.gateway.wire_names import FORCE_MODE
from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

MAX_TOKENS = 32
CALL_TIMEOUT_S = 120.0
WARM_UP_PAIRS = 2
LOAD_TOKENS = 64  # of each prompt that is sent beside others


@dataclass(frozen=True, slots=True)
class Call:
    """One finished request, as the client saw it."""

    token_ids: tuple[int, ...]
    ttft_ms: float
    second_token_ms: float  # second token minus first
    itl_ms: float  # median gap after the second token
    e2e_ms: float
    timing: common_pb2.Timing


@dataclass(frozen=True, slots=True)
class Pair:
    """One request through two pools and one of the same length through one worker."""

    remote: Call
    local: Call
    remote_again: Call  # the first one's prompt on one worker


def run(
    model: Path | str,
    *,
    pairs: int,
    prompt_tokens: int,
    seed: int,
    progress: Progress = silent,
) -> BenchResult:
    """Start 1 prefill and 1 decode worker and measure."""
    rng = random.Random(seed)
    progress("starting 1 + 1 workers", 0.0)
    with LocalCluster(model, prefill=1, decode=1) as cluster:
        with grpc.insecure_channel(cluster.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            vocab = (
                stub.ListModels(inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
                .models[0]
                .vocab_size
            )
            done = []
            for i in range(pairs + WARM_UP_PAIRS):
                progress("sending pairs", i / (pairs + WARM_UP_PAIRS))
                prompts = [_prompt(rng, prompt_tokens, vocab) for _ in range(2)]
                done.append(_pair(stub, *prompts, local_first=i % 2 == 0))
            progress("sending 16 at once", 0.0)
            prompts = [_prompt(rng, LOAD_TOKENS, vocab) for _ in range(16)]
            loaded = _under_load(stub, prompts)
        cluster.assert_no_blocks_in_use()
        held = sum(cluster.blocks_in_use().values())
    return _result(done[WARM_UP_PAIRS:], loaded, held, prompt_tokens)


def _prompt(rng: random.Random, length: int, vocab: int) -> bytes:
    """Random token ids: no prefix is ever shared."""
    return np.asarray([rng.randrange(vocab) for _ in range(length)], dtype="<u4").tobytes()


def _pair(
    stub: inference_pb2_grpc.InferenceStub, first: bytes, second: bytes, *, local_first: bool
) -> Pair:
    """Run both in alternating order, so that a slow moment of the machine hits either side."""
    if local_first:
        local = _call(stub, second, "LOCAL")
        remote = _call(stub, first, "REMOTE")
    else:
        remote = _call(stub, first, "REMOTE")
        local = _call(stub, second, "LOCAL")
    return Pair(remote, local, _call(stub, first, "LOCAL"))


def _call(stub: inference_pb2_grpc.InferenceStub, prompt: bytes, mode: str) -> Call:
    body = inference_pb2.GenerateRequest(
        token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True, return_token_ids=True
    )
    body.sampling.temperature = 0.0
    start = time.perf_counter()
    ids: list[int] = []
    times: list[float] = []
    timing = common_pb2.Timing()
    metadata = ((FORCE_MODE.name, mode),)
    for frame in stub.Generate(body, timeout=CALL_TIMEOUT_S, metadata=metadata):
        if frame.num_tokens:
            ids.extend(np.frombuffer(frame.token_ids, dtype="<u4").tolist())
            times.extend([time.perf_counter()] * frame.num_tokens)
        if frame.HasField("timing"):
            timing = frame.timing
    gaps = [b - a for a, b in itertools.pairwise(times[1:])]
    return Call(
        token_ids=tuple(ids),
        ttft_ms=(times[0] - start) * 1e3,
        second_token_ms=(times[1] - times[0]) * 1e3,
        itl_ms=statistics.median(gaps) * 1e3,
        e2e_ms=(times[-1] - start) * 1e3,
        timing=timing,
    )


def _under_load(stub: inference_pb2_grpc.InferenceStub, prompts: Sequence[bytes]) -> float:
    """Generated tokens per second with every prompt in flight at once."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        calls = list(pool.map(lambda p: _call(stub, p, "REMOTE"), prompts))
    return sum(len(c.token_ids) for c in calls) / (time.perf_counter() - start)


def memcpy_gb_s(size_bytes: int, repeats: int = 7) -> float:
    """Copy bandwidth of one core for that size, median."""
    source = np.ones(size_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(size_bytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def _result(pairs: Sequence[Pair], tok_s: float, held: int, prompt_tokens: int) -> BenchResult:
    result = BenchResult("smoke")
    remote, local = [p.remote for p in pairs], [p.local for p in pairs]
    # Only requests that moved every block measure the handoff.
    moved = [c for c in remote if c.timing.handoff_blocks_deduped == 0 and c.timing.handoff_bytes]
    handoff_bytes = max((c.timing.handoff_bytes for c in moved), default=0)
    mismatches = sum(p.remote.token_ids != p.remote_again.token_ids for p in pairs)
    ttft_ratio = _median([p.remote.ttft_ms / p.local.ttft_ms for p in pairs])
    result.figures = {
        "pairs": len(pairs),
        "prompt_tokens": prompt_tokens,
        "ttft_ms": _median([c.ttft_ms for c in remote]),
        "itl_ms": _median([c.itl_ms for c in remote]),
        "second_token_ms": _median([c.second_token_ms for c in remote]),
        "second_token_added_ms": _median(
            [p.remote.second_token_ms - p.local.second_token_ms for p in pairs]
        ),
        "tok_s_16_at_once": round(tok_s, 1),
        "handoff_ms": _median([c.timing.handoff_us / 1e3 for c in moved]) if moved else None,
        "handoff_bytes": handoff_bytes,
        "plane": common_pb2.Plane.Name(remote[-1].timing.plane).removeprefix("PLANE_").lower(),
    }
    result.reference = {
        "one_worker_ttft_ms": _median([c.ttft_ms for c in local]),
        "one_worker_itl_ms": _median([c.itl_ms for c in local]),
        "one_worker_second_token_ms": _median([c.second_token_ms for c in local]),
        "memcpy_gb_s": round(memcpy_gb_s(handoff_bytes), 2) if handoff_bytes else None,
        "memcpy_ms": (
            round(handoff_bytes / memcpy_gb_s(handoff_bytes) / 1e6, 3) if handoff_bytes else None
        ),
    }
    result.bars = [
        Bar("answers that differ from one worker's", mismatches, 0, "=="),
        Bar("blocks in use after the run", held, 0, "=="),
        Bar("requests that moved KV through the handoff", len(moved), 1, ">="),
        Bar("TTFT of two pools / one worker, median of pairs", ttft_ratio, 1.5, "<="),
    ]
    return result
