"""From a target's address and a scenario to what one run leaves behind."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from loadtest.credentials import read_keys
from loadtest.records import PlannedRequest
from loadtest.run_log import RunLog
from loadtest.runner import RunClock, Runner
from loadtest.scenario import Scenario
from loadtest.schedule import Schedule, make_schedule
from loadtest.target import LiveTarget, TargetFacts, TargetUnusable
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.fault_bringer import FaultBringer
    from loadtest.http_target import Api

Watch = Callable[[Runner], Awaitable[None]]
"""Looks at a run while it goes on, such as a panel; cancelled at its end."""

_SIM = "sim:"
_PROBED_TURNS = 8  # of each lane, to see whether prompts fit
_BY_HAND = "the run was stopped from outside before its end: its figures are of what there was"


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Where to send a load, and how.

    `url` is grpc[s]://HOST:PORT, http[s]://HOST:PORT[/PATH], mock://http?KEY=VALUE&... for a
    server with known timing, or sim:prefill=N,decode=N for a cluster in virtual time.
    """

    url: str
    api: Api = "chat"
    model: str = ""
    vocab_size: int | None = None
    ca_file: Path | None = None
    key_file: Path | None = None


def schedule_of(scenario: Scenario, base: Path, *, left_out: str = "") -> Schedule:
    """Lay out what a run of a scenario sends, whose files are in `base`; see make_schedule."""
    # A cold run shares prefixes with no other.
    salt = secrets.token_hex(8) if scenario.cache == "cold" else ""
    return make_schedule(scenario, base, salt, left_out=left_out)


def run_schedule(
    schedule: Schedule,
    spec: TargetSpec,
    watch: Watch | None = None,
    bringer: FaultBringer | None = None,
) -> RunLog:
    """Send a schedule.

    Args:
        bringer: brings the scenario's faults, if it has any.

    Raises:
        ConfigError: the keys are not as they should be, or nobody brings the scenario's faults.
        TargetUnusable: nothing can be measured there.
    """
    scenario = schedule.scenario
    if scenario.faults and bringer is None:
        raise ConfigError(
            f"{scenario.name} brings faults, which only `run` does, to a cluster of this machine: "
            "give --cluster FILE, which `isthmus up --json-status FILE` keeps"
        )
    if spec.url.startswith(_SIM):
        return _simulated(schedule, spec.url.removeprefix(_SIM))
    _allow_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(schedule, spec, watch, bringer))


def _simulated(schedule: Schedule, text: str) -> RunLog:
    from loadtest.sim_target import SimTarget, read_spec

    scenario = schedule.scenario
    room = scenario.client.max_in_flight if schedule.waits_for_room else None
    target = SimTarget(read_spec(text), scenario.phases, scenario.seed, room)
    log = RunLog(target.facts(), datetime.now(UTC).isoformat(timespec="seconds"))
    if schedule.is_closed:
        log.records = target.run_users(schedule)
    else:
        log.records = target.run([r for session in schedule.sessions() for r in session])
    log.samples = target.samples(log.records)
    log.duration_s = log.samples[-1].at_s if log.samples else 0.0
    return log


async def _run(
    schedule: Schedule, spec: TargetSpec, watch: Watch | None, bringer: FaultBringer | None
) -> RunLog:
    clock = RunClock()
    target = make_target(spec, schedule.scenario, clock)
    try:
        facts = await target.open()
        check_lengths(schedule, facts)
        runner = Runner(schedule, target, facts, clock)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, runner.stop, _BY_HAND)
        watching = asyncio.ensure_future(watch(runner)) if watch else None
        bringing = None
        if bringer is not None:
            bringing = asyncio.ensure_future(bringer.bring(clock, runner.log.faults))
        try:
            log = await runner.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if bringing is not None:
                bringing.cancel()
                await asyncio.wait((bringing,))
        if bringing is not None and not bringing.cancelled():
            bringing.result()  # a fault of ours is no result
        return log
    finally:
        await target.close()


def make_target(spec: TargetSpec, scenario: Scenario, clock: Callable[[], float]) -> LiveTarget:
    """Make the target of an address; TargetUnusable if it is none."""
    keys = read_keys(scenario, os.environ, spec.key_file)
    scheme, _, rest = spec.url.partition("://")
    if scheme in ("grpc", "grpcs"):
        from loadtest.grpc_target import GrpcTarget

        is_tls = scheme == "grpcs"
        return GrpcTarget(rest, clock, keys, model=spec.model, is_tls=is_tls, ca_file=spec.ca_file)
    if scheme in ("http", "https"):
        from loadtest.http_target import HttpTarget

        return HttpTarget(
            spec.url,
            clock,
            keys,
            api=spec.api,
            model=spec.model,
            vocab_size=spec.vocab_size,
            ca_file=spec.ca_file,
        )
    if scheme == "mock":
        from loadtest.mock.target import MockTarget

        return MockTarget(
            spec.url, lambda url: make_target(replace(spec, url=url), scenario, clock)
        )
    raise TargetUnusable(
        f"{spec.url} is no target: give grpc[s]://HOST:PORT, http[s]://HOST:PORT or "
        "sim:prefill=N,decode=N"
    )


def check_lengths(schedule: Schedule, facts: TargetFacts) -> None:
    """Refuse a load that the model could never take; TargetUnusable says how to mend it."""
    if facts.context_length is None:
        return
    longest = max(
        (request.prompt.num_tokens + request.max_tokens for request in _some(schedule)), default=0
    )
    if longest > facts.context_length:
        raise TargetUnusable(
            f"{schedule.scenario.name} asks for {longest} tokens in one request, and "
            f"{facts.model} has a context of {facts.context_length}; give the workload shorter "
            "lengths (max_isl, scale), or use --quick"
        )


def _some(schedule: Schedule) -> Iterable[PlannedRequest]:
    """Give all requests of an open loop, and the first ones of a closed one."""
    if not schedule.is_closed:
        return (request for session in schedule.sessions() for request in session)
    return (
        request
        for lane in range(schedule.num_lanes)
        for turn in range(_PROBED_TURNS)
        for request in schedule.next_of_lane(lane, turn, 0.0)
    )


def _allow_connections() -> None:
    """Let this process have as many open files as it may: each stream over HTTP is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
