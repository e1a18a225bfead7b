from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.sim.azure import read_azure
from services.sim.mooncake import read_trace
from services.sim.statistics import LoadStatistics, load_statistics
from services.sim.workload import Arrival, Workload

DATA = Path(__file__).parents[2] / "data"
TRACES = "ISTHMUS_TEST_TRACES"  # a directory with the whole traces


def stats_of(*times: float) -> LoadStatistics:
    """Look at prompts of one token."""
    arrivals = tuple(Arrival(at, 1, 1, (i,)) for i, at in enumerate(times))
    return load_statistics(Workload("w", 512, arrivals))


def test_even_gaps_do_not_vary_and_bursts_do() -> None:
    even = stats_of(*range(61))
    assert (even.gap_cv2, even.rate, even.duration_s) == (0.0, 61 / 60, 60.0)
    assert even.peak_to_mean == {1: 60 / 61, 10: 60 * 10 / (10 * 61), 60: 60 * 60 / (60 * 61)}
    # Gaps 0, 0, 30: mean 10, variance 200.
    burst = stats_of(0, 0, 0, 30)
    assert burst.gap_cv2 == pytest.approx(2.0)
    assert burst.peak_to_mean == {1: 3 * 30 / (1 * 4), 10: 3 * 30 / (10 * 4)}


def test_a_load_of_one_instant_has_no_rate() -> None:
    for found in (stats_of(5.0), stats_of(5.0, 5.0)):
        assert (found.rate, found.gap_cv2, found.peak_to_mean) == (None, None, {})


def test_ideal_hits_count_leading_runs_in_blocks_and_tokens() -> None:
    arrivals = (Arrival(0, 1000, 4, (1, 2)), Arrival(1, 600, 8, (1, 2)), Arrival(2, 512, 6, (2,)))
    found = load_statistics(Workload("w", 512, arrivals))
    assert found.ideal_block_hit == 3 / 5  # equal units follow equal ones: unit 2 is told again
    assert found.ideal_token_hit == pytest.approx((600 + 512) / 2112)
    assert (found.outputs.mean, found.outputs.p50, found.outputs.p99) == (6, 6, 8)


def test_cuts_of_the_traces_are_read() -> None:
    conversation = load_statistics(read_trace(DATA / "mooncake_conversation_first_120.jsonl.gz"))
    synthetic = load_statistics(read_trace(DATA / "mooncake_synthetic_first_60.jsonl.gz"))
    code = load_statistics(read_azure(DATA / "azure_code_2023_first_200.csv.gz"))
    assert [f.num_requests for f in (conversation, synthetic, code)] == [120, 60, 200]
    assert code.ideal_block_hit == code.ideal_token_hit == 0
    assert 0 < conversation.ideal_block_hit < synthetic.ideal_block_hit


@pytest.mark.skipif(TRACES not in os.environ, reason=f"${TRACES} names no directory of traces")
def test_whole_traces_have_their_published_figures() -> None:
    where = Path(os.environ[TRACES])
    for name, block_hit, token_hit in (
        ("conversation", 0.3664, 0.3736),
        ("synthetic", 0.6396, 0.6512),
    ):
        found = load_statistics(read_trace(where / f"mooncake_{name}_trace.jsonl.gz"))
        assert round(found.ideal_block_hit, 4) == block_hit
        assert round(found.ideal_token_hit, 4) == token_hit
    code = load_statistics(read_azure(where / "AzureLLMInferenceTrace_code.csv.gz"))
    assert code.gap_cv2 is not None
    assert round(code.gap_cv2) == 173
