"""`isthmus sim`: a trace through a cluster that is not there, by the router's real decisions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, loads
from services.cli.progress import Progress
from services.cli.sim_view import report_json, report_lines, statistics_json, statistics_lines

if TYPE_CHECKING:
    from services.router.admission import AdmissionConfig
    from services.sim.cluster import ClusterSpec, Group
    from services.sim.controller import Change, Failure
    from services.sim.workload import Workload

_MAX_WORKERS = 4096
_MAX_ROUTERS = 64
_TIME = r"(?P<at>\d{1,8}(?:\.\d{1,6})?)"
_FAILURE = re.compile(rf"(?P<worker>[a-z]+-\d{{1,5}})@{_TIME}")
_CHANGE = re.compile(rf"(?P<pool>[a-z]+)=(?P<size>\d{{1,4}})@{_TIME}")
_GROUP = re.compile(r"(?P<pool>[a-z]+)=(?P<count>\d{1,4}):(?P<file>.+)")


def sim(
    trace: loads.Trace = None,
    workload: loads.Described = "",
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests of a --workload.")
    ] = 2_000,
    prefill: Annotated[int, typer.Option(min=0, max=_MAX_WORKERS, help="Prefill workers.")] = 0,
    decode: Annotated[int, typer.Option(min=0, max=_MAX_WORKERS, help="Decode workers.")] = 0,
    aggregated: Annotated[
        int, typer.Option(min=0, max=_MAX_WORKERS, help="Instead: workers that do both.")
    ] = 0,
    policy: Annotated[
        str, typer.Option(help="How prefill workers are chosen; `all` compares the policies.")
    ] = "ours",
    speedup: loads.Speedup = 1.0,
    seed: loads.DrawSeed = 0,
    routers: Annotated[int, typer.Option(min=1, max=_MAX_ROUTERS, help="Router replicas.")] = 1,
    model_file: loads.ModelFile = None,
    hint_lag_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="From a change of a cache to its hints.")
    ] = 10.0,
    hint_loss: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of publishes that never arrive.")
    ] = 0.0,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Workers of another kind besides, POOL=COUNT:MODEL_FILE; repeatable."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="A worker that dies, WORKER@SECONDS: decode-0@12.5; repeatable."),
    ] = None,
    resize: Annotated[
        list[str] | None,
        typer.Option(help="A size of a pool from then on, POOL=SIZE@SECONDS; repeatable."),
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, max=86_400, help="For a drained worker to end what it has.")
    ] = 120.0,
    admission: Annotated[
        bool,
        typer.Option("--admission", help="Queue in routers, refuse what would miss --slo-ttft."),
    ] = False,
    slo_ttft: loads.SloTtft = 2.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0.0001, max=3_600, help="Limit of the mean gap after it, seconds.")
    ] = 0.05,
    stats: Annotated[
        bool, typer.Option("--stats", help="Only say what the load is like; simulate nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Simulate a cluster: hits, latencies, attainment and how busy its pools are."""
    from services.sim.controller import Schedule
    from services.sim.simulate import simulate

    load = _load(trace, workload, requests, speedup, seed)
    if stats:
        return _show_statistics(load, as_json=as_json)
    policies = _policies(policy)
    groups = _groups(group or ())
    spec = replace(
        _spec((prefill, decode, aggregated), groups, model_file),
        num_routers=routers,
        hint_lag_s=hint_lag_ms / 1000,
        hint_loss=hint_loss,
        drain_s=drain_s,
        admission=_admission(policies, slo_ttft) if admission else None,
    )
    changes, failures = _changes(resize or (), spec), _failures(fail or (), spec, resize or ())
    progress, reports = Progress(), {}
    for i, rule in enumerate(policies):
        progress(f"{load.name}: {rule}", i / len(policies))
        reports[rule] = simulate(
            load, spec, policy=rule, seed=seed, failures=failures,
            controller=Schedule(changes) if changes else None,
        )  # fmt: skip
    progress.done()
    if as_json:
        told = report_json(load, spec, reports, seed, slo_ttft, slo_tpot)
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(report_lines(load, spec, reports, slo_ttft, slo_tpot)))
    return exits.OK


def _load(trace: Path | None, workload: str, requests: int, speedup: float, seed: int) -> Workload:
    from services.sim.synthetic import plain_workload

    if (trace is None) == (not workload):
        raise typer.BadParameter("give --trace or --workload")
    if trace is not None:
        return loads.traced_load(trace, speedup)
    return plain_workload(loads.described_load(workload), requests, seed)


def _policies(name: str) -> tuple[str, ...]:
    from services.sim.placement import POLICIES

    if name == "all":
        return POLICIES
    if name not in POLICIES:
        raise typer.BadParameter(f"--policy {name!r}: all, or one of {', '.join(POLICIES)}")
    return (name,)


def _spec(
    sizes: tuple[int, int, int], groups: tuple[Group, ...], model_file: Path | None
) -> ClusterSpec:
    from services.sim.cluster import ClusterSpec
    from services.sim.performance import default_model, read_model

    prefill, decode, aggregated = sizes
    if aggregated and (prefill or decode):
        raise typer.BadParameter("give --prefill and --decode, or --aggregated")
    try:
        return ClusterSpec(
            num_prefill=prefill,
            num_decode=decode,
            num_aggregated=aggregated,
            model=default_model() if model_file is None else read_model(model_file),
            groups=groups,
        )
    except ValueError as error:
        raise typer.BadParameter(
            f"{error}: --prefill and --decode, or --aggregated; --group adds to them"
        ) from None


def _groups(texts: Sequence[str]) -> tuple[Group, ...]:
    from services.sim.cluster import POOLS, Group
    from services.sim.performance import read_model

    groups = []
    for text in texts:
        found = _GROUP.fullmatch(text)
        if found is None or found["pool"] not in POOLS or int(found["count"]) > _MAX_WORKERS:
            raise typer.BadParameter(
                f"--group {text!r}: POOL=COUNT:MODEL_FILE, POOL is one of {', '.join(POOLS)}, "
                f"COUNT at most {_MAX_WORKERS}"
            )
        groups.append(Group(found["pool"], int(found["count"]), read_model(Path(found["file"]))))
    return tuple(groups)


def _changes(texts: Sequence[str], spec: ClusterSpec) -> tuple[Change, ...]:
    from services.sim.controller import Change

    pools = [pool for pool, size in spec.sizes().items() if size]
    changes = []
    for text in texts:
        found = _CHANGE.fullmatch(text)
        if found is None or found["pool"] not in pools or int(found["size"]) > _MAX_WORKERS:
            raise typer.BadParameter(
                f"--resize {text!r}: POOL=SIZE@SECONDS, POOL is one of {', '.join(pools)}, "
                f"SIZE at most {_MAX_WORKERS}"
            )
        changes.append(Change(float(found["at"]), found["pool"], int(found["size"])))
    return tuple(changes)


def _failures(
    texts: Sequence[str], spec: ClusterSpec, resized: Sequence[str]
) -> tuple[Failure, ...]:
    from services.sim.controller import Failure

    sizes, failures = spec.sizes(), []
    for text in texts:
        found = _FAILURE.fullmatch(text)
        if found is None:
            raise typer.BadParameter(f"--fail {text!r}: WORKER@SECONDS, such as decode-0@12.5")
        pool, _, number = found["worker"].rpartition("-")
        # Where pools are resized there may be more workers by then.
        if not sizes.get(pool) or (int(number) >= sizes[pool] and not resized):
            names = ", ".join(f"{p}-0 to {p}-{n - 1}" for p, n in sizes.items() if n)
            raise typer.BadParameter(f"--fail {text!r}: workers are {names}")
        failures.append(Failure(float(found["at"]), found["worker"]))
    return tuple(failures)


def _admission(policies: Sequence[str], slo_ttft_s: float) -> AdmissionConfig:
    from services.router.admission import AdmissionConfig
    from services.sim.placement import OURS

    if tuple(policies) != (OURS,):
        raise typer.BadParameter(f"--admission goes with --policy {OURS}")
    return AdmissionConfig(slo_ttft_s=slo_ttft_s)


def _show_statistics(load: Workload, *, as_json: bool) -> int:
    from services.sim.statistics import load_statistics

    found = load_statistics(load)
    if as_json:
        typer.echo(json.dumps(statistics_json(load.name, found), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(statistics_lines(load.name, found)))
    return exits.OK
