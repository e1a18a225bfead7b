"""`isthmus top`: routers, workers and rates, again and again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from services.cli import exits
from services.cli.router_options import ApiKey, CaFile, Servers, Tls

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from services.cli.routers import Routers
    from services.pb import admin_pb2

Rows = tuple["list[RouterRow]", "list[WorkerRow]", "list[PoolRow]"]
_COUNTS = ("desired", "ready", "pending", "draining")
Statuses = Mapping[str, "admin_pb2.ClusterStatusResponse"]  # by router address


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One router since the last look."""

    router_id: str
    model: str
    num_open: int
    requests_per_s: float
    failures_per_s: float
    tokens_per_s: float
    hit_share: float | None  # of prompt tokens; None when no request ended
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    degraded: str  # why it decides without the store


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as its newest witness sees it."""

    worker_id: str
    role: str
    state: str
    running: int
    waiting: int
    queued_tokens: int
    kv_used: float | None  # share of its blocks; None while it has not said
    rate_tok_s: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool that an autoscaler resizes."""

    pool: str
    desired: int
    ready: int
    pending: int
    draining: int
    limited_by: str
    reason: str


def top(
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca_file: CaFile = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between looks.")
    ] = 2.0,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Looks, then end; 0 = until interrupted.")
    ] = 0,
) -> int:
    """Watch the cluster: a live table on a terminal, plain lines in a pipe."""
    import sys

    from services.cli.routers import Routers, by_status

    routers = replace(Routers.of(server, api_key, tls, ca_file), identify=by_status)
    frames = _frames(routers, interval_s, count)
    if sys.stdout.isatty():
        return _show_live(frames)
    status = exits.FAILED
    for rows in frames:
        typer.echo("\n".join(plain_lines(*rows)))
        sys.stdout.flush()
        status = exits.OK if rows[0] else exits.FAILED
    return status


def _show_live(frames: Iterator[Rows]) -> int:
    from rich.live import Live

    status = exits.FAILED
    with Live(auto_refresh=False, screen=False) as live:
        for rows in frames:
            live.update(tables(*rows), refresh=True)
            status = exits.OK if rows[0] else exits.FAILED
    return status


def _frames(routers: Routers, interval_s: float, count: int) -> Iterator[Rows]:
    """Look, compare with the look before, wait."""
    from services.cli.routers import calling, complain
    from services.pb import admin_pb2

    ask = admin_pb2.ClusterStatusRequest()
    before: Statuses = {}
    number = 0
    while True:
        replies = routers.ask_all(calling(lambda stub: stub.ClusterStatus, ask))
        for reply in replies:
            complain(reply)
        now = {reply.server: reply.answer for reply in replies if reply.answer is not None}
        yield router_rows(before, now), worker_rows(now.values()), pool_rows(now.values())
        before = now
        number += 1
        if number == count:
            return
        time.sleep(interval_s)


def router_rows(before: Statuses, now: Statuses) -> list[RouterRow]:
    """Compare two looks; a router that is new or restarted is compared with its start."""
    return [_router_row(before.get(server), status) for server, status in now.items()]


def _router_row(
    before: admin_pb2.ClusterStatusResponse | None, now: admin_pb2.ClusterStatusResponse
) -> RouterRow:
    totals, recent = now.totals, now.recent
    is_same_life = before is not None and before.totals.uptime_ms < totals.uptime_ms

    def grown(name: str) -> int:
        start = getattr(before.totals, name) if before is not None and is_same_life else 0
        return int(getattr(totals, name)) - int(start)

    seconds = max(grown("uptime_ms"), 1) / 1000
    prompt_tokens = grown("prompt_tokens")
    return RouterRow(
        router_id=now.router_id,
        model=now.model,
        num_open=now.requests_open,
        requests_per_s=grown("requests_ok") / seconds,
        failures_per_s=grown("requests_failed") / seconds,
        # An answer that failed takes its tokens back.
        tokens_per_s=max(0, grown("completion_tokens")) / seconds,
        hit_share=grown("cached_tokens") / prompt_tokens if prompt_tokens else None,
        ttft_p50_ms=recent.ttft_p50_ms,
        ttft_p99_ms=recent.ttft_p99_ms,
        tpot_p50_ms=recent.tpot_p50_ms,
        tpot_p99_ms=recent.tpot_p99_ms,
        degraded=now.degraded_reason if now.degraded else "",
    )


def worker_rows(statuses: Iterable[admin_pb2.ClusterStatusResponse]) -> list[WorkerRow]:
    """Join what the routers say of workers; of a worker that several know the first one's word."""
    found: dict[str, WorkerRow] = {}
    for status in statuses:
        for worker in status.workers:
            found.setdefault(worker.worker_id, _worker_row(worker))
    return [found[worker_id] for worker_id in sorted(found)]


def _worker_row(worker: admin_pb2.WorkerView) -> WorkerRow:
    load = worker.load
    step_us = load.tbt_a_us + load.tbt_b_us * load.resident_tokens
    return WorkerRow(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_uncached_tokens,
        kv_used=1 - load.kv_free / load.kv_total if load.kv_total else None,
        rate_tok_s=load.rate_tok_s,
        step_ms=step_us / 1e3,
    )


def pool_rows(statuses: Iterable[admin_pb2.ClusterStatusResponse]) -> list[PoolRow]:
    """Return what the autoscaler said last, by the router that heard it last; often nothing."""
    told = [status.autoscaler for status in statuses if status.HasField("autoscaler")]
    newest = max(told, key=lambda autoscaler: autoscaler.at_unix_ms, default=None)
    if newest is None:
        return []
    return [
        PoolRow(
            pool.pool, pool.desired, pool.ready, pool.pending, pool.draining, pool.limited_by,
            pool.reason,
        )
        for pool in newest.pools
    ]  # fmt: skip


def plain_lines(
    routers: Sequence[RouterRow], workers: Sequence[WorkerRow], pools: Sequence[PoolRow] = ()
) -> Iterator[str]:
    """One line a router, a worker and a pool, for a pipe."""
    for r in routers:
        yield (
            f"router {r.router_id} open={r.num_open} req/s={r.requests_per_s:.1f} "
            f"failed/s={r.failures_per_s:.1f} tok/s={r.tokens_per_s:.0f} "
            f"hits={_share(r.hit_share)} ttft_ms={r.ttft_p50_ms:.0f}/{r.ttft_p99_ms:.0f} "
            f"tpot_ms={r.tpot_p50_ms:.1f}/{r.tpot_p99_ms:.1f}"
            + (f" degraded={r.degraded!r}" if r.degraded else "")
        )
    for w in workers:
        yield (
            f"worker {w.worker_id} role={w.role} state={w.state} running={w.running} "
            f"waiting={w.waiting} queued_tokens={w.queued_tokens} kv={_share(w.kv_used)} "
            f"prefill_tok/s={w.rate_tok_s:.0f} step_ms={w.step_ms:.1f}"
        )
    yield from map(pool_line, pools)


def pool_line(pool: PoolRow) -> str:
    """One line of a pool's size."""
    return (
        f"pool {pool.pool} desired={pool.desired} ready={pool.ready} pending={pool.pending} "
        f"draining={pool.draining}"
        + (f" limited_by={pool.limited_by}" if pool.limited_by else "")
        + (f" reason={pool.reason!r}" if pool.reason else "")
    )


def pool_table(pools: Sequence[PoolRow]) -> Table:
    """The same for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("pool", "desired", "ready", "pending", "draining", "limited by", "reason"):
        justify: Literal["left", "right"] = "right" if column in _COUNTS else "left"
        table.add_column(column, justify=justify)
    for p in pools:
        sizes = (str(size) for size in (p.desired, p.ready, p.pending, p.draining))
        table.add_row(Text(p.pool), *sizes, p.limited_by or "-", Text(p.reason))
    return table


def tables(
    routers: Sequence[RouterRow], workers: Sequence[WorkerRow], pools: Sequence[PoolRow] = ()
) -> RenderableType:
    """The same for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    top_table = Table(box=None, pad_edge=False, title_justify="left")
    for column in ("router", "open", "req/s", "fail/s", "tok/s", "hits", "TTFT ms", "TPOT ms"):
        top_table.add_column(column, justify="left" if column == "router" else "right")
    for r in routers:
        top_table.add_row(
            Text(f"{r.router_id}{' (no store)' if r.degraded else ''}"),
            str(r.num_open),
            f"{r.requests_per_s:.1f}",
            f"{r.failures_per_s:.1f}",
            f"{r.tokens_per_s:.0f}",
            _share(r.hit_share),
            f"{r.ttft_p50_ms:.0f}/{r.ttft_p99_ms:.0f}",
            f"{r.tpot_p50_ms:.1f}/{r.tpot_p99_ms:.1f}",
        )
    worker_table = Table(box=None, pad_edge=False)
    for column in ("worker", "role", "state", "run", "wait", "queued", "KV", "tok/s", "step ms"):
        worker_table.add_column(
            column, justify="left" if column in ("worker", "role", "state") else "right"
        )
    for w in workers:
        worker_table.add_row(
            Text(w.worker_id),
            w.role,
            w.state,
            str(w.running),
            str(w.waiting),
            str(w.queued_tokens),
            _share(w.kv_used),
            f"{w.rate_tok_s:.0f}",
            f"{w.step_ms:.1f}",
        )
    parts: list[RenderableType] = [top_table, Text(""), worker_table]
    if pools:
        parts += [Text(""), pool_table(pools)]
    return Group(*parts)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
