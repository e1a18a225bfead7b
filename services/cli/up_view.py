"""What `isthmus up` shows: a table kept up to date on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

import grpc

from services.cli.store_unit import StoreUnit
from services.cli.unit import READY, STOPPED, STOPPING, Unit
from services.cli.up_plan import WORKER_ROLES
from services.pb import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from rich.table import Table

    from services.autoscaler.policy import PolicySpec

_REFRESH_S = 1.0
_STATUS_TIMEOUT_S = 0.8
_TAIL_LINES = 12


class View(Protocol):
    """What the supervisor tells people."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def starting(self, units: Sequence[Unit]) -> None:
        """The start begins."""
        ...

    def changed(self, unit: Unit) -> None:
        """A process changed its state."""
        ...

    def announce(self, units: Sequence[Unit]) -> None:
        """Everything is ready."""
        ...

    def failed(self, units: Sequence[Unit]) -> None:
        """The start failed because of these."""
        ...

    def refresh(self, now: float, units: Sequence[Unit], store: StoreUnit) -> None:
        """Time passed."""
        ...

    def stopping(self, drain_s: float) -> None:
        """The end was asked for; running requests have `drain_s` seconds."""
        ...

    def stopped(self) -> None:
        """The end that was asked for is there."""
        ...


class PlainView:
    """One line for every change."""

    def __init__(self, out: TextIO, log_hint: str) -> None:
        self._out = out
        self._log_hint = log_hint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.flush()

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def starting(self, units: Sequence[Unit]) -> None:
        """Say what is to come: it takes seconds until the first change."""
        self._say(starting_line(units))

    def changed(self, unit: Unit) -> None:
        """Print the new state."""
        self._say(describe_change(unit))

    def announce(self, units: Sequence[Unit]) -> None:
        """Print the addresses."""
        for line in endpoint_lines(units):
            self._say(line)
        self._say("ready; Ctrl-C stops everything")

    def failed(self, units: Sequence[Unit]) -> None:
        """Quote the logs of what failed."""
        for line in failure_lines(units, self._log_hint):
            self._say(line)

    def refresh(self, now: float, units: Sequence[Unit], store: StoreUnit) -> None:
        """Nothing: lines come with changes only."""

    def stopping(self, drain_s: float) -> None:
        """Say what is waited for."""
        self._say(stopping_line(drain_s))

    def stopped(self) -> None:
        """Say that nothing is left."""
        self._say(STOPPED)


class LiveView:
    """A table redrawn once a second, with figures read from the workers."""

    def __init__(self, log_hint: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        # No refresh thread: the supervisor forks, and its loop calls refresh() anyway.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._log_hint = log_hint
        self._figures = WorkerFigures()
        self._next_at = 0.0
        self._title = "starting"

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        if self._title == STOPPED:
            self._console.print(STOPPED, highlight=False)
        self._figures.close()

    def starting(self, units: Sequence[Unit]) -> None:
        """Nothing: the table says so."""

    def changed(self, unit: Unit) -> None:
        """Redraw at the next tick."""
        self._next_at = 0.0
        if unit.state.reason:
            self._console.print(describe_change(unit), style="yellow", highlight=False)

    def announce(self, units: Sequence[Unit]) -> None:
        """Print the addresses above the table."""
        for line in endpoint_lines(units):
            self._console.print(line, highlight=False)
        self._title = "ready; Ctrl-C stops everything"

    def failed(self, units: Sequence[Unit]) -> None:
        """Quote the logs of what failed."""
        for line in failure_lines(units, self._log_hint):
            self._console.print(line, style="red", highlight=False, markup=False)

    def refresh(self, now: float, units: Sequence[Unit], store: StoreUnit) -> None:
        """Redraw once a second, and at the end."""
        if now >= self._next_at or all(unit.state.state == STOPPED for unit in units):
            self._next_at = now + _REFRESH_S
            self._figures.poll(units)
            table = process_table(self._title, units, store, self._figures)
            self._live.update(table, refresh=True)

    def stopping(self, drain_s: float) -> None:
        """Say what is waited for, as long as it is."""
        self._title = stopping_line(drain_s)
        self._next_at = 0.0

    def stopped(self) -> None:
        """Say that nothing is left, at the next redraw and below the table."""
        self._title = STOPPED
        self._next_at = 0.0


class WorkerFigures:
    """Last counters of every worker, asked for without waiting."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._calls: dict[str, grpc.Future[worker_pb2.StatusResponse]] = {}
        self._last: dict[str, worker_pb2.StatusResponse] = {}

    def poll(self, units: Sequence[Unit]) -> None:
        """Collect answers, ask again."""
        for unit in units:
            if unit.plan.role not in WORKER_ROLES:
                continue
            call = self._calls.get(unit.grpc)
            if call is not None and not call.done():
                continue
            if call is not None:
                self._collect(unit.grpc, call)
            if unit.state.state in (READY, STOPPING):  # the latter: how many are left
                self._ask(unit)

    def _ask(self, unit: Unit) -> None:
        address = unit.grpc
        if address not in self._channels:
            self._channels[address] = unit.dial(address, ())
        stub = worker_pb2_grpc.WorkerStub(self._channels[address])
        request = worker_pb2.StatusRequest()
        self._calls[address] = stub.Status.future(request, timeout=_STATUS_TIMEOUT_S)

    def _collect(self, address: str, call: grpc.Future[worker_pb2.StatusResponse]) -> None:
        try:
            self._last[address] = call.result(timeout=0)
        except (grpc.RpcError, grpc.FutureCancelledError):
            self._last.pop(address, None)  # shown as unknown; its state says why
            self._channels.pop(address).close()

    def cells(self, unit: Unit) -> tuple[str, str]:
        """Open requests and blocks in use, as text."""
        last = self._last.get(unit.grpc)
        if last is None:
            return "", ""
        return str(last.requests_open), f"{last.blocks_in_use}/{last.blocks_total}"

    def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            channel.close()


def process_table(
    title: str, units: Sequence[Unit], store: StoreUnit, figures: WorkerFigures
) -> Table:
    """One row a process, the store's first; it fits a terminal of 80 columns."""
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    table.add_column("process", no_wrap=True)
    table.add_column("state")
    table.add_column("pid", no_wrap=True)
    table.add_column("address", no_wrap=True)
    for column in ("reqs", "KV blocks", "restarts"):
        table.add_column(column, justify="right")
    for entry in store.describe():
        # Where it listens is a path in a private directory: nothing people would type.
        state, pid, restarts = (str(entry[key]) for key in ("state", "pid", "restarts"))
        table.add_row(str(entry["name"]), _coloured(state), pid, "", "", "", restarts)
    for unit in units:
        requests, blocks = figures.cells(unit)
        table.add_row(
            unit.plan.name,
            _coloured(unit.state.state),
            str(unit.child.pid or ""),
            f"{unit.grpc} gRPC\n{unit.http} HTTP" if unit.http else unit.grpc,
            requests,
            blocks,
            str(unit.state.num_restarts),
        )
    return table


def _coloured(state: str) -> str:
    return f"[{'green' if state == READY else 'yellow'}]{state}[/]"


def starting_line(units: Sequence[Unit]) -> str:
    """What is about to start, by kind."""
    kinds = Counter(unit.plan.role for unit in units)
    words = [f"{count} {role}" for role, count in kinds.items()]
    return f"starting {', '.join(words)} ..."


def policy_line(policy: PolicySpec) -> str | None:
    """Say where a policy resizes nothing: its pools look as if they did not scale."""
    from services.autoscaler.policy import Mode

    if policy.mode is Mode.AUTO:
        return None
    done = "decides and tells, and" if policy.mode is Mode.DRY_RUN else "waits, and"
    return f"the policy is in mode {policy.mode}: the autoscaler {done} resizes nothing"


def stopping_line(drain_s: float) -> str:
    """What the end waits for, and how not to wait."""
    return f"stopping; waiting up to {drain_s:g} s for running requests; Ctrl-C: at once"


def describe_change(unit: Unit) -> str:
    """One line about a process's new state."""
    place = f"pid {unit.child.pid}, {unit.grpc}" if unit.state.state == READY else ""
    details = "; ".join(part for part in (place, unit.state.reason) if part)
    return f"{unit.plan.name}: {unit.state.state}" + (f" ({details})" if details else "")


def endpoint_lines(units: Sequence[Unit]) -> list[str]:
    """Addresses clients use."""
    lines = []
    for unit in units:
        if unit.plan.role == "router":
            lines.append(f"OpenAI API   {unit.scheme}://{unit.http}/v1")
            lines.append(f"gRPC         {unit.grpc}")
    return lines


def failure_lines(units: Sequence[Unit], log_hint: str) -> list[str]:
    """Why the start failed, with the last lines of the logs concerned."""
    lines = []
    for unit in units:
        reason = unit.state.reason or "not ready in time"
        lines.append(f"{unit.plan.name}: {unit.state.state}: {reason}; the last lines of its log:")
        lines += [f"    {line}" for line in unit.child.tail(_TAIL_LINES)] or ["    (empty)"]
    lines.append(log_hint)
    return lines
