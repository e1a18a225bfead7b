from __future__ import annotations

import json

from services.common.log_histogram import MAX_BUCKET, LogHistogram
from services.registry.scaling import MAX_WORD_BYTES
from services.router.signals import MAX_WORKERS, RouterSignals, Waits

NOTHING_WAITS = Waits()


def word_of(
    signals: RouterSignals, waits: Waits = NOTHING_WAITS, now: float = 10.0
) -> dict[str, object]:
    body: dict[str, object] = json.loads(signals.word(0xAB, waits, now))
    return body


def test_word_has_the_sums_of_what_was_counted() -> None:
    signals = RouterSignals(last_request_at=0.0)
    signals.arrived(100, now=1.0)
    signals.arrived(50, now=4.0)
    signals.first_token("prefill-0", 0.2)
    signals.gaps([0.03] * 8)
    signals.ended(100, 60)
    word = word_of(signals)
    assert (word["requests"], word["prompt"], word["output"]) == (2, 150, 9)
    assert (word["ended_prompt"], word["ended_cached"], word["life"]) == (100, 60, "ab")
    assert word["ttft"] == {"prefill-0": {str(bucket): 1 for bucket in _counts(0.2)}}
    assert word["itl"] == {str(bucket): 2 for bucket in _counts(0.03)}  # one gap of four


def test_router_with_an_open_request_is_not_idle() -> None:
    signals = RouterSignals(last_request_at=0.0)
    signals.arrived(1, now=4.0)
    assert word_of(signals, now=10.0)["idle_s"] == 6.0
    assert word_of(signals, Waits(num_open=1), now=10.0)["idle_s"] == 0.0


def test_first_tokens_of_more_workers_than_are_told_forget_the_least_used() -> None:
    signals = RouterSignals(last_request_at=0.0)
    for number in range(MAX_WORKERS):
        signals.first_token(f"w{number}", 0.1)
    signals.first_token("w0", 0.1)
    signals.first_token("another", 0.1)
    ttft = word_of(signals)["ttft"]
    assert isinstance(ttft, dict)
    assert len(ttft) == MAX_WORKERS
    assert "w1" not in ttft
    assert {"w0", "another"} <= ttft.keys()


def _counts(seconds: float) -> list[int]:
    histogram = LogHistogram()
    histogram.add((seconds,))
    return list(histogram.counts)


def test_longest_word_is_one_that_is_read() -> None:
    """Else the autoscaler would be blind to a router of many workers that has run for long."""
    signals = RouterSignals(last_request_at=0.0)
    for index in range(MAX_WORKERS + 1):
        signals.first_token(f"prefill-{index:012}", 0.1)
    every = dict.fromkeys(range(MAX_BUCKET + 1), 10**8 - 1)
    for seen in signals._ttft.values():
        seen.counts.update(every)
    assert len(signals._ttft) == MAX_WORKERS
    assert len(signals.word(1 << 62, Waits(), 0.0)) <= MAX_WORD_BYTES
