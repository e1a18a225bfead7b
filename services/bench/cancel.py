"""`isthmus bench cancel`: from a client's cancel to free blocks, read over the wire.

A request is cancelled in its prefill or its decode; both workers are asked for their counters
every few milliseconds until neither holds anything. What passes until the next step ends is the
running step's, the rest is ours. The times contain the client's hop to the router and up to one
pause between two looks. Then two harder cases: ten long prefills cancelled at once with a short
request behind them, and a decode worker and its router that freeze, so that no cancel, ABORT or
renewal ever comes and only the lease is left.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np

from services.bench.local_cluster import LocalCluster
from services.bench.result import Bar, BenchFailed, BenchResult
from services.common.progress import Progress, silent
from services.common.quantile import nearest_rank
from services.gateway.wire_names import FORCE_MODE
from services.pb import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

CALL_TIMEOUT_S = 120.0
LOOK_S = 0.002  # between two looks at a worker's counters
QUIET_S = 0.15  # free for this long is free: work under way may still come in
FREE_LIMIT_S = 30.0  # held longer than this counts as leaked
MAX_LOOKS = 20_000
ANSWER_TOKENS = 512
STORM = 10  # long prefills cancelled at once
REST_BAR_MS = 100.0
STORM_BAR_MS = 1_000.0
LEASE_S = 2.0  # of a transfer, while workers freeze
LEASE_SLACK_S = 1.0
OPEN_S = 0.01  # OPEN and its answer over an open connection
CONNECTING_CALLS = 6
RECEIVE_TRIES = 20
RECEIVE_WAIT_S = 2.0


class Call(Protocol):
    """A request under way."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateFrame]:
        """Return its frames."""
        ...

    def cancel(self) -> bool:
        """Give it up."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """One worker's counters at one moment."""

    at: float
    steps: int
    transfers: int
    is_free: bool


@dataclass(frozen=True, slots=True)
class Freed:
    """How long one cancel took, in milliseconds; step and rest make up the whole."""

    phase: str
    step_ms: float
    rest_ms: float

    @property
    def total_ms(self) -> float:
        """From the cancel to free blocks on both sides."""
        return self.step_ms + self.rest_ms


class Watch(threading.Thread):
    """Looks at one worker's counters over and over."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._looks: deque[Look] = deque(maxlen=MAX_LOOKS)
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until stopped; a worker that does not answer leaves a gap."""
        with grpc.insecure_channel(self._address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            while not self._is_over.wait(LOOK_S):
                with suppress(grpc.RpcError):
                    self._look(stub)

    def _look(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        status = stub.Status(worker_pb2.StatusRequest(), timeout=1.0)
        held = status.blocks_in_use + status.transfers_open + status.requests_open
        # The later end of the call: what was free by then was free before.
        look = Look(time.perf_counter(), status.steps, status.transfers_open, held == 0)
        self._looks.append(look)

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        self.join()

    def newest(self) -> Look | None:
        """Return the latest look."""
        return self._looks[-1] if self._looks else None

    def split(self, moment: float) -> tuple[Look | None, list[Look]]:
        """Return the last look before a moment and all after it."""
        looks = list(self._looks)
        before = [look for look in looks if look.at < moment]
        return (before[-1] if before else None), [look for look in looks if look.at >= moment]


def freed(before: Look | None, after: Sequence[Look], moment: float) -> tuple[float, float] | None:
    """Return (end of the running step, all free) of one worker, seconds after the cancel.

    None when it held nothing, neither at that moment nor later.
    """
    busy = [at for at, look in enumerate(after) if not look.is_free]
    was_busy = before is not None and not before.is_free
    if not after or (not busy and not was_busy):
        return None
    free_at = after[min(busy[-1] + 1, len(after) - 1) if busy else 0].at
    steps = before.steps if before is not None else after[0].steps
    stepped = next((look.at for look in after if look.steps > steps), free_at)
    return min(stepped, free_at) - moment, free_at - moment


def run(
    model: Path | str,
    *,
    cancels: int,
    prompt_tokens: int,
    seed: int,
    progress: Progress = silent,
) -> BenchResult:
    """Cancel `cancels` requests, half in prefill and half in decode; then the harder cases."""
    rng = random.Random(seed)
    result = BenchResult("cancel")
    progress("starting 1 + 1 workers", 0.0)
    with LocalCluster(model, prefill=1, decode=1) as cluster:
        _measure_cancels(cluster, rng, cancels, prompt_tokens, result, progress)
        progress("cancelling ten at once", 0.0)
        _measure_storm(cluster, rng, prompt_tokens, result)
        cluster.assert_no_blocks_in_use()
    lease = {"ISTHMUS_TRANSFER__LEASE_MS": str(round(LEASE_S * 1000))}
    flags = ("--routers", "2")
    progress("starting 1 + 2 workers", 0.0)
    with LocalCluster(model, prefill=1, decode=2, flags=flags, settings=lease) as cluster:
        for has_traffic in (False, True):
            progress(f"freezing, {'with' if has_traffic else 'without'} traffic", 0.0)
            _measure_lost(cluster, rng, prompt_tokens, result, has_traffic=has_traffic)
        cluster.assert_no_blocks_in_use()
    return result


# -- cancels ------------------------------------------------------------------------------------


def _measure_cancels(
    cluster: LocalCluster,
    rng: random.Random,
    cancels: int,
    length: int,
    result: BenchResult,
    progress: Progress,
) -> None:
    watches = [Watch(p["grpc"]) for p in cluster.processes if p["role"] in ("prefill", "decode")]
    with grpc.insecure_channel(cluster.grpc) as channel:
        client = _Client(channel, rng)
        client.ttft_s(length)  # pays for what is done once
        ttft_s = client.ttft_s(length)
        try:
            done = []
            for i in range(cancels):
                progress("cancelling one by one", i / cancels)
                phase = "decode" if i % 2 else "prefill"
                done.append(_cancel_one(client, watches, phase, length, ttft_s))
        finally:
            for watch in watches:
                watch.stop()
    known = [one for one in done if one is not None]
    result.figures["cancels"] = len(done)
    result.figures["held_over_30_s"] = len(done) - len(known)
    result.reference["ttft_ms"] = round(ttft_s * 1e3, 2)
    for phase in ("prefill", "decode"):
        for part in ("step_ms", "rest_ms", "total_ms"):
            values = [getattr(one, part) for one in known if one.phase == phase]
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                figure = round(nearest_rank(values, share), 2) if values else None
                result.figures[f"{phase}_{part.removesuffix('_ms')}_{name}_ms"] = figure
    rest = nearest_rank([one.rest_ms for one in known], 0.99) if known else FREE_LIMIT_S * 1e3
    result.bars.append(
        Bar("free after the running step, p99 ms", round(rest, 2), REST_BAR_MS, "<=")
    )
    result.bars.append(Bar("held for more than 30 s", len(done) - len(known), 0, "=="))


def _cancel_one(
    client: _Client, watches: Sequence[Watch], phase: str, length: int, ttft_s: float
) -> Freed | None:
    """Cancel one request; None when its blocks were not free within the limit."""
    call = client.start(length, ANSWER_TOKENS)
    if phase == "decode":
        for number, _ in enumerate(call):
            if number == 3:
                break
    else:
        time.sleep(ttft_s * client.rng.uniform(0.1, 0.9))
    moment = time.perf_counter()
    call.cancel()
    if not _wait(lambda: _all_quiet(watches, moment), FREE_LIMIT_S):
        return None
    parts = [freed(*watch.split(moment), moment) for watch in watches]
    held = [part for part in parts if part is not None] or [(0.0, 0.0)]
    free_s = max(free for _, free in held)
    step_s = max(step for step, free in held if free == free_s)  # of the one that was last
    return Freed(phase, step_s * 1e3, (free_s - step_s) * 1e3)


def _all_quiet(watches: Sequence[Watch], moment: float) -> bool:
    for watch in watches:
        _, after = watch.split(moment)
        if not after or after[-1].at < moment + QUIET_S:
            return False
        if not all(look.is_free for look in after if look.at > after[-1].at - QUIET_S):
            return False
    return True


# -- ten at once --------------------------------------------------------------------------------


def _measure_storm(
    cluster: LocalCluster, rng: random.Random, length: int, result: BenchResult
) -> None:
    """Cancel long prefills before their first token; the next short request must not wait."""
    with grpc.insecure_channel(cluster.grpc) as channel:
        client = _Client(channel, rng)
        idle_s = min(client.ttft_s(16) for _ in range(3))
        calls = [client.start(length, 16) for _ in range(STORM)]
        time.sleep(0.1)
        for call in calls:
            call.cancel()
        behind_s = client.ttft_s(16)
    result.reference["idle_ttft_ms"] = round(idle_s * 1e3, 2)
    result.figures["ttft_behind_ten_cancelled_ms"] = round(behind_s * 1e3, 2)
    added = round((behind_s - idle_s) * 1e3, 2)
    name = "TTFT added by ten cancelled prefills, ms"
    result.bars.append(Bar(name, added, STORM_BAR_MS, "<="))


# -- nothing comes ------------------------------------------------------------------------------


def _measure_lost(
    cluster: LocalCluster,
    rng: random.Random,
    length: int,
    result: BenchResult,
    *,
    has_traffic: bool,
) -> None:
    """Freeze the decode worker of a running transfer, and its router, and time the lease."""
    routers = [p for p in cluster.processes if p["role"] == "router"]
    prefill = next(p for p in cluster.processes if p["role"] == "prefill")
    with ExitStack() as stack:
        watch = Watch(prefill["grpc"])
        stack.callback(watch.stop)
        if has_traffic:
            stack.callback(_start_traffic(routers[1]["grpc"], rng.randrange(1 << 30)))
        channel = stack.enter_context(grpc.insecure_channel(routers[0]["grpc"]))
        client = _Client(channel, rng)
        for _ in range(CONNECTING_CALLS):  # every pair has its connection by then
            client.ttft_s(32)
        receiver = _receiving(cluster, client, length, stack)
        for pid in (receiver, int(routers[0]["pid"])):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        moment = time.perf_counter()
        is_released = _wait(lambda: _has_released(watch, moment), FREE_LIMIT_S)
        held_s = time.perf_counter() - moment if is_released else FREE_LIMIT_S
    cluster.assert_no_blocks_in_use(within_s=15.0)
    kind = "with" if has_traffic else "without"
    result.figures[f"lost_message_{kind}_traffic_s"] = round(held_s, 3)
    name = f"released with every message lost, {kind} traffic, s"
    result.bars.append(Bar(name, round(held_s, 3), LEASE_S + LEASE_SLACK_S, "<="))


def _receiving(cluster: LocalCluster, client: _Client, length: int, stack: ExitStack) -> int:
    """Start requests until a decode worker is seen to receive one; return its pid.

    It is given a moment for its OPEN: once that is answered the lease counts, and not the life
    of the ticket.
    """
    pids = {int(p["pid"]): Watch(p["grpc"]) for p in cluster.processes if p["role"] == "decode"}
    with ExitStack() as looks:
        for watch in pids.values():
            looks.callback(watch.stop)
        for _ in range(RECEIVE_TRIES):
            call = client.start(length, ANSWER_TOKENS)
            stack.callback(call.cancel)
            found: list[int] = []

            def is_seen(found: list[int] = found) -> bool:
                for pid, watch in pids.items():
                    look = watch.newest()
                    if look is not None and look.transfers:
                        found.append(pid)
                return bool(found)

            if _wait(is_seen, RECEIVE_WAIT_S, pause_s=0.001):
                time.sleep(OPEN_S)
                if is_seen():
                    return found[-1]
            call.cancel()
    raise BenchFailed("no decode worker was seen to receive; a longer prompt takes longer")


def _has_released(watch: Watch, moment: float) -> bool:
    look = watch.newest()
    return look is not None and look.at > moment and look.transfers == 0


def _start_traffic(address: str, seed: int) -> Callable[[], None]:
    """Keep the prefill worker busy with whole requests; returns how to end that."""
    is_over = threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(address) as channel:
            client = _Client(channel, random.Random(seed))
            while not is_over.is_set():
                with suppress(grpc.RpcError):
                    for _ in client.start(32, 8, mode="STAY"):
                        pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        thread.join()

    return stop


class _Client:
    """Sends prompts of random tokens: no prefix is ever shared."""

    def __init__(self, channel: grpc.Channel, rng: random.Random) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self.rng = rng
        models = self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        self._vocab = models.models[0].vocab_size

    def start(self, length: int, max_tokens: int, mode: str = "REMOTE") -> Call:
        """Send one request."""
        ids = [self.rng.randrange(self._vocab) for _ in range(length)]
        body = inference_pb2.GenerateRequest(
            token_ids=np.asarray(ids, dtype="<u4").tobytes(), max_tokens=max_tokens
        )
        body.sampling.temperature = 0.0
        body.sampling.ignore_eos = True
        metadata = ((FORCE_MODE.name, mode),)
        return self._stub.Generate(body, timeout=CALL_TIMEOUT_S, metadata=metadata)

    def ttft_s(self, length: int) -> float:
        """Run one short answer to its end and return the time to its first frame."""
        start = time.perf_counter()
        times = [time.perf_counter() for _ in self.start(length, 2)]
        return times[0] - start


def _wait(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.005) -> bool:
    end = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > end:
            return False
        time.sleep(pause_s)
    return True
