from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.resilience.fair_queue import QUANTUM, FairQueue, Waiting

AGEING_S = 10.0


def waiting(
    tenant: str = "a", cost: int = 100, *, priority: int = 0, at: float = 0.0, size: int = 10
) -> Waiting:
    """Make something to queue."""
    return Waiting(tenant, priority, cost, size, at)


def filled(*entries: Waiting, weights: dict[str, float] | None = None) -> FairQueue:
    """Make a queue that holds these."""
    queue = FairQueue(weights or {}, AGEING_S)
    for entry in entries:
        queue.add(entry)
    return queue


def taken(queue: FairQueue, most: int = 10_000) -> list[Waiting]:
    """Take what goes next until nothing is left."""
    order: list[Waiting] = []
    while len(order) < most and (head := queue.head()) is not None:
        assert queue.head() is head, "asking twice changes nothing"
        queue.take(head)
        order.append(head)
        queue.check_integrity()
    return order


def test_equal_requests_go_as_they_came() -> None:
    entries = [waiting(at=float(i)) for i in range(5)]
    assert taken(filled(*reversed(entries))) == entries


def test_a_higher_priority_goes_first() -> None:
    """RB-084: what is urgent does not wait for what is not."""
    low, high = waiting(at=0.0), waiting(priority=1, at=1.0)
    assert taken(filled(low, high)) == [high, low]


def test_waiting_makes_up_for_priority() -> None:
    """RB-083: a stream of urgent requests overtakes an old one only for the ageing time."""
    old = waiting(at=0.0)
    urgent = [waiting(priority=1, at=float(at)) for at in (1, 9, 11, 30)]
    assert taken(filled(old, *urgent)) == [urgent[0], urgent[1], old, urgent[2], urgent[3]]


def test_a_tenant_cannot_raise_itself_above_others() -> None:
    queue = filled(*(waiting("a", priority=1000) for _ in range(20)), waiting("b"))
    first = taken(queue, 12)
    assert "b" in [w.tenant for w in first]


def test_long_requests_get_no_more_than_short_ones() -> None:
    """Turns are weighed by cost: ten short ones of b for each long one of a."""
    long = [waiting("a", 10 * QUANTUM) for _ in range(10)]
    short = [waiting("b", QUANTUM) for _ in range(100)]
    spent: Counter[str] = Counter()
    for entry in taken(filled(*long, *short)):
        spent[entry.tenant] += entry.cost
        if spent["a"] < 100 * QUANTUM and spent["b"] < 100 * QUANTUM:
            assert abs(spent["a"] - spent["b"]) <= 11 * QUANTUM


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=4),
    st.lists(st.integers(1, 4000), min_size=1, max_size=5),
)
def test_shares_follow_the_weights(weights: Sequence[float], costs: Sequence[int]) -> None:
    """As long as all have something waiting, no tenant is a round away from its share."""
    names = [f"t{i}" for i in range(len(weights))]
    queue = FairQueue(dict(zip(names, weights, strict=True)), AGEING_S)
    for name in names:
        for i in range(30):
            queue.add(waiting(name, costs[i % len(costs)]))
    spent = dict.fromkeys(names, 0)
    while len({w.tenant for w in queue}) == len(names):
        head = queue.head()
        assert head is not None
        queue.take(head)
        spent[head.tenant] += head.cost
        rounds = [spent[n] / (QUANTUM * w) for n, w in zip(names, weights, strict=True)]
        allowed = 1 + max(max(costs) / (QUANTUM * w) for w in weights)
        assert max(rounds) - min(rounds) <= allowed + 1e-6


def test_a_huge_cost_takes_no_rounds_one_by_one() -> None:
    """With a tiny weight it would be four hundred million of them."""
    queue = filled(waiting("a", 1 << 32), waiting("b", 1 << 32), weights={"a": 0.01, "b": 0.01})
    assert len(taken(queue)) == 2


def test_what_is_ahead_is_ones_own_and_a_fair_share_of_others() -> None:
    queue = filled(*(waiting("a", 100, at=float(i)) for i in range(5)))
    assert queue.cost_ahead("a", 0, 100, 10.0) == 500
    assert queue.cost_ahead("a", 5, 100, 10.0) == 0
    # Its first request waits for one round of another's, a longer one for more.
    assert queue.cost_ahead("b", 0, 100, 10.0) == QUANTUM
    assert queue.cost_ahead("b", 0, QUANTUM + 1, 10.0) == 500
    assert filled().cost_ahead("b", 0, 100, 10.0) == 0


def test_a_newcomer_displaces_the_last_of_the_largest_tenant() -> None:
    flood = [waiting("a", 100, at=float(i)) for i in range(5)]
    queue = filled(*flood, waiting("b", 100))
    assert queue.displaced_by(waiting("c", 100, at=9.0)) is flood[-1]
    assert queue.displaced_by(waiting("b", 100, at=9.0)) is flood[-1]
    assert queue.displaced_by(waiting("a", 100, at=9.0)) is None
    assert queue.displaced_by(waiting("a", 100, at=9.0, priority=1)) is flood[-1]
    assert queue.displaced_by(waiting("c", 9000, at=9.0)) is None
    assert filled().displaced_by(waiting()) is None


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        FairQueue({"a": 0.0}, AGEING_S)
    with pytest.raises(ValueError, match="positive"):
        FairQueue({}, 0.0)


class QueueMachine(RuleBasedStateMachine):
    """Adds, removes and takes at will; totals and order hold, and nobody is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue({"a": 3.0, "b": 0.1}, AGEING_S)
        self.here: list[Waiting] = []
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abc"), cost=st.integers(1, 20_000), priority=st.integers(0, 3),
        passed=st.floats(0, 20),
    )  # fmt: skip
    def add(self, tenant: str, cost: int, priority: int, passed: float) -> None:
        self.now += passed
        entry = waiting(tenant, cost, priority=priority, at=self.now)
        self.queue.add(entry)
        self.here.append(entry)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.here))
        self.queue.remove(entry)
        self.here.remove(entry)

    @precondition(lambda self: self.here)
    @rule()
    def take(self) -> None:
        head = self.queue.head()
        assert head is not None
        mates = [w for w in self.here if w.tenant == head.tenant]
        assert head.rank == min(w.rank for w in mates)
        self.queue.take(head)
        self.here.remove(head)

    @precondition(lambda self: not self.here)
    @rule()
    def is_empty(self) -> None:
        assert self.queue.head() is None

    @invariant()
    def holds(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.here)


TestQueueMachine = QueueMachine.TestCase
