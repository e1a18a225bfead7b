"""The floor of this client on this machine: what it reads from a server whose timing is known.

Nothing is subtracted from later results; whoever reads them knows what the client itself adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvloop

from loadtest.analysis import analyse
from loadtest.launch import TargetSpec, make_target
from loadtest.mock.process import MockProcess
from loadtest.mock.settings import Door, MockSettings
from loadtest.origin import origin
from loadtest.percentiles import share_of
from loadtest.records import RequestRecord, Status
from loadtest.result import RunResult
from loadtest.runner import RunClock, Runner
from loadtest.scenario import Scenario, parse_scenario
from loadtest.schedule import make_schedule
from services.common.errors import ConfigError

MAX_TTFT_ERROR_MS = 2.0
MAX_ITL_ERROR_MS = 0.5
_STREAM_S = 5.0  # how long one answer takes
_FREEZE_S, _FREEZE_AT_S, _FREEZE_RATE, _FREEZE_TOTAL_S = 2.0, 4.0, 100.0, 12.0
_FREEZE_SERVICE_MS = 20.0
_ISL = 16

Figures = dict[str, float | str | None]


@dataclass(frozen=True, slots=True)
class Order:
    """What is calibrated."""

    streams: int = 200  # open at once
    service_ms: float = 50.0
    itl_ms: float = 50.0
    seconds: float = 10.0  # measured, of each door


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it may be."""

    name: str
    value: float
    bar: float
    sense: Literal["<=", ">="]

    @property
    def is_met(self) -> bool:
        """Whether it holds."""
        return self.value <= self.bar if self.sense == "<=" else self.value >= self.bar


def calibrate(order: Order) -> tuple[dict[str, Figures], list[Bar]]:
    """Measure both doors at so many streams, and a standstill in open and closed loop."""
    return uvloop.run(_calibrate(order))


async def _calibrate(order: Order) -> tuple[dict[str, Figures], list[Bar]]:
    figures: dict[str, Figures] = {}
    bars: list[Bar] = []
    doors: tuple[Door, ...] = ("http", "grpc")
    for door in doors:
        found = figures[door] = await _floor(door, order)
        for name, bar in (
            ("ttft_p50_error_ms", MAX_TTFT_ERROR_MS),
            ("itl_p50_error_ms", MAX_ITL_ERROR_MS),
            ("itl_mean_error_ms", MAX_ITL_ERROR_MS),
        ):
            error = found[name]
            # An answer that cannot be had is as bad as any.
            value = abs(error) if isinstance(error, float) else float("inf")
            bars.append(Bar(f"{door}_{name}", value, bar, "<="))
    open_p99_ms, closed_slow = await _freeze()
    figures["freeze"] = {"open_ttft_p99_ms": open_p99_ms, "closed_slow_requests": closed_slow}
    bars.append(Bar("freeze_open_ttft_p99_ms", open_p99_ms or 0.0, _FREEZE_S * 500, ">="))
    bars.append(Bar("freeze_closed_slow_requests", closed_slow, 1.0, "<="))
    return figures, bars


async def _floor(door: Door, order: Order) -> Figures:
    settings = MockSettings(service_ms=str(order.service_ms), itl_ms=str(order.itl_ms))
    osl = max(2, round(_STREAM_S * 1000 / order.itl_ms))
    stream_s = (order.service_ms + (osl - 1) * order.itl_ms) / 1000
    # At equal gaps most streams would write at the same instants, and measure each other.
    arrivals = {"kind": "poisson", "rate_rps": order.streams / stream_s}
    phases = {"warmup_s": stream_s, "measure_s": order.seconds, "cooldown_s": stream_s}
    async with MockProcess(settings) as mock:
        result, _ = await _run(mock, door, _scenario(arrivals, osl, phases))
        lateness = await mock.lateness()
    medians = {name: share_of(found, 0.5) for name, found in result.distributions.items()}
    itl = result.distributions.get("itl_ms")
    if itl is None:
        raise ConfigError("no answer came to be measured: take more --streams, or more --seconds")
    dispatch = next(check for check in result.checks if check.name == "dispatch")
    return {
        "verdict": result.verdict,
        "tokens_per_s": result.rates["output_tok_s"],
        "ttft_p50_error_ms": _minus(medians.get("ttft_ms"), order.service_ms),
        "itl_p50_error_ms": _minus(medians.get("itl_ms"), order.itl_ms),
        "itl_mean_error_ms": _minus(itl.mean, order.itl_ms),
        "itl_p99_error_ms": _minus(share_of(itl, 0.99), order.itl_ms),
        "ttft_sent_p50_error_ms": _minus(medians.get("ttft_sent_ms"), order.service_ms),
        "dispatch_p50_ms": medians.get("dispatch_delay_ms"),
        "dispatch_p99_ms": None if dispatch.value is None else dispatch.value * 1000,
        **{f"server_{name}": value for name, value in lateness.items()},
    }


async def _freeze() -> tuple[float | None, float]:
    """Return the open loop's p99, and how many requests of a closed loop saw a standstill."""
    settings = MockSettings(
        service_ms=str(_FREEZE_SERVICE_MS), freeze_at_s=_FREEZE_AT_S, freeze_s=_FREEZE_S
    )
    phases = {"measure_s": _FREEZE_TOTAL_S}
    async with MockProcess(settings) as mock:
        arrivals: dict[str, Any] = {"kind": "constant", "rate_rps": _FREEZE_RATE}
        result, _ = await _run(mock, "http", _scenario(arrivals, 1, phases))
    async with MockProcess(settings) as mock:
        arrivals = {"kind": "concurrency", "sessions": 1}
        _, records = await _run(mock, "http", _scenario(arrivals, 1, phases))
    slow = sum(
        record.status is Status.OK and (record.ttft_s or 0.0) >= _FREEZE_S / 2 for record in records
    )
    return share_of(result.distributions["ttft_ms"], 0.99), float(slow)


def _scenario(arrivals: dict[str, Any], osl: int, phases: dict[str, float]) -> Scenario:
    workload = {"kind": "fixed", "isl": _ISL, "osl": osl}
    return parse_scenario(
        {"name": "calibrate", "arrivals": arrivals, "workload": workload, "phases": phases},
        "calibrate",
    )


async def _run(
    mock: MockProcess, door: Door, scenario: Scenario
) -> tuple[RunResult, Sequence[RequestRecord]]:
    clock = RunClock()
    target = make_target(TargetSpec(mock.url(door)), scenario, clock)
    try:
        facts = await target.open()
        log = await Runner(make_schedule(scenario, Path()), target, facts, clock).run()
    finally:
        await target.close()
    result = await asyncio.to_thread(analyse, log, scenario, origin())
    return result, log.records


def _minus(value: float | None, known: float) -> float | None:
    return None if value is None else value - known
