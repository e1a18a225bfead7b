"""Sizes found by the real simulator on loads of a few seconds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError
from services.common.progress import silent
from services.sim.alone import check_reach
from services.sim.performance import PerformanceModel, default_model
from services.sim.prices import Prices
from services.sim.sizing import (
    ONE_POOL,
    TWO_POOLS,
    Option,
    Question,
    Sizing,
    chunk_for_answers,
    compare,
    size_cluster,
)
from services.sim.synthetic import PlainLoad, plain_workload
from services.sim.trials import Run, Size, Slo, Trials
from services.sim.windows import drawn_runs, runs_of_trace
from services.sim.workload import Arrival, Workload

LONG = PlainLoad(8000, 200, 4.0)
SHORT = PlainLoad(2000, 50, 15.0)
STRICT = Slo(ttft_s=1.5, tpot_s=0.025)  # a step with a whole chunk takes 0.114 s
LOOSE = Slo(ttft_s=1.5, tpot_s=0.2)


def question(load: PlainLoad, slo: Slo, num_requests: int = 150) -> Question:
    runs, check_runs = drawn_runs(load, num_requests, 1, seed=0)
    return Question(runs, check_runs, slo, default_model(), Prices(), max_workers=32)


def sized(asked: Question) -> Sizing:
    return size_cluster(asked, ManualClock())


@pytest.fixture(scope="module")
def strict() -> Sizing:
    """Long prompts beside answers that must not wait for them."""
    return sized(question(LONG, STRICT))


@pytest.fixture(scope="module")
def loose() -> Sizing:
    """Answers may wait for whole chunks of prompts."""
    return sized(question(SHORT, LOOSE))


def both(sizing: Sizing) -> tuple[Option, Option]:
    assert sizing.two_pools is not None
    assert sizing.one_pool is not None
    return sizing.two_pools, sizing.one_pool


def test_two_pools_win_where_answers_must_not_wait_for_long_prompts(strict: Sizing) -> None:
    two, one = both(strict)
    assert strict.verdict.choice == TWO_POOLS
    assert two.usd_per_h < one.usd_per_h
    assert f"at {1 - two.usd_per_h / one.usd_per_h:.0%} less" in strict.verdict.sentence
    assert strict.verdict.sentence.endswith(": disaggregate")


def test_one_pool_wins_where_they_may(loose: Sizing) -> None:
    two, one = both(loose)
    assert loose.verdict.choice == ONE_POOL
    assert one.usd_per_h < two.usd_per_h
    assert loose.verdict.sentence.endswith(": do not disaggregate")


@pytest.mark.parametrize("which", ["strict", "loose"])
def test_an_answer_is_enough_confirmed_and_not_too_much(
    which: str, request: pytest.FixtureRequest
) -> None:
    sizing: Sizing = request.getfixturevalue(which)
    assert sizing.is_complete
    for option in both(sizing):
        assert option.trial.outcome == "meets"
        assert option.is_confirmed
        assert option.check is not None
        assert option.limit is not None
        assert option.limit.outcome != "meets"
        assert option.least_usd_per_h <= option.usd_per_h
        assert option.busier is not None
        assert option.busier.attainment <= option.check.attainment + 0.03
        assert option.cost.usd_per_h == pytest.approx(option.usd_per_h)
        assert option.cost.per_m_good is not None


def test_runs_that_differ_widen_the_interval(loose: Sizing) -> None:
    """Of 2,000 requests chance alone leaves 0.01 on either side of 0.95."""
    assert loose.one_pool is not None
    alike = replace(
        loose.one_pool.trial, attain=0.93, by_run=(0.95, 0.95), num_requests=2000, num_good=1900,
        by_end=0.95,
    )  # fmt: skip
    assert 0.939 < alike.bounds[0] < 0.95 < alike.bounds[1] < 0.96
    assert alike.outcome == "meets"
    apart = replace(alike, by_run=(0.91, 0.99))
    half = 12.706 * 0.04  # two runs say next to nothing of how much runs differ
    assert apart.bounds == pytest.approx((0.95 - half, 1.0), abs=1e-4)
    assert (apart.outcome, apart.runs_met) == ("unresolved", 1)
    five = replace(alike, by_run=(0.91, 0.93, 0.95, 0.97, 0.99))
    assert five.bounds[0] == pytest.approx(0.95 - 2.776 * 0.001**0.5 / 5**0.5, abs=1e-4)
    assert replace(alike, by_end=0.92).outcome == "unresolved"
    assert replace(alike, attain=0.98).outcome == "fails"


def test_more_workers_never_hurt() -> None:
    """What the search by bisection rests on; queues that nearly never empty leave some noise."""
    load = plain_workload(PlainLoad(3000, 60, 12.0, 0.5), 120, seed=4)
    trials = Trials(
        (Run(load, 0),), default_model(), replace(LOOSE, ttft_s=0.6), ManualClock(), math.inf,
        silent,
    )  # fmt: skip
    sizes = [Size(p, d) for p, d in itertools.product((1, 2, 4), (1, 2, 4))]
    sizes += [Size(num_aggregated=n) for n in (1, 2, 3, 5)]
    attained = {size: trials.of(size).attainment for size in sizes}
    assert min(attained.values()) < 0.6 < 0.9 < max(attained.values())
    for small, large in itertools.permutations(sizes, 2):
        pairs = zip(small.workers().values(), large.workers().values(), strict=True)
        is_same_kind = bool(small.num_aggregated) == bool(large.num_aggregated)
        if is_same_kind and all(a <= b for a, b in pairs):
            assert attained[small] <= attained[large] + 0.03, (small, large)


def test_out_of_time_is_told_and_gives_no_verdict() -> None:
    found = size_cluster(question(SHORT, LOOSE, 100), ManualClock(), budget_s=0.0)
    assert (found.two_pools, found.one_pool, found.is_complete) == (None, None, False)
    assert found.verdict.choice is None
    assert "too short" in found.verdict.sentence


def test_a_target_beyond_reach_names_the_requests_instead_of_searching() -> None:
    arrivals = tuple(
        Arrival(float(i), 60_000 if i % 4 == 0 else 1000, 10, tuple(range(i * 200, i * 200 + n)))
        for i, n in zip(range(40), itertools.cycle((118, 2, 2, 2)), strict=False)
    )
    load = Workload("mixed", 512, arrivals)
    with pytest.raises(ConfigError, match=r"10 of 40 miss.*request 0 of mixed \(60000 tokens\)"):
        check_reach([load], default_model(), Slo(2.0, 0.05))
    assert check_reach([load], default_model(), Slo(2.0, 0.05, attain=0.7)) == 0.25
    with pytest.raises(ConfigError, match=r"a step alone takes 12\.6 ms"):
        check_reach([load], default_model(), Slo(60.0, 0.01))
    small = default_model().model_copy(update={"kv_blocks": 1000})
    with pytest.raises(ConfigError, match="needs KV for 60010 tokens, a worker has 16000"):
        check_reach([load], small, Slo(60.0, 0.05))


def test_what_was_seen_before_need_not_be_computed_within_the_limit() -> None:
    twice = tuple(Arrival(float(i), 51_200, 5, tuple(range(100))) for i in range(10))
    load = Workload("same", 512, twice)
    assert check_reach([load], default_model(), Slo(2.0, 0.05, attain=0.9)) == 0.1


def slow_to_write() -> PerformanceModel:
    model = default_model()
    pace = model.decode.model_copy(update={"fixed_s": 0.01, "request_s": 0.001, "token_s": 0.0})
    return model.model_copy(update={"decode": pace})


def test_chunks_of_one_pool_leave_answers_their_time() -> None:
    """0.025 s are 0.01 of any step, and 5e-5 + 0.001 * 200 / 8000 for each token of a chunk."""
    asked = replace(question(LONG, STRICT, 10), model=slow_to_write())
    assert chunk_for_answers(asked) == int(0.015 / 7.5e-5) // 16 * 16
    assert chunk_for_answers(replace(asked, slo=LOOSE)) == 0


def test_costs_that_the_trials_cannot_tell_apart_are_called_so(strict: Sizing) -> None:
    two, one = both(strict)
    vague = replace(one, least_usd_per_h=two.usd_per_h)
    assert compare(two, vague).choice is None
    assert compare(two, vague).sentence.startswith("too close to call")
    tied = (replace(option, usd_per_h=7.5, least_usd_per_h=7.5) for option in (two, one))
    assert compare(*tied).sentence.endswith("both cost $7.50 an hour")
    assert compare(two, None).choice == TWO_POOLS
    assert compare(None, one).choice == ONE_POOL
    assert compare(None, None).choice is None
    unsure = compare(two, replace(one, check=None)).sentence
    assert unsure.endswith(f"(not confirmed by other runs: {one.size})")


def test_the_limit_names_the_pool_and_what_breaks_there(strict: Sizing) -> None:
    two, one = both(strict)
    assert two.limit is not None
    assert (two.limit.limit, two.limiting_role) == ("TTFT", "prefill")
    assert two.limit.size == replace(two.size, num_prefill=two.size.num_prefill - 1)
    assert one.limiting_role == "aggregated"


def test_runs_of_a_trace_count_no_request_twice_and_start_at_zero() -> None:
    arrivals = tuple(Arrival(100.0 + i, 64 * (i + 1), 2, tuple(range(1))) for i in range(100))
    load = Workload("t", 64, arrivals)
    runs, check_runs = runs_of_trace(load, 20, 2, seed=3)
    assert [len(r) for r in (runs, check_runs)] == [2, 2]
    seen = [
        a.num_tokens
        for run in (*runs, *check_runs)
        for a in run.workload.arrivals[run.num_uncounted :]
    ]
    assert len(seen) == len(set(seen)) == 80
    assert all(run.workload.arrivals[0].at_s == 0.0 for run in (*runs, *check_runs))
    assert runs[0].workload.arrivals[0].num_tokens == 64  # from the first request ..
    assert check_runs[1].workload.arrivals[-1].num_tokens == 6400  # .. to the last


def test_runs_of_a_trace_begin_with_what_came_before_them() -> None:
    arrivals = tuple(Arrival(float(i), 64 * (i + 1), 2, (i,)) for i in range(100))
    runs, check_runs = runs_of_trace(Workload("t", 64, arrivals), 20, 2, seed=3)
    numbers = [[a.units[0] for a in run.workload.arrivals] for run in (*runs, *check_runs)]
    counted = [n[run.num_uncounted :] for n, run in zip(numbers, (*runs, *check_runs), strict=True)]
    assert counted == [[*range(at, at + 20)] for at in (20, 60, 40, 80)]
    assert numbers == [[*range(at, at + 40)] for at in (0, 40, 20, 60)]
    assert runs[1].workload.name == "t, requests 60 to 79"
    assert {run.num_counted for run in (*runs, *check_runs)} == {20}


def test_a_size_is_judged_with_the_caches_it_would_have() -> None:
    """A prompt that came before a run is cached in it, and none before it is counted."""
    slow = default_model().model_copy(
        update={"prefill": default_model().prefill.model_copy(update={"token_s": 1e-3})}
    )
    prompts = tuple(
        Arrival(3.0 * i, 4096, 2, tuple(range(i % 10 * 8, i % 10 * 8 + 8))) for i in range(30)
    )
    (cold,), _ = runs_of_trace(Workload("t", 512, prompts[:10]), 10, 1, seed=0)
    (warm,), _ = runs_of_trace(Workload("t", 512, prompts), 10, 1, seed=0)
    tried = {
        run.num_lead: Trials((run,), slow, Slo(1.0, 0.1), ManualClock(), math.inf, silent).of(
            Size(1, 1)
        )
        for run in (cold, warm)
    }
    assert (tried[0].attainment, tried[10].attainment) == (0.0, 1.0)
    assert (tried[0].num_requests, tried[10].num_requests) == (9, 10)


def test_a_short_trace_is_checked_at_other_instants() -> None:
    arrivals = tuple(Arrival(float(i), 64 * (i + 1), 2, (0,)) for i in range(30))
    runs, check_runs = runs_of_trace(Workload("t", 64, arrivals), 20, 3, seed=0)
    assert [run.workload.arrivals for run in runs] == [arrivals]
    (check,) = check_runs
    assert sorted(a.num_tokens for a in check.workload.arrivals) == [64 * i for i in range(1, 31)]
    assert [a.at_s for a in check.workload.arrivals] != [a.at_s for a in arrivals]
    assert min(a.at_s for a in check.workload.arrivals) >= 0


def test_drawn_loads_have_the_means_they_name() -> None:
    load = plain_workload(PlainLoad(1000, 100, 50.0, spread=0.8), 4000, seed=1)
    count = len(load.arrivals)
    assert sum(a.num_tokens for a in load.arrivals) / count == pytest.approx(1000, rel=0.06)
    assert sum(a.output_tokens for a in load.arrivals) / count == pytest.approx(100, rel=0.06)
    assert count / load.arrivals[-1].at_s == pytest.approx(50, rel=0.06)
    units = [unit for arrival in load.arrivals for unit in arrival.units]
    assert len(units) == len(set(units))
