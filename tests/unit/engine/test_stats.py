"""Estimates: warm-up is ignored, rates and lines are found, lengths are bounded."""

from __future__ import annotations

import pytest

from services.engine.request import TRANSITIONS, RequestState, StageClock
from services.engine.stats import EngineStats


def _step(stats: EngineStats, elapsed_s: float, prefill: int, decode: int, resident: int) -> None:
    stats.step_done(
        elapsed_s=elapsed_s, num_prefill=prefill, num_decode=decode, resident_tokens=resident
    )


def test_warm_up_steps_do_not_count() -> None:
    stats = EngineStats()
    _step(stats, 30.0, 64, 0, 64)
    _step(stats, 30.0, 64, 0, 64)
    assert stats.prefill_tok_s is None
    assert stats.step_s is None
    _step(stats, 0.05, 100, 0, 100)
    assert stats.prefill_tok_s == pytest.approx(2000)


def test_finds_the_decode_line_and_takes_it_out_of_mixed_steps() -> None:
    stats = EngineStats()
    for resident in (100, 200, 300, 400, 500) * 10:
        _step(stats, 0.010 + resident * 1e-5, 0, 8, resident)
    a_us, b_us = stats.decode_line_us()
    assert a_us == pytest.approx(10_000, rel=0.01)
    assert b_us == pytest.approx(10, rel=0.01)
    _step(stats, 0.010 + 200 * 1e-5 + 0.050, 100, 8, 200)
    assert stats.prefill_tok_s == pytest.approx(2000, rel=0.02)


def test_a_constant_load_gives_a_flat_line() -> None:
    stats = EngineStats()
    for _ in range(20):
        _step(stats, 0.02, 0, 4, 128)
    a_us, b_us = stats.decode_line_us()
    assert a_us == pytest.approx(20_000)
    assert b_us == 0.0


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "lowest", "highest"),
    [
        (
            0.005,
            0.0005,
            0.040,
            0.055,
        ),  # the target can be met: small last chunks cost a little of it
        (0.100, 0.0010, 0.150, 0.250),  # it cannot: twice the fixed cost, not one tiny chunk
    ],
)
def test_chunks_converge_to_the_time_target_or_to_a_sane_share_of_fixed_cost(
    fixed_s: float, token_s: float, lowest: float, highest: float
) -> None:
    stats, chunk, elapsed_s = EngineStats(), 128.0, 0.0
    for step in range(60):
        elapsed_s = fixed_s + token_s * int(chunk)
        _step(stats, elapsed_s * (0.97, 1.03)[step % 2], int(chunk), 0, 0)
        _step(stats, fixed_s + token_s * 24, 24, 0, 0)  # the last chunk of some prompt
        chunk = min(max(stats.chunk_tokens(0.05) or 128.0, 16.0), 2048.0)
    assert lowest < elapsed_s < highest


def test_a_slow_start_does_not_leave_chunks_small_for_long() -> None:
    """Large chunks that met a busy machine, then an idle one: the fixed cost is found again."""
    stats, chunk, smallest = EngineStats(), 128, 16
    for _ in range(5):
        _step(stats, 1.3, chunk, 0, 0)
    for _ in range(60):
        chunk = max(int(stats.chunk_tokens(0.05) or 0), smallest)
        _step(stats, 0.040 + 0.0008 * chunk, chunk, 0, 0)
    assert 40 <= chunk <= 110  # as much again as the fixed 40 ms is 50 tokens


def test_chunks_of_one_size_are_followed_by_a_longer_one() -> None:
    stats = EngineStats()
    for _ in range(9):
        _step(stats, 0.05, 16, 0, 0)
    assert (stats.chunk_tokens(0.05) or 0) < 20
    _step(stats, 0.05, 16, 0, 0)
    assert (stats.chunk_tokens(0.05) or 0) >= 32
    _step(stats, 0.06, 32, 0, 0)
    assert (stats.chunk_tokens(0.05) or 0) < 70


def test_expected_length_follows_what_was_seen() -> None:
    stats = EngineStats()
    assert stats.expected_length(1000) == 64
    assert stats.expected_length(5) == 5
    for _ in range(300):
        stats.ended(10)
    assert stats.expected_length(1000) == 10


def test_every_state_can_end_and_the_end_is_final() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    for state in RequestState:
        seen, frontier = {state}, {state}
        while frontier:
            frontier = {nxt for one in frontier for nxt in TRANSITIONS[one]} - seen
            seen |= frontier
        assert RequestState.FINISHED in seen
    assert not TRANSITIONS[RequestState.FINISHED]


def test_stage_clock_loses_no_microsecond() -> None:
    clock = StageClock("queue", 100.0000004)
    now = 100.0000004
    for stage, seconds in (("prefill", 0.1234567), ("decode", 0.7654321), ("decode", 0.0000009)):
        now += seconds
        clock.enter(stage, now)
    times = clock.times(now + 0.5)
    total = times.queue_us + times.prefill_us + times.handoff_us + times.decode_us
    assert total == int((now + 0.5) * 1e6) - int(100.0000004 * 1e6)


def test_a_step_is_predicted_by_its_prompt_tokens_and_what_is_resident() -> None:
    stats = EngineStats()
    assert stats.predicted_s(512, 0) == 0.0
    for _ in range(4):
        stats.step_done(elapsed_s=0.01, num_prefill=0, num_decode=1, resident_tokens=100)
    for _ in range(4):
        stats.step_done(elapsed_s=0.1, num_prefill=100, num_decode=0, resident_tokens=0)
    assert stats.predicted_s(0, 100) == pytest.approx(0.01)
    assert stats.predicted_s(6000, 100) == pytest.approx(6.01, rel=0.2)
