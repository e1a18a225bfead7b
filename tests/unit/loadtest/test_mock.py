"""The mock's plans: queues, standstills and faults are as they were asked for."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.mock.lateness import Lateness
from loadtest.mock.settings import MockSettings, draw, parse_url
from loadtest.mock.timing import Desk, Freezes
from services.common.errors import ConfigError
from tests.support.load_records import first_come_first_served


def test_without_a_queue_every_answer_takes_its_service_and_its_tokens() -> None:
    desk = Desk(MockSettings(service_ms="50", itl_ms="10"))
    for now_s in (1000.0, 1000.001, 1000.5):
        chunks = desk.plan(now_s, 4).chunks
        assert [tokens for _, tokens in chunks] == [1, 1, 1, 1]
        assert [at - now_s for at, _ in chunks] == pytest.approx([0.05, 0.06, 0.07, 0.08])


def test_chunks_of_several_tokens_come_after_the_time_of_all_of_them() -> None:
    desk = Desk(MockSettings(service_ms="50", itl_ms="10", tokens_per_chunk=4))
    chunks = desk.plan(0.0, 7).chunks
    assert [tokens for _, tokens in chunks] == [1, 4, 2]
    assert [at for at, _ in chunks] == pytest.approx([0.05, 0.09, 0.11])


@given(servers=st.integers(1, 5), seed=st.integers(0, 1000))
def test_a_queue_is_that_of_so_many_servers(servers: int, seed: int) -> None:
    rng = random.Random(seed)
    due = list(accumulate(rng.expovariate(20 * servers) for _ in range(60)))
    desk = Desk(MockSettings(service_ms="50", servers=servers))
    planned = [desk.plan(at, 1).chunks[0][0] - at for at in due]
    expected = [record.ttft_s for record in first_come_first_served(due, 0.05, servers)]
    assert planned == pytest.approx(expected)


@given(
    at_s=st.floats(0, 10), for_s=st.floats(0.1, 5), more_s=st.floats(0.1, 5),
    wall_s=st.floats(0, 100), once=st.booleans(),
)  # fmt: skip
def test_work_stands_still_in_a_standstill_and_only_there(
    at_s: float, for_s: float, more_s: float, wall_s: float, once: bool
) -> None:
    every_s = 0.0 if once else for_s + more_s
    freezes = Freezes(at_s, for_s, every_s)
    worked_s = freezes.working(wall_s)
    starts = [at_s] if once else [at_s + n * every_s for n in range(1000)]
    frozen_s = sum(min(for_s, max(0.0, wall_s - start)) for start in starts)
    assert worked_s == pytest.approx(wall_s - frozen_s, abs=1e-6)
    is_frozen = any(start <= wall_s <= start + for_s for start in starts)
    if not is_frozen:
        assert freezes.wall(worked_s) == pytest.approx(wall_s, abs=1e-6)


def test_everything_after_a_standstill_is_later_by_its_length() -> None:
    desk = Desk(MockSettings(service_ms="50", itl_ms="10", freeze_at_s=1.0, freeze_s=2.0))
    assert desk.plan(100.0, 1).chunks[0][0] == pytest.approx(100.05)
    running = [at - 100 for at, _ in desk.plan(100.94, 3).chunks]
    assert running == pytest.approx([0.99, 1.0, 3.01])
    caught = [at - 100 for at, _ in desk.plan(102.0, 2).chunks]
    assert caught == pytest.approx([3.05, 3.06])
    assert desk.plan(103.5, 1).chunks[0][0] == pytest.approx(103.55)


def test_a_standstill_is_in_every_hundredth_answer_of_an_open_loop_and_in_one_of_a_closed() -> None:
    """Who waits for an answer before asking again never asks while nothing answers."""
    settings = MockSettings(service_ms="20", freeze_at_s=10.0, freeze_s=2.0)
    desk = Desk(settings)
    waited_s = sorted(desk.plan(n / 50, 1).chunks[0][0] - n / 50 for n in range(5000))
    assert waited_s[round(0.99 * len(waited_s))] > 0.9
    desk, now_s, slow = Desk(settings), 0.0, 0
    while now_s < 100:
        answered_s = desk.plan(now_s, 1).chunks[0][0]
        slow += answered_s - now_s > 0.1
        now_s = answered_s
    assert slow == 1


def test_a_slow_start_wears_off() -> None:
    desk = Desk(MockSettings(service_ms="100", slow_start_s=10.0, slow_start_factor=5.0))
    waited_s = [desk.plan(at, 1).chunks[0][0] - at for at in (0.0, 5.0, 10.0, 20.0)]
    assert waited_s == pytest.approx([0.5, 0.3, 0.1, 0.1])


def test_faults_come_as_often_as_asked_and_equally_by_seed() -> None:
    settings = MockSettings(error_share=0.1, reject_share=0.2, seed=3)
    desk, again = Desk(settings), Desk(settings)
    faults = [desk.plan(0.0, 1).fault for _ in range(2000)]
    assert faults == [again.plan(0.0, 1).fault for _ in range(2000)]
    assert faults.count("internal") == pytest.approx(200, abs=60)
    assert faults.count("overloaded") == pytest.approx(400, abs=80)


@pytest.mark.parametrize(
    ("spread", "mean"),
    [("20", 20.0), ("uniform:10:30", 20.0), ("exponential:20", 20.0), ("lognormal:20:0", 20.0)],
)
def test_spreads_have_their_mean(spread: str, mean: float) -> None:
    rng = random.Random(1)
    assert sum(draw(spread, rng) for _ in range(4000)) / 4000 == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "url",
    [
        "mock://http?itl_ms=slow",
        "mock://http?itl_ms=uniform:1",
        "mock://http?itl_ms=-1",
        "mock://http?servers=-1",
        "mock://http?latency=3",
        "mock://http?freeze_s=2&freeze_every_s=1",
        "mock://http?error_share=0.6&reject_share=0.6",
        "mock://http?nonsense",
        "mock://smtp",
        "mock:",
    ],
)
def test_a_mock_that_cannot_be_is_refused_with_its_address(url: str) -> None:
    with pytest.raises(ConfigError, match="mock:"):
        parse_url(url)


def test_an_address_says_everything() -> None:
    door, settings = parse_url("mock://grpc?itl_ms=lognormal:10:0.5&servers=4&tells_counts=false")
    assert door == "grpc"
    assert settings == MockSettings(itl_ms="lognormal:10:0.5", servers=4, tells_counts=False)
    assert parse_url("mock://http") == ("http", MockSettings())


def test_lateness_is_told_once() -> None:
    lateness = Lateness()
    for late_ms in range(1, 101):
        lateness.note(late_ms / 1000)
    told = lateness.told()
    assert told == {
        "writes": 100,
        "late_p50_ms": pytest.approx(50),
        "late_p99_ms": pytest.approx(99),
    }
    assert lateness.told() == {"writes": 0}
