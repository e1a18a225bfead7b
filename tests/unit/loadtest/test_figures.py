"""Figures of single scenarios on records whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.figures import burst, ideal_hits, interference, makespans, reuse
from loadtest.records import Phase, Piece, PlannedRequest, Prompt, Sample, Status
from loadtest.slo import Slo
from tests.support.load_records import make_record

_PIECES = st.tuples(st.integers(0, 2), st.integers(1, 3))
_PROMPTS = st.lists(st.lists(_PIECES, min_size=1, max_size=3), min_size=1, max_size=8)


def _planned(prompts: list[list[tuple[int, int]]]) -> list[PlannedRequest]:
    return [
        PlannedRequest(n, Prompt(tuple(Piece(key, size) for key, size in prompt)), max_tokens=1)
        for n, prompt in enumerate(prompts)
    ]


@given(_PROMPTS)
def test_ideal_hits_are_the_longest_prefixes_of_earlier_prompts(
    prompts: list[list[tuple[int, int]]],
) -> None:
    tokens = [
        [(key, offset) for key, size in prompt for offset in range(size)] for prompt in prompts
    ]
    # Equal token lists may be cut into other pieces: only cuts at the same places count as equal.
    cut = [
        [(*token, tuple(prompt[:i])) for i, (key, size) in enumerate(prompt)
         for token in [(key, offset) for offset in range(size)]]
        for prompt in prompts
    ]  # fmt: skip
    found = 0
    for n, own in enumerate(cut):
        found += max(
            (_common(own, other) for other in cut[:n]),
            default=0,
        )
    expected = found / sum(map(len, tokens))
    assert ideal_hits(_planned(prompts)) == pytest.approx(expected)


def _common(own: Sequence[object], other: Sequence[object]) -> int:
    shared = 0
    for a, b in zip(own, other, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def test_requests_that_do_not_count_fill_the_cache_all_the_same() -> None:
    """A warm-up meets a cold cache; held against it, what was measured would beat the ideal."""
    planned = _planned([[(1, 3)], [(1, 3)], [(1, 3), (2, 3)]])
    assert ideal_hits(planned) == pytest.approx(6 / 12)
    assert ideal_hits(planned, {1, 2}) == pytest.approx(6 / 9)
    assert ideal_hits(planned, set()) is None


def test_ideal_of_nothing_is_no_number() -> None:
    assert ideal_hits([]) is None


def test_reuse_is_told_of_tokens_and_beside_what_was_possible() -> None:
    records = [
        make_record(0, isl=300, cached_tokens=0),
        make_record(1, isl=100, cached_tokens=100),
        make_record(2, isl=1000, cached_tokens=None),
        make_record(3, isl=1000, cached_tokens=1000, status=Status.ERROR),
    ]
    assert reuse(records, 0.5) == {"hit_ratio": 0.25, "ideal_hit_ratio": 0.5, "hit_of_ideal": 0.5}
    assert reuse(records[2:3], 0.5) == {}


def test_interference_sets_short_requests_beside_a_long_prefill_apart() -> None:
    longs = [make_record(n, n * 10.0, ttft_s=2.0, kind="long") for n in range(200)]
    beside = [make_record(n, n * 10.0 + 1, 0.1, 0.03, kind="short") for n in range(1000)]
    alone = [make_record(n, n * 10.0 + 5, 0.1, 0.01, kind="short") for n in range(1000)]
    beside = [record for record in beside if record.scheduled_s < 2000] * 5
    figures = interference([*longs, *beside, *alone], 0.95)
    assert figures["interference"] == pytest.approx(3.0)
    assert figures["tpot_p99_ms_alone"] == pytest.approx(10.0)
    assert (figures["short_beside_long"], figures["short_alone"]) == (1000, 1000)


def test_interference_is_told_at_the_highest_percentile_both_can_bear() -> None:
    longs = [make_record(n, n * 10.0, ttft_s=2.0, kind="long") for n in range(200)]
    beside = [make_record(n, n * 10.0 + 1, 0.1, 0.03, kind="short") for n in range(150)]
    alone = [make_record(n, n * 10.0 + 5, 0.1, 0.01, kind="short") for n in range(200)] * 10
    figures = interference([*longs, *beside, *alone], 0.95)
    assert figures["tpot_p90_ms_beside_long"] == pytest.approx(30)
    assert figures["interference"] == pytest.approx(3.0)


def test_interference_needs_enough_of_both() -> None:
    records = [make_record(0, kind="long"), make_record(1, 5.0, kind="short")]
    assert interference(records, 0.95)["interference"] is None
    assert interference(records[:1], 0.95) == {}


def test_makespans_take_whole_sessions_that_began_in_the_measured_phase() -> None:
    records = []
    for n in range(20):  # each takes 1 s to its second turn, and that 0.2 s
        records.append(make_record(3 * n, n, session=f"s{n}"))
        records.append(make_record(3 * n + 1, n + 1, session=f"s{n}", phase=Phase.COOLDOWN))
        records.append(make_record(3 * n + 2, n, session=f"alone{n}"))
    records.append(make_record(90, 0.0, session="early", phase=Phase.WARMUP))
    records.append(make_record(91, 50.0, session="early"))
    records.append(make_record(92, 0.0, session="cut"))
    records.append(make_record(93, 1.0, ttft_s=None, session="cut"))
    figures = makespans(records)
    assert (figures["sessions"], figures["sessions_whole"]) == (21, 20)
    assert figures["makespan_p50_s"] == pytest.approx(1.2)
    assert figures["makespan_p95_s"] is None


def test_a_burst_is_told_by_recovery_debt_and_machines() -> None:
    """A burst at 100 s: late for 20 s by half a second; a third worker at 110 s, a fourth after."""
    slo = Slo(ttft_s=0.5)
    records = [make_record(n, n / 10, ttft_s=1.0 if 1000 <= n < 1200 else 0.1) for n in range(2000)]
    sizes = {90.0: 2, 110.0: 3, 120.0: 3, 130.0: 4, 160.0: 3, 199.0: 3}
    samples = [Sample(at, 7, replicas={"decode": size}, queued=3) for at, size in sizes.items()]
    figures = burst(records, samples, slo, 100.0, 201.0)
    assert figures == {
        "slo_recovery_s": 20.0,
        "slo_debt_req_s": pytest.approx(100.0),
        "peak_in_flight": 7.0,
        "peak_queue": 3.0,
        "lost_in_burst": 0.0,
        "first_new_worker_s": 10.0,
        "overshoot_gpu_s": 30.0,
    }


def test_a_burst_that_is_never_over_has_no_recovery() -> None:
    slo = Slo(ttft_s=0.5)
    records = [make_record(n, n / 10, ttft_s=None if n > 1500 else 0.1) for n in range(2000)]
    figures = burst(records, [], slo, 100.0, 210.0)
    assert figures["slo_recovery_s"] is None
    assert figures["slo_debt_req_s"] == pytest.approx(
        sum(210 - n / 10 - 0.5 for n in range(1501, 2000))
    )
