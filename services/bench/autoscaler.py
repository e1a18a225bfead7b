"""`isthmus bench autoscaler`: our decisions beside a perfect forecast and their peers, simulated.

Every way to size pools meets the same requests on the same simulated workers, within the same
bounds and from the same beginning. On recorded load the peers' targets are moved until they take
as many worker-hours as ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from services.bench.autoscaler_cases import (
    DRAWN,
    SINE,
    STEP,
    TRACED,
    Case,
    sine,
    step,
    traced,
)
from services.bench.autoscaler_run import GOAL, Outcome, hpa, kpa, oracle, ours, planner, run
from services.bench.result import Bar, BenchResult
from services.common.progress import Progress
from services.sim.controller import Controller

OURS, ORACLE, HPA, KPA, PLANNER = "isthmus", "oracle", "hpa", "kpa", "planner"
EQUAL = "_equal_hours"
LOADS = (*DRAWN, *TRACED)
ROWS = (ORACLE, OURS, HPA, KPA, PLANNER, HPA + EQUAL, KPA + EQUAL)
COLUMNS = (
    "attainment", "hours_to_oracle", "violating_request_s", "turns_in_window", "overshoot",
    "refused_share",
)  # fmt: skip
_MOST_HOURS = {SINE: 1.3} | dict.fromkeys(TRACED, 1.25)
_MOST_OVERSHOOT = 1.5
_FEWER = 0.9999  # of what a peer has at equal hours: as many is not fewer
_NUM_TRIES = 6  # of a target
_WIDEST, _NARROWEST = 64.0, 1 / 64  # multiples of a target that are tried
_NEAR = 0.03  # hours that far apart are equal


def run_loads(loads: Sequence[str], trace: Path | None, seed: int, tell: Progress) -> BenchResult:
    """Compare on each load.

    Raises:
        BenchFailed: the trace cannot be read.
    """
    result = BenchResult("autoscaler", {"seed": seed})
    for i, name in enumerate(loads):
        case = _case(name, trace, seed)

        def say(what: str, share: float = i / len(loads), load: str = name) -> None:
            tell(f"{load}: {what}", share)

        outcomes = _outcomes(case, seed, say)
        result.figures |= _setup(case)
        for who, outcome in outcomes.items():
            result.figures |= outcome.figures(f"{name}.{who}", outcomes[ORACLE])
        result.bars += _bars(case, outcomes)
    return result


def as_table(result: BenchResult) -> str:
    """Write a row for each load and way to size pools."""
    head = ("load", "policy", *COLUMNS)
    rows = [
        (load, who, *(str(result.figures[f"{load}.{who}.{column}"]) for column in COLUMNS))
        for load in LOADS
        for who in ROWS
        if f"{load}.{who}.attainment" in result.figures
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _case(name: str, trace: Path | None, seed: int) -> Case:
    if name == SINE:
        return sine(seed)
    if name == STEP:
        return step(seed)
    assert trace is not None, "recorded loads are asked for with a trace"
    return traced(name, trace, seed)


def _outcomes(case: Case, seed: int, say: Callable[[str], None]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for who, make in ((OURS, ours), (HPA, hpa), (KPA, kpa), (PLANNER, planner)):
        say(who)
        outcomes[who] = run(case, make(case), seed)
    say(ORACLE)
    outcomes[ORACLE] = oracle(case, seed)
    if case.name in TRACED:
        for who, sized in ((HPA, hpa), (KPA, kpa)):
            say(f"{who} at equal hours")
            hours = outcomes[OURS].worker_hours
            outcomes[who + EQUAL] = _at_hours(case, sized, outcomes[who], hours, seed)
    return outcomes


def _at_hours(
    case: Case,
    make: Callable[[Case, float], Controller],
    usual: Outcome,
    hours: float,
    seed: int,
) -> Outcome:
    """Search the multiple of a peer's target at which it takes these hours; the nearest found."""
    low, high, times, outcome = _NARROWEST, _WIDEST, 1.0, usual
    best = usual
    for _ in range(_NUM_TRIES):
        off = abs(outcome.worker_hours / hours - 1)
        if off < abs(best.worker_hours / hours - 1):
            best = outcome
        if off <= _NEAR:
            break
        # A lower target takes more replicas.
        low, high = (times, high) if outcome.worker_hours > hours else (low, times)
        times = (low * high) ** 0.5
        outcome = run(case, make(case, times), seed)
    return min(best, outcome, key=lambda found: abs(found.worker_hours / hours - 1))


def _setup(case: Case) -> dict[str, str | int | float | bool | None]:
    return {
        f"{case.name}.requests": len(case.workload.arrivals),
        f"{case.name}.performance_model": case.spec.model.name,
        f"{case.name}.startup_s": case.startup_s,
        f"{case.name}.policy": case.policy.metadata.name,
        f"{case.name}.slo_ttft_s": case.ttft_s,
        f"{case.name}.slo_tpot_s": case.tpot_s,
    }


def _bars(case: Case, outcomes: dict[str, Outcome]) -> list[Bar]:
    mine, best, name = outcomes[OURS], outcomes[ORACLE], case.name
    if case.step is not None:
        return [
            Bar(f"in time once settled, {name}", _known(mine.settled), GOAL, ">="),
            Bar(f"turns within a window, {name}", mine.turns, 1, "<="),
            Bar(f"overshoot, {name}", _known(mine.overshoot), _MOST_OVERSHOOT, "<="),
        ]
    ratio = round(mine.worker_hours / best.worker_hours, 4)
    bars = [
        Bar(f"in time, {name}", round(mine.attainment, 4), GOAL, ">="),
        Bar(f"hours to the oracle's, {name}", ratio, _MOST_HOURS[name], "<="),
    ]
    for who in (HPA, KPA):
        if who + EQUAL in outcomes:
            theirs = outcomes[who + EQUAL].violating_s
            ratio = round(mine.violating_s / theirs, 4) if theirs else 1.0
            bars.append(Bar(f"violating request-seconds to {who}'s, {name}", ratio, _FEWER, "<="))
    return bars


def _known(value: float | None) -> float:
    assert value is not None, "a step has it"
    return round(value, 4)
