"""Arrivals and workload laid together: which requests are due when. Pure but for the files read."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from loadtest.arrivals import Concurrency, Offline, Open, Trace, Users
from loadtest.figures import ideal_hits
from loadtest.records import PlannedRequest, Prompt
from loadtest.scenario import Scenario, Share
from loadtest.sources import Keys, RecordedSource, Source, Turn, make_source
from services.common.errors import ConfigError

MAX_TURNS = 256  # of one session; numbers of requests are laid out by it
MAX_REQUESTS = 2_000_000

Session = tuple[PlannedRequest, ...]  # each after those it waits for


@dataclass(slots=True)
class Schedule:
    """What one run sends: sessions at their instants, or lanes that each go on for ever."""

    scenario: Scenario
    source: Source
    base: Path
    left_out: str = ""  # part of a mixed workload that is drawn and not sent
    _made: list[Session] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether users wait for answers, so that there are lanes instead of instants."""
        return isinstance(self.scenario.arrivals, Concurrency | Users)

    @property
    def waits_for_room(self) -> bool:
        """Whether what is due beyond `client.max_in_flight` waits: it has no instant to keep."""
        return self.is_closed or isinstance(self.scenario.arrivals, Offline)

    def sessions(self) -> list[Session]:
        """Return all sessions of an open loop by when they begin; ConfigError when too many."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> list[Session]:
        found: list[Session] = []
        num_requests = 0
        instants = list(self._instants())
        self._bound(len(instants))  # before the first is made: that many would take minutes
        for index, at_s in instants:
            session = self._session(index, at_s)
            if self.left_out and session[0].kind.partition("/")[0] == self.left_out:
                continue
            found.append(session)
            num_requests += len(session)
            self._bound(num_requests)
        return found

    def _bound(self, num_requests: int) -> None:
        if num_requests > MAX_REQUESTS:
            raise ConfigError(
                f"{self.scenario.name}: more than {MAX_REQUESTS} requests; lower the rate or "
                "the time"
            )

    @property
    def num_lanes(self) -> int:
        """Return how many users there are."""
        arrivals = self.scenario.arrivals
        if isinstance(arrivals, Concurrency):
            return arrivals.sessions
        assert isinstance(arrivals, Users)
        return arrivals.users

    def next_of_lane(self, lane: int, turn: int, now_s: float) -> Session:
        """Return what a user does next; its first request is due after its `wait_s`."""
        arrivals = self.scenario.arrivals
        index = lane + turn * self.num_lanes
        session = self._session(index, None, now_s)
        if not isinstance(arrivals, Users):
            return session
        rng = random.Random(f"{self.scenario.seed}/think/{index}")
        head, *others = session
        return (replace(head, wait_s=rng.expovariate(1 / arrivals.think_s)), *others)

    def warming(self) -> list[PlannedRequest]:
        """Return requests that put every shared prefix into a cache."""
        return [
            PlannedRequest(number, prompt, max_tokens=1, at_s=0.0)
            for number, prompt in enumerate(self.source.prefixes())
        ]

    def _instants(self) -> Iterator[tuple[int, float]]:
        """Give numbers of sessions and when they begin."""
        arrivals = self.scenario.arrivals
        if isinstance(arrivals, Offline):
            return ((index, 0.0) for index in range(arrivals.sessions))
        if isinstance(arrivals, Trace):
            return self._recorded(arrivals)
        assert isinstance(arrivals, Open)
        return _until(arrivals, self.scenario)

    def _recorded(self, trace: Trace) -> Iterator[tuple[int, float]]:
        end_s = self.scenario.phases.end_s
        for index, at_s in enumerate(self._times(trace)):
            if at_s < trace.from_s or (trace.to_s is not None and at_s >= trace.to_s):
                continue
            due_s = (at_s - trace.from_s) / trace.speedup
            if end_s is not None and due_s >= end_s:
                return
            yield index, due_s

    def _times(self, trace: Trace) -> Sequence[float]:
        if trace.file:
            return _read_times(self.base / trace.file)
        if not isinstance(self.source, RecordedSource):
            raise ConfigError(
                "arrivals.file is missing: only workloads mooncake and azure have rows with times"
            )
        return [row.at_s for row in self.source.rows]

    def _session(self, index: int, at_s: float | None, now_s: float = 0.0) -> Session:
        scenario = self.scenario
        rng = random.Random(f"{scenario.seed}/session/{index}")
        share = _choose(scenario.mix, rng)
        turns = self.source.session(index, now_s if at_s is None else at_s, rng)
        assert len(turns) <= MAX_TURNS
        return tuple(
            _planned(index, number, turn, at_s, share) for number, turn in enumerate(turns)
        )


def make_schedule(
    scenario: Scenario, base: Path, salt: str = "", *, left_out: str = ""
) -> Schedule:
    """Open a scenario's files, which are beside it in `base`.

    Args:
        salt: another one for every run with a cold cache.
        left_out: part of a mixed workload whose sessions are not sent; all others stay as they are.

    Raises:
        ConfigError: a file cannot be read, or is not what it should be.
    """
    try:
        source = make_source(scenario.workload, base, Keys(scenario.seed, salt))
    except OSError as error:
        raise ConfigError(f"workload.file: {error.filename}: {error.strerror}") from None
    except ValueError as error:  # BadTrace is one
        raise ConfigError(f"workload.file: {error}") from None
    return Schedule(scenario, source, base, left_out)


def ideal_hit_ratio(schedule: Schedule, counted: Container[int] | None = None) -> float | None:
    """Return the share of prompt tokens a cache without end would have; None in a closed loop.

    Sessions are taken one after another, as if none overlapped.
    """
    if schedule.is_closed:
        return None
    requests = (request for session in schedule.sessions() for request in session)
    return ideal_hits(requests, counted)


def _until(arrivals: Open, scenario: Scenario) -> Iterator[tuple[int, float]]:
    end_s = scenario.phases.end_s
    assert end_s is not None
    rng = random.Random(f"{scenario.seed}/arrivals")
    for index, at_s in enumerate(islice(arrivals.instants(rng), MAX_REQUESTS + 1)):
        if at_s >= end_s:
            return
        yield index, at_s


def _read_times(path: Path) -> list[float]:
    from services.sim.recorded import read_recorded

    try:
        return [row.at_s for row in read_recorded(path).arrivals]
    except OSError as error:
        raise ConfigError(f"arrivals.file: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"arrivals.file: {error}") from None


def _choose(mix: Sequence[Share], rng: random.Random) -> Share:
    return mix[0] if len(mix) == 1 else rng.choices(mix, [share.weight for share in mix])[0]


def _planned(
    index: int, number: int, turn: Turn, at_s: float | None, share: Share
) -> PlannedRequest:
    first = index * MAX_TURNS
    return PlannedRequest(
        number=first + number,
        prompt=Prompt(turn.pieces),
        max_tokens=turn.max_tokens,
        at_s=at_s if turn.after is None else None,
        after=None if turn.after is None else first + turn.after,
        wait_s=turn.wait_s,
        session=f"s{index}",
        kind=turn.kind,
        model=share.model,
        tenant=share.tenant,
        priority=share.priority,
        ignore_eos=share.ignore_eos,
        temperature=share.temperature,
        seed=first + number if share.temperature else None,
    )
