"""Passing a ticket on, to workers that are gone, cut off or have no room in their Links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from services.common.clock import ManualClock
from services.common.ids import Incarnation, WorkerId
from services.pb import worker_pb2
from services.registry.reader import RegistryReader
from services.router.booking import Bookings
from services.router.cluster_watch import ClusterWatch
from services.router.config import RouterConfig
from services.router.legs import PREFILL
from services.router.pair_book import PairBook
from services.router.policy import Decision, Links, PolicyConfig, choose_decode
from services.router.route_desk import RouteDesk, Surroundings
from services.router.sending import Sender
from services.router.view import ClusterView, WorkerView
from tests.unit.router.test_policy import make_worker
from tests.unit.router.test_recovery import make_leg, make_progress


class FakeLink:
    """A Link that takes work, or not."""

    incarnation = Incarnation(1)

    def __init__(self) -> None:
        self.is_up = True
        self.taken: list[worker_pb2.Work] = []

    def send_work(self, work: worker_pb2.Work) -> bool:
        """Take it if it is up."""
        if self.is_up:
            self.taken.append(work)
        return self.is_up


class FakeCluster:
    """What a sender needs of a ClusterWatch: workers and Links a test sets."""

    def __init__(self, clock: ManualClock, names: Sequence[str]) -> None:
        self.workers = [make_worker(name) for name in names]
        self.fakes = {WorkerId(name): FakeLink() for name in names}
        self.bookings, self.pairs = Bookings(), PairBook()
        self.desk = RouteDesk(
            PolicyConfig(), Incarnation(1), cast(RegistryReader, None), clock,
            cast(Surroundings, self),
        )  # fmt: skip

    def view(self) -> ClusterView:
        """Return the workers."""
        return ClusterView(tuple(self.workers), 1000.0)

    def links(self) -> Links:
        """Return no news."""
        return Links()

    def link(self, worker_id: WorkerId) -> FakeLink | None:
        """Return a Link."""
        return self.fakes.get(worker_id)

    def acquire(self, worker_id: WorkerId) -> None:
        """There are no breakers here."""


class Rig:
    """A request whose prefill worker p0 has given its ticket."""

    def __init__(self) -> None:
        clock = ManualClock(1000.0)
        self.cluster = FakeCluster(clock, ["p0", "d0", "d1"])
        self.sender = Sender(RouterConfig(), cast(ClusterWatch, self.cluster), clock)
        self.source = make_leg(PREFILL, "p0", ticket=b"t")
        self.progress = make_progress(self.source)

    def reserve(self, name: str) -> Decision:
        """What the store decides."""
        view = self.cluster.view()
        prefill, others = view.find(WorkerId("p0")), self._others(name)
        assert prefill is not None
        config, facts = PolicyConfig(), self.progress.facts
        decision = choose_decode(facts, prefill, view, config, frozenset(others))
        assert decision is not None
        assert decision.worker.worker_id == name
        return decision

    def _others(self, name: str) -> list[WorkerId]:
        workers: list[WorkerView] = self.cluster.workers
        return [w.worker_id for w in workers if w.worker_id != name]


def test_a_link_that_takes_nothing_now_may_be_asked_again() -> None:
    rig = Rig()
    for name in ("d0", "d1"):
        rig.cluster.fakes[WorkerId(name)].is_up = False
    assert not rig.sender.pass_on(rig.progress, rig.source)
    assert rig.progress.failed == set()
    rig.cluster.fakes[WorkerId("d0")].is_up = True
    assert rig.sender.pass_on(rig.progress, rig.source)
    assert len(rig.cluster.fakes[WorkerId("d0")].taken) == 1


def test_another_takes_over_where_the_reserved_worker_is_gone() -> None:
    rig = Rig()
    reserved = rig.reserve("d0")
    rig.cluster.workers = [w for w in rig.cluster.workers if w.worker_id != "d0"]
    assert rig.sender.pass_on(rig.progress, rig.source, reserved)
    assert len(rig.cluster.fakes[WorkerId("d1")].taken) == 1


def test_another_takes_over_where_the_reserved_workers_link_is_down() -> None:
    rig = Rig()
    reserved = rig.reserve("d0")
    rig.cluster.fakes[WorkerId("d0")].is_up = False
    assert rig.sender.pass_on(rig.progress, rig.source, reserved)
    assert len(rig.cluster.fakes[WorkerId("d1")].taken) == 1


def test_who_refused_the_request_is_not_asked_again() -> None:
    rig = Rig()
    rig.progress.failed = {WorkerId("d0"), WorkerId("d1")}
    assert not rig.sender.pass_on(rig.progress, rig.source)
