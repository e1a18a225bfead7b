"""Runs to size a cluster by, cut from a trace or drawn: to choose by and to check. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.sim.synthetic import PlainLoad, plain_workload
from services.sim.trials import Run
from services.sim.workload import Arrival, Workload

Runs = tuple[tuple[Run, ...], tuple[Run, ...]]
MAX_RUNS = 40  # to choose by and to check, together


def runs_of_trace(workload: Workload, num_requests: int, num_runs: int, seed: int) -> Runs:
    """Cut runs that count no request twice, spread over a trace; every second one is for checking.

    Each begins with what came before it, up to as many requests again, which fill the caches. A
    trace that is too short for two runs is one, with cold caches, and is checked by the same
    prompts at instants that are moved by chance.
    """
    total = len(workload.arrivals)
    size = min(num_requests, total)
    lead = min(size, max(0, total - 2 * size))  # before the first one
    count = min(2 * num_runs, (total - lead) // size)
    if count == 1:
        check = Run(jittered(_window(workload, 0, total), seed), seed)
        return (Run(_window(workload, 0, total), seed),), (check,)
    starts = [lead + (total - size - lead) * i // (count - 1) for i in range(count)]
    runs = [
        Run(_window(workload, start, size, lead), _seed(seed, i), lead)
        for i, start in enumerate(starts)
    ]
    return tuple(runs[::2]), tuple(runs[1::2])


def drawn_runs(load: PlainLoad, num_requests: int, num_runs: int, seed: int) -> Runs:
    """Draw runs of a load, each by a seed of its own."""
    runs = [
        Run(plain_workload(load, num_requests, own), own)
        for own in (_seed(seed, i) for i in range(2 * num_runs))
    ]
    return tuple(runs[::2]), tuple(runs[1::2])


def jittered(workload: Workload, seed: int) -> Workload:
    """Move every arrival by about the mean gap."""
    rng, arrivals = random.Random(seed), workload.arrivals
    gap = arrivals[-1].at_s / len(arrivals)
    moved = [_moved(a, max(0.0, a.at_s + rng.gauss(0.0, gap))) for a in arrivals]
    return _named(workload, f"{workload.name}, moved by chance", moved)


def _seed(seed: int, number: int) -> int:
    """Return a run's own seed: no two seeds of a plan share a run."""
    return seed * MAX_RUNS + number


def _window(workload: Workload, start: int, num_requests: int, num_lead: int = 0) -> Workload:
    arrivals = workload.arrivals[start - num_lead : start + num_requests]
    moved = [_moved(a, a.at_s - arrivals[0].at_s) for a in arrivals]
    last = start + num_requests - 1
    return _named(workload, f"{workload.name}, requests {start} to {last}", moved)


def _moved(arrival: Arrival, at_s: float) -> Arrival:
    return Arrival(at_s, arrival.num_tokens, arrival.output_tokens, arrival.units)


def _named(workload: Workload, name: str, arrivals: Sequence[Arrival]) -> Workload:
    ordered = sorted(arrivals, key=lambda a: a.at_s)
    return Workload(name, workload.unit_tokens, tuple(ordered))
