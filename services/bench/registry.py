"""`isthmus bench registry`: what hints cost in a store, and what a decision costs beside PING.

One embedded store, one client, all in one run: memory from the store's own count before and
after, decisions and PINGs in turns, so that both meet the same machine. What a decision costs the
store is the CPU time of its process, less that of as many PINGs.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import redis

from services.bench.result import Bar, BenchResult, Figure
from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry.answers import parse_join, parse_route, parse_status
from services.registry.base import HintChange, LoadReport
from services.registry.cost import Ask, Candidate, Weights
from services.registry.embedded import EmbeddedStore
from services.registry.schema import Keys, pack_fields, pack_record
from services.registry.scripts import Invocation, RouteAsk, ScriptCalls

MAX_HINT_BYTES = 32.0  # the bar
NUM_WORKERS = 16
BATCH = 1000
TURN_STRIDES = 17  # a prompt of 1,100 tokens
NUM_TURNS = 8
BATCH_ASKS = 16  # the most that a router puts in one call
_LOAD = LoadReport(kv_free=900, kv_total=1000, rate_tok_s=9000.0, tbt_a_us=9000.0, tbt_b_us=0.5)


class _Bench:
    """One namespace of a store with workers in it."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._calls = ScriptCalls(Keys("bench"))
        self._seqs = [0] * NUM_WORKERS
        self.candidates = tuple(self._join(i) for i in range(NUM_WORKERS))

    def call(self, call: Invocation) -> object:
        """Run a script, loading it when it is new."""
        args = (*call.keys, *call.args)
        try:
            return self.client.evalsha(call.script.sha, len(call.keys), *args)
        except redis.exceptions.NoScriptError:
            self.client.script_load(call.script.text)
            return self.client.evalsha(call.script.sha, len(call.keys), *args)

    def _join(self, idx: int) -> Candidate:
        role = "prefill" if idx < NUM_WORKERS // 2 else "decode"
        answer = parse_join(
            self.call(
                self._calls.join(
                    worker_id=f"w{idx}", incarnation=1, info=f'{{"worker_id": "w{idx}"}}',
                    record=pack_record(role, "live", _LOAD), proposed_gen=1, is_rejoin=False,
                )
            )
        )  # fmt: skip
        return Candidate(answer.slot, answer.gen, role == "prefill", seed=idx * 2654435761 % 2**32)

    def publish(self, idx: int, hashes: Sequence[BlockHash]) -> float:
        """Publish as a worker does; return seconds."""
        worker, started = self.candidates[idx], time.perf_counter()
        record = pack_record("prefill" if worker.is_prefill else "decode", "live", _LOAD)
        for lo in range(0, len(hashes), BATCH):
            self._seqs[idx] += 1
            status = parse_status(
                self.call(
                    self._calls.publish(
                        slot=worker.slot, gen=worker.gen, seq=self._seqs[idx],
                        change=HintChange(hashes[lo : lo + BATCH], ()), record=record,
                    )
                )
            )  # fmt: skip
            if status != "OK":
                raise RuntimeError(f"the store answered a publish with {status}")
        return time.perf_counter() - started

    def renew_all(self) -> None:
        """Keep every lease alive."""
        for worker in self.candidates:
            role = "prefill" if worker.is_prefill else "decode"
            self.call(self._calls.renew(worker.slot, worker.gen, pack_record(role, "live", _LOAD)))

    def route(self, prompts: Sequence[bytes], rid: str) -> None:
        """Decide and reserve for prompts of so many strides, in one call."""
        asks = []
        for i, fields in enumerate(prompts):
            tokens = len(fields) // 8 * HINT_STRIDE_BLOCKS * BLOCK_TOKENS + 1
            asks.append(RouteAsk(Ask(tokens, 255, tokens + 256, root=i), fields, f"{rid}-{i}"))
        raw = self.call(self._calls.route(Weights(), self.candidates, {}, asks))
        if None in parse_route(raw, len(asks)):
            raise RuntimeError("the store found no candidate: the leases ran out")

    def cpu_us(self, action: Callable[[int], object], numbers: Sequence[int]) -> float:
        """CPU time the store spends on one of some calls."""
        before = self._cpu_s()
        for i in numbers:
            action(i)
        return (self._cpu_s() - before) * 1e6 / len(numbers)

    def _cpu_s(self) -> float:
        used = self.client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def memory_bytes(self) -> int:
        """What the store holds, by its own count."""
        return int(self.client.info("memory")["used_memory"])


def run(num_hints: int, rounds: int, seed: int, server: Path | None = None) -> BenchResult:
    """Measure memory, publishing and decisions; `server` is the store's program if not ours."""
    rng = np.random.default_rng(seed)
    result = BenchResult("registry")
    with _store(server) as client:
        bench = _Bench(client)
        about = client.info("server")
        result.figures["store"] = str(about.get("valkey_version") or about["redis_version"])
        raw = rng.bytes(num_hints * 8)
        hashes = [BlockHash(raw[i : i + 8]) for i in range(0, len(raw), 8)]
        figures = _publishing(bench, hashes)
        figures |= _decisions(bench, hashes, rounds)
        figures |= _store_time(bench, hashes, rounds, rng)
    result.figures.update(figures)
    result.reference["design_route_16_workers_p50_us"] = 134
    result.bars.append(
        Bar("bytes_per_hint_one_owner", _number(figures["bytes_per_hint_one_owner"]),
            MAX_HINT_BYTES, "<=")
    )  # fmt: skip
    return result


def _publishing(bench: _Bench, hashes: Sequence[BlockHash]) -> dict[str, Figure]:
    before = bench.memory_bytes()
    first_s = bench.publish(0, hashes)
    one_owner = bench.memory_bytes()
    second_s = bench.publish(1, hashes)
    two_owners = bench.memory_bytes()
    count = len(hashes)
    return {
        "hints": count,
        "bytes_per_hint_one_owner": round((one_owner - before) / count, 2),
        "bytes_per_16_token_block": round((one_owner - before) / count / HINT_STRIDE_BLOCKS, 2),
        "bytes_per_further_owner": round((two_owners - one_owner) / count, 2),
        "publish_hints_per_s": round(count / first_s),
        "publish_second_owner_hints_per_s": round(count / second_s),
    }


def _decisions(bench: _Bench, hashes: Sequence[BlockHash], rounds: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    unknown = [BlockHash(bytes(8 - len(name)) + name) for name in (b"%07d" % i for i in range(512))]
    for strides in (16, 128, 1024):
        known = hashes[:strides]
        for hit, chain in (("full", known), ("half", [*known[: strides // 2], *unknown])):
            fields = pack_fields(chain[:strides])
            bench.renew_all()
            route_us, ping_us = _in_turns(
                rounds,
                _router(bench, f"{len(fields)}-{hit}", itertools.repeat(fields), 1),
                lambda _i: bench.client.ping(),
            )
            name = f"{strides}_strides_{hit}_hit"
            figures[f"route_{name}_p50_us"] = round(statistics.median(route_us), 1)
            figures[f"route_{name}_p99_us"] = round(float(np.percentile(route_us, 99)), 1)
            figures[f"ping_beside_{name}_p50_us"] = round(statistics.median(ping_us), 1)
            figures[f"ping_beside_{name}_p99_us"] = round(float(np.percentile(ping_us, 99)), 1)
    return figures


def _store_time(
    bench: _Bench, hashes: Sequence[BlockHash], rounds: int, rng: np.random.Generator
) -> dict[str, Figure]:
    """Take the store's own time, in turns, for prompts that somebody holds and that nobody does."""
    held = itertools.repeat(pack_fields(hashes[:TURN_STRIDES]))
    new = (rng.bytes(8 * TURN_STRIDES) for _ in itertools.count())
    arms: dict[str, Callable[[int], object]] = {"ping": lambda _i: bench.client.ping()}
    for num in (1, BATCH_ASKS):
        arms[f"held_{num}"] = _router(bench, f"held-{num}", held, num)
        arms[f"new_{num}"] = _router(bench, f"new-{num}", new, num)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    step = max(1, rounds // NUM_TURNS)
    for turn in range(NUM_TURNS):
        bench.renew_all()
        for name, arm in arms.items():
            taken[name].append(bench.cpu_us(arm, range(turn * step, (turn + 1) * step)))
    ping = statistics.median(taken.pop("ping"))
    return {
        f"store_us_a_request_{name}": round(
            (statistics.median(times) - ping) / int(name.split("_")[1]), 1
        )
        for name, times in taken.items()
    }


def _router(
    bench: _Bench, name: str, prompts: Iterator[bytes], num_asks: int
) -> Callable[[int], object]:
    return lambda i: bench.route(list(itertools.islice(prompts, num_asks)), f"{name}-{i}")


def _in_turns(
    rounds: int, first: Callable[[int], object], second: Callable[[int], object]
) -> tuple[list[float], list[float]]:
    """Time two calls in turns, microseconds each."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for call, took in zip((first, second), times, strict=True):
            started = time.perf_counter()
            call(i)
            took.append((time.perf_counter() - started) * 1e6)
    return times


@contextmanager
def _store(server: Path | None) -> Iterator[redis.Redis]:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        store = EmbeddedStore.start(Path(folder), binary=server)
        try:
            with closing(redis.Redis.from_url(store.url, protocol=2)) as client:
                yield client
        finally:
            store.stop()


def _number(figure: Figure) -> float:
    assert isinstance(figure, float | int)
    return float(figure)
