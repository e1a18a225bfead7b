"""`isthmus bench attach`: handoffs read in place beside the same handoffs copied over memfd.

One source process, and a sink for each plane and digest policy, as in `isthmus bench handoff`.
Each round measures every arm once; bars are medians of ratios within rounds. Nothing attends
here: what reading in place does to whole requests, `isthmus bench second-token` measures with
`transfer.planes` set.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.bench.handoff import NO_VERIFY, SPARE_BLOCKS, rounds_of
from services.bench.handoff_sink import HandoffFailed, TimedSink
from services.bench.handoff_source import LAYOUT, SourceProcess, SourceSettings
from services.bench.result import Bar, BenchResult
from services.common.ids import BlockId
from services.common.progress import Progress, silent
from services.common.quantile import nearest_rank
from services.common.wording import counted
from services.kv.attached import AttachedKv, PoolBases
from services.kv.digest import block_digests
from services.kv.memory import KvPoolMemory
from services.transfer.config import TransferConfig

BLOCKS = (1, 16, 64, 1024)
POLICIES = {"plain": NO_VERIFY, "verified": "always"}
PLANES = {"attach": ("attach", "memfd"), "memfd": ("memfd",)}
BAR_BLOCKS = 64


@dataclass(slots=True)
class Series:
    """All rounds of one plane, policy and number of blocks; seconds."""

    whole: list[float] = field(default_factory=list)  # OPEN to ready, of a sealed prompt
    doorbell: list[float] = field(default_factory=list)  # sealed to ready, of an open transfer
    move: list[float] = field(default_factory=list)  # attach only: one block home, afterwards


Measured = dict[tuple[str, str, int], Series]


def run(
    blocks: Sequence[int] = BLOCKS, *, rounds: int, seed: int, progress: Progress = silent
) -> BenchResult:
    """Measure both planes with both digest policies at every number of blocks."""
    progress("starting the source", 0.0)
    with ExitStack() as stack:
        bench = _Bench(stack, max(blocks), seed)
        measured: Measured = {}
        for num_blocks in blocks:
            bench.round({}, num_blocks)  # connects, and touches the memory
            num_rounds = rounds_of(num_blocks, rounds)
            for number in range(num_rounds):
                progress(f"handing off {counted(num_blocks, 'block')}", number / num_rounds)
                bench.round(measured, num_blocks)
        return result_of(measured, num_wrong=bench.num_wrong)


def memory_bytes(max_blocks: int) -> int:
    """What both pools take."""
    return 2 * (max_blocks + SPARE_BLOCKS) * LAYOUT.block_bytes


class _Bench:
    def __init__(self, stack: ExitStack, max_blocks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        num_blocks = max_blocks + SPARE_BLOCKS
        source_ids, dest_ids = (
            tuple(rng.permutation(num_blocks)[:max_blocks].tolist()) for _ in range(2)
        )
        self.num_wrong = 0
        self._spare = BlockId(next(i for i in range(num_blocks) if i not in dest_ids))
        self._memory = stack.enter_context(KvPoolMemory.create(LAYOUT, num_blocks))
        self._memory.blocks[:] = 1
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-bench-")))
        settings = SourceSettings(
            "source",
            str(directory),
            PLANES["attach"],
            num_blocks,
            source_ids,
            seed,
            attach_pin_share=1.0,  # one reader at a time
        )
        self._source = stack.enter_context(SourceProcess(settings))
        self._sinks: dict[tuple[str, str], TimedSink] = {}
        for number, (plane, policy) in enumerate(
            (plane, policy) for policy in POLICIES for plane in PLANES
        ):
            config = TransferConfig(planes=PLANES[plane], verify_digest=POLICIES[policy])
            sink = TimedSink(
                f"sink-{plane}-{policy}",
                os.getpid() + number,
                self._memory,
                dest_ids,
                config,
                PoolBases() if plane == "attach" else None,
            )
            sink.start()
            stack.callback(sink.stop)
            self._sinks[plane, policy] = sink

    def round(self, measured: Measured, num_blocks: int) -> None:
        """Measure every arm once."""
        for (plane, policy), sink in self._sinks.items():
            series = measured.setdefault((plane, policy, num_blocks), Series())
            series.whole.append(sink.whole(self._source, num_blocks).seconds)
            series.doorbell.append(sink.doorbell(self._source, num_blocks).seconds)
            if sink.plane() != plane:
                raise HandoffFailed(f"the plane is {sink.plane()}, not {plane}")
            if sink.attached is not None:
                series.move.append(self._move_one(sink.attached, verify=policy == "verified"))

    def _move_one(self, kv: AttachedKv, *, verify: bool) -> float:
        started = time.monotonic()
        is_right = kv.copy_home(len(kv) // 2, self._memory, self._spare, verify=verify)
        took = time.monotonic() - started
        found = block_digests(LAYOUT, self._memory.blocks[self._spare])
        self.num_wrong += not is_right or bool((found != kv.digests[len(kv) // 2]).any())
        return took


def result_of(measured: Measured, *, num_wrong: int) -> BenchResult:
    """Medians, and how many times as fast as copying reading in place is."""
    result = BenchResult("attach")
    figures = result.figures
    figures["block_kib"] = LAYOUT.block_bytes // 1024
    for (plane, policy, num_blocks), series in measured.items():
        prefix = f"{plane}_{policy}_{num_blocks}"
        for kind, times in (("whole", series.whole), ("doorbell", series.doorbell)):
            figures[f"{prefix}_{kind}_p50_ms"] = round(statistics.median(times) * 1e3, 4)
            figures[f"{prefix}_{kind}_p99_ms"] = round(nearest_rank(times, 0.99) * 1e3, 4)
        if series.move:
            figures[f"{prefix}_move_us_per_block"] = round(statistics.median(series.move) * 1e6, 1)
    for policy in POLICIES:
        _compare(result, measured, policy)
    result.bars.append(Bar("moved blocks with other content than announced", num_wrong, 0, "=="))
    return result


def _compare(result: BenchResult, measured: Measured, policy: str) -> None:
    for (plane, of_policy, num_blocks), attach in measured.items():
        if (plane, of_policy) != ("attach", policy):
            continue
        copied = measured["memfd", policy, num_blocks]
        for kind in ("whole", "doorbell"):
            pairs = zip(getattr(copied, kind), getattr(attach, kind), strict=True)
            ratio = round(statistics.median(slow / fast for slow, fast in pairs), 3)
            result.figures[f"{policy}_{num_blocks}_{kind}_memfd_to_attach"] = ratio
            if policy == "plain" and kind == "doorbell" and num_blocks == BAR_BLOCKS:
                text = f"memfd / attach, doorbell, {num_blocks} blocks, digests not verified"
                result.bars.append(Bar(text, ratio, 1.0, ">="))
        saved = num_blocks * LAYOUT.block_bytes
        result.figures[f"{policy}_{num_blocks}_saved_kib"] = saved // 1024
