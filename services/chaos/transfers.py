"""Many runs of the transfer simulator: counts, speed, and how to replay the first that failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.chaos.transfer_sim import TRANSFERS_A_RUN, run_seed

_MAX_FAILURES = 5  # then something is plainly broken and more seeds say nothing new


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that broke a promise; `num_transfers` is how few of its prompts it takes."""

    seed: int
    num_transfers: int
    violation: str

    @property
    def replay(self) -> str:
        """Command that plays it again with every event written down."""
        return f"isthmus chaos transfers --seed {self.seed} --num {self.num_transfers} --log"


@dataclass(frozen=True, slots=True)
class Campaign:
    """What many runs did."""

    num_transfers: int
    num_runs: int
    num_events: int
    cpu_s: float
    stats: Counter[str]
    failures: tuple[FailedRun, ...]

    @property
    def transfers_per_cpu_s(self) -> float:
        """Speed of one core."""
        return self.num_transfers / self.cpu_s if self.cpu_s else 0.0


def run_campaign(num: int, seed: int, on_progress: Callable[[int], None] | None = None) -> Campaign:
    """Play `num` transfers in runs of up to 100; run i has seed `seed + i`."""
    stats: Counter[str] = Counter()
    failures: list[FailedRun] = []
    done = num_runs = num_events = 0
    start = time.process_time()
    while done < num and len(failures) < _MAX_FAILURES:
        report = run_seed(seed + num_runs, min(TRANSFERS_A_RUN, num - done))
        num_runs += 1
        done += report.num_transfers
        num_events += report.num_events
        stats.update(report.stats)
        if report.violation is not None:
            failures.append(FailedRun(report.seed, report.num_transfers, report.violation))
        if on_progress is not None:
            on_progress(done)
    cpu_s = time.process_time() - start
    return Campaign(done, num_runs, num_events, cpu_s, stats, tuple(failures))
