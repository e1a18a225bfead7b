"""Many runs of the transfer simulator: counts, speed, and how to replay the first that failed.

    python -P -m services.chaos.transfers --seed N --num N

plays one part of a campaign and prints it as JSON; campaigns on several cores are made of these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field

from services.chaos.transfer_sim import TRANSFERS_A_RUN, run_seed

PART_TRANSFERS = 100 * TRANSFERS_A_RUN  # of one process; the start of a process is little beside it
PART_TIMEOUT_S = 1_800.0
_MODULE = "services.chaos.transfers"
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

    num_transfers: int = 0
    num_runs: int = 0
    num_events: int = 0
    cpu_s: float = 0.0
    stats: Counter[str] = field(default_factory=Counter)
    failures: tuple[FailedRun, ...] = ()

    @property
    def transfers_per_cpu_s(self) -> float:
        """Speed of one core."""
        return self.num_transfers / self.cpu_s if self.cpu_s else 0.0

    def joined(self, other: Campaign) -> Campaign:
        """Return what both did together."""
        failures = sorted((*self.failures, *other.failures), key=lambda failed: failed.seed)
        return Campaign(
            self.num_transfers + other.num_transfers,
            self.num_runs + other.num_runs,
            self.num_events + other.num_events,
            self.cpu_s + other.cpu_s,
            self.stats + other.stats,
            tuple(failures[:_MAX_FAILURES]),
        )


def run_campaign(
    num: int, seed: int, on_progress: Callable[[int], None] | None = None, *, jobs: int = 1
) -> Campaign:
    """Play `num` transfers in runs of up to 100; run i has seed `seed + i`, whatever `jobs` is."""
    if jobs == 1 or num <= PART_TRANSFERS:
        return _play(num, seed, on_progress)
    done = Campaign()
    with ThreadPoolExecutor(jobs) as pool:  # a thread waits for each process
        parts = [pool.submit(_run_part, *part) for part in _parts(num, seed)]
        for part in as_completed(parts):
            done = done.joined(part.result())
            if on_progress is not None:
                on_progress(done.num_transfers)
            if len(done.failures) >= _MAX_FAILURES:
                _cancel(parts)
                break
    return done


def _parts(num: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield (transfers, first seed) of each part."""
    for start in range(0, num, PART_TRANSFERS):
        yield min(PART_TRANSFERS, num - start), seed + start // TRANSFERS_A_RUN


def _cancel(parts: Sequence[Future[Campaign]]) -> None:
    for part in parts:
        part.cancel()


def _run_part(num: int, seed: int) -> Campaign:
    command = [sys.executable, "-P", "-m", _MODULE, "--seed", str(seed), "--num", str(num)]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, timeout=PART_TIMEOUT_S, text=True
    )
    said = json.loads(run.stdout)
    failures = tuple(FailedRun(**failed) for failed in said.pop("failures"))
    return Campaign(stats=Counter(said.pop("stats")), failures=failures, **said)


def _play(num: int, seed: int, on_progress: Callable[[int], None] | None = None) -> Campaign:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one part."""
    parser = argparse.ArgumentParser(prog="transfers", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num", type=int, required=True)
    given = parser.parse_args(arguments)
    played = _play(given.num, given.seed)
    said: dict[str, object] = {
        "num_transfers": played.num_transfers,
        "num_runs": played.num_runs,
        "num_events": played.num_events,
        "cpu_s": played.cpu_s,
        "stats": played.stats,
        "failures": [asdict(failed) for failed in played.failures],
    }
    sys.stdout.write(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
