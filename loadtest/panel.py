"""How a run goes, while it goes: one panel on a terminal, now and then a line elsewhere.

It runs beside the load in one event loop, so it is kept rare and cheap: a look is a pass over the
requests that are open, and a panel is drawn once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from loadtest.percentiles import is_too_few
from loadtest.plots import numbers
from loadtest.records import Phase, RequestRecord, Status
from loadtest.slo import Slo
from services.common.quantile import rank_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_DRAW_S = 1.0
_LINE_S = 5.0  # where lines cannot be rewritten
_RATE_S = 10.0  # what rates are taken over
_NUM_TTFTS = 2_000  # the latest that percentiles are taken of
_BAR_WIDTH = 30
_FAILED = (Status.ERROR, Status.TIMEOUT, Status.REJECTED)


@dataclass(frozen=True, slots=True)
class LiveState:
    """One look at a run."""

    title: str
    phase: str
    at_s: float
    total_s: float | None = None  # None: nobody knows when it ends
    offered_rps: float = 0.0
    achieved_rps: float = 0.0
    in_flight: int = 0
    num_ended: int = 0
    num_failed: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None  # None: too few requests
    ttft_greatest_ms: float | None = None
    attainment: float | None = None  # None: no SLO, or nothing measured ended yet
    replicas: Mapping[str, int] = field(default_factory=dict)  # by pool, where the target tells


class Meter:
    """Turns the records of a run that goes on into figures; each record is counted once."""

    def __init__(self, title: str, slo: Slo | None, total_s: float | None = None) -> None:
        self._title = title
        self._slo = slo
        self._total_s = total_s
        self._num_seen = 0
        self._open: list[RequestRecord] = []
        self._sent_at: deque[float] = deque()  # of the last seconds, as the next
        self._ok_at: deque[float] = deque()
        self._ttfts_ms: deque[float] = deque(maxlen=_NUM_TTFTS)
        self._num_ended = self._num_failed = self._num_measured = self._num_good = 0

    def look(
        self,
        now_s: float,
        phase: Phase | str,
        records: Sequence[RequestRecord],
        *,
        replicas: Mapping[str, int] | None = None,
    ) -> LiveState:
        """Count what happened since the last look; `records` only ever grows at its end."""
        new = records[self._num_seen :]
        self._num_seen = len(records)
        self._sent_at.extend(record.scheduled_s for record in new)
        still_open = []
        for record in (*self._open, *new):
            if record.status is Status.CENSORED:
                still_open.append(record)
            else:
                self._count(record, now_s)
        self._open = still_open
        return self._state(now_s, str(phase), replicas or {})

    def _count(self, record: RequestRecord, now_s: float) -> None:
        self._num_ended += 1
        self._num_failed += record.status in _FAILED
        if record.status is Status.OK:
            self._ok_at.append(now_s if record.done_s is None else record.done_s)
        if record.ttft_s is not None:
            self._ttfts_ms.append(record.ttft_s * 1e3)
        if self._slo is not None and record.phase is Phase.MEASURE:
            self._num_measured += 1
            self._num_good += self._slo.is_met(record)

    def _state(self, now_s: float, phase: str, replicas: Mapping[str, int]) -> LiveState:
        ordered = sorted(self._ttfts_ms)
        return LiveState(
            title=self._title,
            phase=phase,
            at_s=now_s,
            total_s=self._total_s,
            offered_rps=_rate(self._sent_at, now_s),
            achieved_rps=_rate(self._ok_at, now_s),
            in_flight=len(self._open),
            num_ended=self._num_ended,
            num_failed=self._num_failed,
            ttft_p50_ms=_percentile(ordered, 0.5),
            ttft_p99_ms=_percentile(ordered, 0.99),
            ttft_greatest_ms=ordered[-1] if ordered else None,
            attainment=self._num_good / self._num_measured if self._num_measured else None,
            replicas=replicas,
        )


def _rate(times: deque[float], now_s: float) -> float:
    while times and times[0] < now_s - _RATE_S:
        times.popleft()
    return len(times) / min(max(now_s, 1.0), _RATE_S)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered or is_too_few(len(ordered), share):
        return None
    return ordered[rank_of(len(ordered), share) - 1]


def view(state: LiveState) -> RenderableType:
    """Lay a state out as a panel."""
    from rich.panel import Panel
    from rich.text import Text

    rows = [_progress(state), *rows_of(state)]
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"{name:<{width}}  {told}" for name, told in rows)
    # Text, not markup: names may hold brackets.
    return Panel(Text(lines), title=Text(state.title), title_align="left", expand=False)


def _progress(state: LiveState) -> tuple[str, str]:
    if not state.total_s:
        return state.phase, _times(state)
    share = min(1.0, state.at_s / state.total_s)
    filled = round(share * _BAR_WIDTH)
    return state.phase, f"{'━' * filled}{'·' * (_BAR_WIDTH - filled)} {_times(state)}"


def _times(state: LiveState) -> str:
    if not state.total_s:
        return numbers.seconds_axis(round(state.at_s))
    now, total = round(state.at_s), round(state.total_s)
    if now >= total:
        return f"{numbers.seconds_axis(now)}, waiting for the last"
    left = numbers.seconds_axis(total - now)
    return f"{numbers.seconds_axis(now)} of {numbers.seconds_axis(total)}, {left} left"


def rows_of(state: LiveState) -> list[tuple[str, str]]:
    """Name the figures of a state, those that are known."""
    offered, achieved = numbers.count(state.offered_rps), numbers.count(state.achieved_rps)
    failed = f"{state.num_failed} failed"
    rows = [
        ("rate", f"{offered}/s offered, {achieved}/s answered"),
        ("requests", f"{state.in_flight} in flight, {state.num_ended} ended, {failed}"),
    ]
    if state.ttft_greatest_ms is not None:
        rows.append(("TTFT", _ttft(state)))
    if state.attainment is not None:
        rows.append(("SLO", f"{numbers.percent(state.attainment)} within"))
    if state.replicas:
        told = ", ".join(f"{number} {pool}" for pool, number in state.replicas.items())
        rows.append(("workers", told))
    return rows


def _ttft(state: LiveState) -> str:
    told = [("p50", state.ttft_p50_ms), ("p99", state.ttft_p99_ms)]
    if state.ttft_p99_ms is None:
        told[1] = ("greatest", state.ttft_greatest_ms)
    return ", ".join(f"{name} {numbers.milliseconds(ms)}" for name, ms in told if ms is not None)


def plain_line(state: LiveState) -> str:
    """Tell a state in one line."""
    told = "; ".join(f"{name} {value}" for name, value in rows_of(state))
    return f"{state.phase} {_times(state)}: {told}"


async def watch(look: Callable[[], LiveState]) -> None:
    """Show a run on stderr until cancelled, and how it stands then."""
    with _shown(is_terminal=sys.stderr.isatty()) as (show, every_s):
        try:
            while True:
                await asyncio.sleep(every_s)
                show(look())
        finally:
            show(look())


@contextlib.contextmanager
def _shown(*, is_terminal: bool) -> Iterator[tuple[Callable[[LiveState], None], float]]:
    if not is_terminal:
        yield (lambda state: typer.echo(plain_line(state), err=True)), _LINE_S
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        yield (lambda state: live.update(view(state), refresh=True)), _DRAW_S
