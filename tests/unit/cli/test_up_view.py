"""What `isthmus up` shows, on a terminal of 80 columns and in a pipe."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from services.autoscaler.policy import Mode
from services.cli.store_unit import StoreUnit
from services.cli.unit import Unit
from services.cli.up_plan import Counts, FrontDoors, plan_processes
from services.cli.up_view import (
    PlainView,
    WorkerFigures,
    failure_lines,
    policy_line,
    process_table,
)
from tests.support.scaling_policy import make_policy


class RunningStore(StoreUnit):
    """A store of our own, as it describes itself."""

    def describe(self):  # type: ignore[no-untyped-def]  # as the real one
        yield {"name": "store", "state": "ready", "pid": 4711, "restarts": 1}


def make_units(tmp_path: Path, tag: str = "") -> list[Unit]:
    plans = plan_processes(
        Counts(1, 1, 2),
        FrontDoors("127.0.0.1", 50051, "127.0.0.1", 18000),
        threads=1,
        runtime_dir=tmp_path,
        tag=tag,
    )
    units = [Unit(plan, lambda *_: [], {}, tmp_path) for plan in plans]
    for number, unit in enumerate(units):
        unit.grpc_port = unit.plan.grpc_port or 40000 + number
        unit.http_port = unit.plan.http_port
    return units


def test_table_has_the_store_and_both_ports_of_a_router_in_80_columns(tmp_path: Path) -> None:
    out = StringIO()
    store = RunningStore(None, tmp_path, "unix:///s")
    units = make_units(tmp_path, tag="-0a1b2c")
    table = process_table("ready", units, store, WorkerFigures())
    Console(file=out, width=80).print(table)

    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["store", "ready", "4711", "1"]
    text = out.getvalue()
    for whole in ("prefill-0-0a1b2c", "127.0.0.1:40000", "127.0.0.1:50051 gRPC",
                  "127.0.0.1:18000 HTTP", "KV blocks", "restarts"):  # fmt: skip
        assert whole in text, text


def test_plain_lines_say_what_starts_what_the_end_waits_for_and_that_it_came(
    tmp_path: Path,
) -> None:
    out = StringIO()
    view = PlainView(out, "")
    view.starting(make_units(tmp_path))
    view.stopping(10.0)
    view.stopped()
    assert out.getvalue().splitlines() == [
        "starting 1 prefill, 2 decode, 1 router ...",
        "stopping; waiting up to 10 s for running requests; Ctrl-C: at once",
        "stopped",
    ]


def test_failure_says_how_to_keep_the_logs(tmp_path: Path) -> None:
    lines = failure_lines(make_units(tmp_path)[:1], "run again with --log-dir DIR")
    assert lines[0].startswith("prefill-0: stopped: not ready in time")
    assert lines[-1] == "run again with --log-dir DIR"


def test_a_policy_that_resizes_nothing_says_so() -> None:
    spec = make_policy().spec
    assert policy_line(spec) is None
    dry = spec.model_copy(update={"mode": Mode.DRY_RUN})
    assert policy_line(dry) == (
        "the policy is in mode DryRun: the autoscaler decides and tells, and resizes nothing"
    )
