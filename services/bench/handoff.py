"""`isthmus bench handoff`: KV blocks from one process to another, beside memcpy of the same blocks.

Two ends without engines: the source in a process of its own, the sink in this one. In every round
each arm runs between two copies of the same scattered blocks within this process; figures are
medians over rounds, bars are medians of the ratios within rounds, so that a slow moment of the
machine hits both sides. Two times are taken of every handoff:

* whole: OPEN to ready, of a prompt that is already sealed;
* doorbell: sealed at the source to ready at the sink, of a transfer that is already open.

A layer-major source has K and V of every layer of a block apart: memfd readers copy the pieces out
of its pool, the other planes gather them before they send.

Beside the zmq arm pyzmq alone sends the same blocks: a bar it cannot reach either is no fault of
ours, and what it does better is.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import zmq.auth

from services.bench.gloo_raw import GlooRaw
from services.bench.handoff_sink import TimedSink
from services.bench.handoff_source import LAYOUT, SourceProcess, SourceSettings
from services.bench.other_systems import (
    HAVE_DOORBELLS,
    MODULES,
    OtherFailed,
    OtherSystem,
    Shape,
    is_installed,
)
from services.bench.raw_zmq import RawZmq
from services.bench.result import Bar, BenchResult
from services.common.progress import Progress, silent
from services.common.quantile import nearest_rank
from services.common.wording import counted
from services.kv.memory import KvPoolMemory
from services.transfer.config import TransferConfig

BLOCKS = (1, 16, 64, 1024)
SPARE_BLOCKS = 64  # so that the blocks used are never all of a pool
CHECK_BLOCKS = 16
NO_VERIFY = "sampled:1000000"
VERIFY_SAMPLED = "sampled:16"
MANY_BLOCKS = 256  # from here on a quarter of the rounds is enough to wait for
MIN_ROUNDS = 3
MEMFD_BARS = {64: 0.80, 1024: 0.88}
BARRED_ARMS = {"memfd": "memfd", "memfd_layer_major": "memfd from a layer-major source"}
ZMQ_BAR = 0.18
CURVE_BAR = 0.06
BAR_BLOCKS = 64  # where the zmq bars are taken
MAX_SENDER_SHARE = 0.15  # of the time memcpy takes: control messages, no block is read
BESIDE_DOORBELL = "_doorbell"  # ends the row of a system that announces its blocks as we do
OTHERS_BAR = 1.2  # of what another system hands over in the same time
RAW_BESIDE = "zmq"  # the arm that pyzmq alone is measured beside


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to hand off."""

    name: str
    plane: str
    verify: str
    is_encrypted: bool = False
    is_layer_major: bool = False

    @property
    def source(self) -> str:
        """Name of the source's process; arms that want the same one share it."""
        way = "curve" if self.is_encrypted else self.plane
        return f"{way}-layer-major" if self.is_layer_major else way


ARMS = (
    Arm("memfd", "memfd", NO_VERIFY),
    Arm("memfd_sampled", "memfd", VERIFY_SAMPLED),
    Arm("memfd_always", "memfd", "always"),
    Arm("memfd_layer_major", "memfd", NO_VERIFY, is_layer_major=True),
    Arm("zmq", "zmq", "always"),
    Arm("zmq_layer_major", "zmq", "always", is_layer_major=True),
    Arm("curve", "zmq", "always", is_encrypted=True),
    Arm("curve_layer_major", "zmq", "always", is_encrypted=True, is_layer_major=True),
    Arm("nccl_on_gloo", "nccl", "always"),  # the plane's code; NCCL itself needs two GPUs
    Arm("nccl_on_gloo_layer_major", "nccl", "always", is_layer_major=True),
)
SOURCES = tuple({arm.source: arm for arm in ARMS}.values())  # one arm of each source's process
GLOO_RAW = "gloo_raw"  # beside it: bare gloo, contiguous memory, no protocol


@dataclass(slots=True)
class Series:
    """All rounds of one arm and one number of blocks; seconds."""

    whole: list[float] = field(default_factory=list)
    doorbell: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)  # beside each doorbell
    sender_cpu: float = 0.0  # of all handoffs together
    num_handoffs: int = 0
    raw: list[float] = field(default_factory=list)  # pyzmq alone, beside each doorbell

    @property
    def ratio(self) -> float:
        """How near to memcpy the doorbell time comes: median over rounds."""
        pairs = zip(self.memcpy, self.doorbell, strict=True)
        return statistics.median(copy / bell for copy, bell in pairs)


Measured = dict[tuple[str, int], Series]


def run(
    blocks: Sequence[int] = BLOCKS, *, rounds: int, seed: int, progress: Progress = silent
) -> BenchResult:
    """Measure every arm at every number of blocks."""
    progress("starting the sources", 0.0)
    with ExitStack() as stack:
        bench = _Bench(stack, max(blocks), seed)
        num_wrong = bench.count_wrong(min(CHECK_BLOCKS, max(blocks)))
        measured: Measured = {}
        for num_blocks in blocks:
            bench.measure(measured, num_blocks, rounds_of(num_blocks, rounds), progress)
        num_wrong += bench.count_wrong(min(CHECK_BLOCKS, max(blocks)))
    return result_of(measured, num_wrong=num_wrong, others=bench.others.said)


def memory_bytes(max_blocks: int) -> int:
    """What all pools and buffers take: two here, one a source, gloo's two, and the others'."""
    num_pools = 2 + len(SOURCES) + 2 + 2 * sum(is_installed(name) for name in MODULES)
    return num_pools * (max_blocks + SPARE_BLOCKS) * LAYOUT.block_bytes


def rounds_of(num_blocks: int, rounds: int) -> int:
    """Fewer rounds of long handoffs."""
    return rounds if num_blocks < MANY_BLOCKS else max(MIN_ROUNDS, rounds // 4)


class _Bench:
    """The processes, the sinks, and the blocks that memcpy copies."""

    def __init__(self, stack: ExitStack, max_blocks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._num_blocks = max_blocks + SPARE_BLOCKS
        self._sources_ids = _scattered(rng, self._num_blocks, max_blocks)
        self._dest_ids = _scattered(rng, self._num_blocks, max_blocks)
        self._memory = stack.enter_context(KvPoolMemory.create(LAYOUT, self._num_blocks))
        # What memcpy reads: memory of the same kind as a peer's pool, written once.
        self._reference = stack.enter_context(KvPoolMemory.create(LAYOUT, self._num_blocks))
        self._memory.blocks[:] = 1
        self._reference.blocks[:] = 2
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-bench-")))
        zmq.auth.create_certificates(directory, "cluster")
        self._key_file = str(directory / "cluster.key_secret")
        self._sources = {
            arm.source: stack.enter_context(SourceProcess(self._settings(arm, directory, seed + i)))
            for i, arm in enumerate(SOURCES)
        }
        message_bytes = TransferConfig().data_message_bytes
        max_bytes = max_blocks * LAYOUT.block_bytes
        self._gloo = stack.enter_context(GlooRaw(directory, max_bytes, message_bytes))
        raw = RawZmq(self._memory.blocks, self._dest_ids, self._sources_ids)
        self._raw = stack.enter_context(raw)
        self.others = _Others(
            stack, Shape(self._num_blocks, LAYOUT.block_bytes, self._dest_ids, self._sources_ids)
        )
        self._sinks: dict[str, TimedSink] = {}
        for i, arm in enumerate(ARMS):
            sink = TimedSink(
                f"sink-{arm.name}", os.getpid() + i, self._memory, self._dest_ids, self._config(arm)
            )
            sink.start()
            stack.callback(sink.stop)
            self._sinks[arm.name] = sink

    def count_wrong(self, num_blocks: int) -> int:
        """Check what arrives, on every arm; the first call makes the connections too."""
        wrong = 0
        for arm in ARMS:
            sink = self._sinks[arm.name]
            wrong += sink.count_wrong(self._sources[arm.source], num_blocks)
            assert sink.plane() == arm.plane, "the plane was not the one asked for"
        return wrong

    def measure(self, measured: Measured, num_blocks: int, rounds: int, progress: Progress) -> None:
        """Measure every arm at one number of blocks; the first round only warms up."""
        for arm in ARMS:
            self._round(arm, num_blocks, Series())
        self._raw_rounds({}, num_blocks)
        for number in range(rounds):
            progress(f"handing off {counted(num_blocks, 'block')}", number / rounds)
            for arm in ARMS:
                series = measured.setdefault((arm.name, num_blocks), Series())
                self._round(arm, num_blocks, series)
            self._raw_rounds(measured, num_blocks)

    def _round(self, arm: Arm, num_blocks: int, series: Series) -> None:
        sink, source = self._sinks[arm.name], self._sources[arm.source]
        cpu_before = source.cpu_s()
        series.whole.append(sink.whole(source, num_blocks).seconds)
        if arm.name == RAW_BESIDE:
            series.raw.append(self._raw.pull(num_blocks))
        before = self._memcpy_s(num_blocks)
        series.doorbell.append(sink.doorbell(source, num_blocks).seconds)
        series.num_handoffs += 2
        series.memcpy.append((before + self._memcpy_s(num_blocks)) / 2)
        series.sender_cpu += source.cpu_s() - cpu_before

    def _raw_rounds(self, measured: Measured, num_blocks: int) -> None:
        """Measure what is not ours."""
        size = num_blocks * LAYOUT.block_bytes
        self._raw_round(measured, GLOO_RAW, num_blocks, lambda: self._gloo.seconds(size))
        self.others.round(
            measured,
            lambda name, take: self._raw_round(measured, name, num_blocks, take),
            num_blocks,
        )

    def _raw_round(
        self, measured: Measured, name: str, num_blocks: int, take: Callable[[], float]
    ) -> None:
        before = self._memcpy_s(num_blocks)
        took_s = take()
        series = measured.setdefault((name, num_blocks), Series())
        series.doorbell.append(took_s)
        series.num_handoffs += 1
        series.memcpy.append((before + self._memcpy_s(num_blocks)) / 2)

    def _memcpy_s(self, num_blocks: int) -> float:
        copyto, to, come = np.copyto, self._memory.blocks, self._reference.blocks
        pairs = list(zip(self._dest_ids[:num_blocks], self._sources_ids, strict=False))
        started = time.monotonic()
        for dest, source in pairs:
            copyto(to[dest], come[source])
        return time.monotonic() - started

    def _settings(self, arm: Arm, directory: Path, seed: int) -> SourceSettings:
        return SourceSettings(
            worker_id=f"source-{arm.source}",
            runtime_dir=str(directory),
            planes=(arm.plane,),
            num_blocks=self._num_blocks,
            block_ids=self._sources_ids,
            seed=seed,
            curve_key_file=self._key_file if arm.is_encrypted else None,
            is_layer_major=arm.is_layer_major,
        )

    def _config(self, arm: Arm) -> TransferConfig:
        return TransferConfig(
            planes=(arm.plane,),
            verify_digest=arm.verify,
            curve_key_file=self._key_file if arm.is_encrypted else None,
        )


class _Others:
    """Other systems that are installed: those that run, and what became of each."""

    def __init__(self, stack: ExitStack, shape: Shape) -> None:
        self.running: dict[str, OtherSystem] = {}
        self.said: dict[str, str] = {}
        for name in MODULES:
            if not is_installed(name):
                self.said[name] = "skipped: not installed"
                continue
            try:
                self.running[name] = stack.enter_context(OtherSystem(name, shape))
                self.said[name] = "measured"
            except OtherFailed as error:
                self.give_up(name, error)

    def round(
        self, measured: Measured, measure: Callable[[str, Callable[[], float]], None], count: int
    ) -> None:
        """Have each measured with so many blocks; of one that fails no row is left."""
        for name, system in list(self.running.items()):
            bell = name + BESIDE_DOORBELL
            try:
                measure(name, partial(system.read_s, count))
                if name in HAVE_DOORBELLS:
                    measure(bell, partial(system.doorbell_s, count))
            except OtherFailed as error:
                self.give_up(name, error)
                for key in [key for key in measured if key[0] in (name, bell)]:
                    del measured[key]

    def give_up(self, name: str, error: OtherFailed) -> None:
        """Note why there are no figures of it."""
        self.running.pop(name, None)
        self.said[name] = f"failed: {error}"


def _scattered(rng: np.random.Generator, num_blocks: int, count: int) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.permutation(num_blocks)[:count])


# ---- from rounds to a result --------------------------------------------------------------------


def result_of(
    measured: Measured, *, num_wrong: int, others: Mapping[str, str] | None = None
) -> BenchResult:
    """Medians, percentiles, and bars on ratios within rounds.

    Args:
        others: other system -> what became of it.
    """
    result = BenchResult("handoff")
    result.figures["block_kib"] = LAYOUT.block_bytes // 1024
    for (name, num_blocks), series in measured.items():
        _add(result, name, num_blocks, series)
    _add_raw(result, measured)
    _add_verification(result, measured)
    result.bars += _bars(measured)
    result.bars.append(Bar("blocks with other content than announced", num_wrong, 0, "=="))
    result.reference |= others or {}
    return result


def _add(result: BenchResult, name: str, num_blocks: int, series: Series) -> None:
    size_gb = num_blocks * LAYOUT.block_bytes / 1e9
    prefix, figures = f"{name}_{num_blocks}", result.figures
    for kind, times in (("whole", series.whole), ("doorbell", series.doorbell)):
        if times:
            figures[f"{prefix}_{kind}_gb_s"] = _round(size_gb / statistics.median(times))
            figures[f"{prefix}_{kind}_p50_ms"] = _round(statistics.median(times) * 1e3)
            figures[f"{prefix}_{kind}_p99_ms"] = _round(nearest_rank(times, 0.99) * 1e3)
    figures[f"{prefix}_rounds"] = len(series.doorbell)
    figures[f"{prefix}_to_memcpy"] = _round(series.ratio)
    if series.whole:  # nobody asks the processes of what is not ours
        figures[f"{prefix}_sender_cpu_s_per_gb"] = _round(_cpu_per_gb(series, num_blocks))
    result.reference[f"{prefix}_memcpy_gb_s"] = _round(size_gb / statistics.median(series.memcpy))


def _add_raw(result: BenchResult, measured: Measured) -> None:
    """What pyzmq alone does beside memcpy, and how near to it the plane comes."""
    for (name, num_blocks), series in measured.items():
        if not series.raw:
            continue
        beside = zip(series.raw, series.memcpy, series.doorbell, strict=True)
        ratios = [(copy / raw, raw / bell) for raw, copy, bell in beside]
        to_memcpy, to_raw = (statistics.median(column) for column in zip(*ratios, strict=True))
        result.reference[f"pyzmq_{num_blocks}_to_memcpy"] = _round(to_memcpy)
        result.figures[f"{name}_{num_blocks}_to_pyzmq"] = _round(to_raw)


def _add_verification(result: BenchResult, measured: Measured) -> None:
    """What checking every digest adds to a block over memfd."""
    for (name, num_blocks), series in measured.items():
        plain = measured.get(("memfd", num_blocks))
        if name == "memfd_always" and plain is not None:
            extra = [a - b for a, b in zip(series.doorbell, plain.doorbell, strict=True)]
            per_block_us = statistics.median(extra) / num_blocks * 1e6
            result.figures[f"memfd_{num_blocks}_verify_us_per_block"] = _round(per_block_us)


def _bars(measured: Measured) -> list[Bar]:
    bars: list[Bar] = []
    for (name, num_blocks), series in measured.items():
        if name in BARRED_ARMS and num_blocks in MEMFD_BARS:
            text = f"{BARRED_ARMS[name]} with doorbell, {num_blocks} blocks / memcpy"
            bars.append(Bar(text, _round(series.ratio), MEMFD_BARS[num_blocks], ">="))
            share = series.sender_cpu / series.num_handoffs / statistics.median(series.memcpy)
            text = f"sender CPU on {BARRED_ARMS[name]}, {num_blocks} blocks / time of memcpy"
            if num_blocks >= MANY_BLOCKS:
                bars.append(Bar(text, _round(share), MAX_SENDER_SHARE, "<="))
        if name == "memfd" and num_blocks in MEMFD_BARS:
            bars += _bars_beside_others(measured, series, num_blocks)
        if name in ("zmq", "curve") and num_blocks == BAR_BLOCKS:
            bar = ZMQ_BAR if name == "zmq" else CURVE_BAR
            text = f"{name}, {num_blocks} blocks / memcpy"
            bars.append(Bar(text, _round(series.ratio), bar, ">="))
    return bars


def _bars_beside_others(measured: Measured, memfd: Series, num_blocks: int) -> list[Bar]:
    """How much faster memfd is than what announces its blocks too: medians over rounds."""
    bars: list[Bar] = []
    for other in HAVE_DOORBELLS:
        series = measured.get((other + BESIDE_DOORBELL, num_blocks))
        if series is not None:
            pairs = zip(series.doorbell, memfd.doorbell, strict=True)
            ratio = _round(statistics.median(theirs / ours for theirs, ours in pairs))
            text = f"memfd, {num_blocks} blocks, doorbell to ready / {other}"
            bars.append(Bar(text, ratio, OTHERS_BAR, ">="))
    return bars


def _cpu_per_gb(series: Series, num_blocks: int) -> float:
    return series.sender_cpu / (series.num_handoffs * num_blocks * LAYOUT.block_bytes / 1e9)


def _round(value: float) -> float:
    return round(value, 4)
