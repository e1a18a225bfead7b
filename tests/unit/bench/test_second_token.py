"""Figures and bars of the second-token benchmark, from rounds that are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.bench import second_token
from services.bench.result import BenchFailed
from services.bench.second_token import Answer, Round, bar_ms, read_spans, result_of, stages_of
from services.pb import common_pb2

MS = 1_000_000


def _answer(first_ms: int, second_ms: int, *, moved: int = 1) -> Answer:
    timing = common_pb2.Timing(handoff_bytes=moved)
    return Answer((first_ms * MS, second_ms * MS), 30.0, timing)


def _round(added_ms: int, *, moved: int = 1) -> Round:
    stages = dict.fromkeys(second_token.STAGES, 1.5)
    return Round(_answer(100, 140 + added_ms, moved=moved), _answer(100, 140), stages)


def test_the_bar_grows_with_the_prompt() -> None:
    assert bar_ms(512) == pytest.approx(7.024)
    assert bar_ms(2048) == pytest.approx(10.096)


def test_the_median_of_the_pairs_is_held_against_the_bar() -> None:
    rounds = {512: [_round(5), _round(50), _round(-20)], 2048: [_round(11)] * 3}
    result = result_of(rounds)
    assert [(bar.value, bar.is_met) for bar in result.bars] == [(5, True), (11, False), (0, True)]
    assert result.figures["tokens_512_added_ms"] == 5
    assert result.figures["tokens_512_added_min_ms"] == -20
    assert result.figures["tokens_512_added_max_ms"] == 50
    assert result.figures["tokens_2048_second_token_ms"] == 51
    assert result.reference["tokens_2048_one_worker_second_token_ms"] == 40
    assert result.figures["tokens_512_after_prefill_kv_complete_ms"] == 1.5
    assert result.exit_code == 1


def test_requests_that_moved_nothing_fail_the_run() -> None:
    result = result_of({512: [_round(1), _round(1, moved=0)]})
    assert result.exit_code == 1


def test_stages_are_counted_from_the_end_of_the_prefill() -> None:
    spans = {
        "isthmus.prefill": (10 * MS, 95 * MS),
        "isthmus.handoff": (50 * MS, 97 * MS),
        "isthmus.decode.queue": (97 * MS, 98 * MS),
        "isthmus.decode": (98 * MS, 300 * MS),
    }
    assert stages_of(_answer(101, 130), spans) == {
        "first_token_out": 6.0,
        "kv_complete": 2.0,
        "decode_starts": 3.0,
        "second_token_out": 35.0,
    }


def test_spans_of_another_request_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_token, "SPANS_WITHIN_S", 0.0)
    names = ("isthmus.prefill", "isthmus.handoff", "isthmus.decode.queue", "isthmus.decode")
    trace_file = tmp_path / "spans.jsonl"
    lines = [
        json.dumps({"trace_id": "b", "name": name, "start_ns": 1, "end_ns": 2}) for name in names
    ]
    trace_file.write_text("\n".join(lines) + '\n{"trace_id": "b", "name": "half')
    assert read_spans(trace_file, "b") == dict.fromkeys(names, (1, 2))
    with pytest.raises(BenchFailed, match=r"isthmus\.prefill"):
        read_spans(trace_file, "c")
