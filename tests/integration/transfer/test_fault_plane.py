"""Both planes under scripted faults: right bytes or a typed error, everything freed, no hang."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from services.common.errors import ERROR_TABLE
from services.transfer.api import SinkReady, SinkReleased
from services.transfer.config import TransferConfig
from services.transfer.fault_script import FAULT_KINDS, FaultDeck, FaultScript
from tests.support.transfer_ends import (
    BRISK,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
)

pytestmark = pytest.mark.integration

NUM_TRANSFERS = 12
# A peer that spoils frames is not muted here: what happens to the transfers is the question.
BASE = replace(BRISK, max_bad_frames=1_000_000, max_transfer_s=30.0, ticket_ttl_s=4.0)
DEADLINE_S = 45.0  # of a test; a transfer that has not ended by then hangs


@dataclass
class Ends:
    """A prefill and a decode end whose messages and pulls pass through one script."""

    prefill: PrefillEnd
    decode: DecodeEnd
    deck: FaultDeck

    def stop(self) -> None:
        """Stop both."""
        self.decode.stop()
        self.prefill.stop()


def make_ends(tmp_path: Path, plane: str, script: FaultScript) -> Ends:
    deck = FaultDeck(script)
    config: TransferConfig = replace(BASE, planes=("fault", plane), fault_deck=deck)
    return Ends(make_prefill(tmp_path, config, 256), make_decode(config, 256), deck)


def run_load(ends: Ends) -> list[str]:
    """Hand over a dozen prompts, some cancelled; return the outcomes after the accounting."""
    prefill, decode, end = ends.prefill, ends.decode, time.monotonic() + DEADLINE_S
    runs = []
    for i in range(NUM_TRANSFERS):
        key, num_tokens = f"k{i}", 16 * (3 + i % 5) + i % 16
        ticket, offer = prefill.offer_all(key, num_tokens, salt=i)
        runs.append((key, num_tokens, decode.receive(key, ticket, offer)))
    wait_until(lambda: decode.sink.planes() or len(decode.events.all) == NUM_TRANSFERS)
    for key in ("k4", "k9"):
        decode.sink.cancel(key, "client left")
    outcomes = []
    for key, num_tokens, blocks in runs:
        event = decode.events.wait(key, max(0.1, end - time.monotonic()))
        if isinstance(event, SinkReady):
            assert same_content(prefill, key, decode, blocks, num_tokens % 16)
            assert [first.token_id for first in event.final.first] == [42, 43]
        else:
            assert isinstance(event, SinkReleased)
            assert event.code in ERROR_TABLE
            assert event.message
        outcomes.append(outcome(event))
    for key, _, _ in runs:
        prefill.events.wait(key, max(0.1, end - time.monotonic()))
    assert_nothing_left(ends, [key for key, _, _ in runs])
    return outcomes


def assert_nothing_left(ends: Ends, keys: list[str]) -> None:
    """Every offer and receive ended once, and both sides know of none."""
    wait_until(lambda: ends.prefill.source.num_open() == ends.decode.sink.num_open() == 0)
    for key in keys:
        assert len(ends.prefill.events.of(key)) == len(ends.decode.events.of(key)) == 1
    assert ends.prefill.source.is_alive()
    assert ends.decode.sink.is_alive()


@pytest.mark.parametrize("plane", ["memfd", "nccl", "zmq"])
@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_each_fault_alone_ends_in_right_bytes_or_a_typed_error(
    tmp_path: Path, plane: str, kind: str
) -> None:
    """RB-025, RB-029, RB-098: one kind of fault on many messages; the load gets through anyway."""
    share = 0.02 if kind == "disconnect" else 0.1
    if (plane, kind) == ("nccl", "stall"):
        share = 0.04  # every batch is announced and agreed on: two more messages to be stuck
    ends = make_ends(tmp_path, plane, FaultScript(11, share, (kind,), skip=2))
    try:
        outcomes = run_load(ends)
        assert ends.deck.drawn()[kind] > 0
        # Nothing was lost: nothing fails, but for a group, which has nothing but its order.
        harmless = {"duplicate", "delay", "reorder", "stall"}
        if kind in harmless and (plane, kind) != ("nccl", "reorder"):
            assert outcomes.count("ready") >= NUM_TRANSFERS - 2
        assert ends.prefill.source.counters.bad_frames == 0 or kind in (
            "corrupt_header", "corrupt_body", "corrupt_payload", "truncate"
        )  # fmt: skip
    finally:
        ends.stop()


@pytest.mark.parametrize("plane", ["memfd", "nccl", "zmq"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_faults_together_leave_nothing_behind(tmp_path: Path, plane: str, seed: int) -> None:
    """RB-009, RB-011, RB-025: whatever comes together, the accounting is exact."""
    ends = make_ends(tmp_path, plane, FaultScript(seed, 0.06, skip=1))
    try:
        run_load(ends)
        assert sum(ends.deck.drawn().values()) > 0
    finally:
        ends.stop()


def test_corrupt_payload_is_caught_by_the_digests_alone(tmp_path: Path) -> None:
    """RB-025: the header's checksum is right, only the blocks are not."""
    for plane in ("memfd", "zmq"):
        ends = make_ends(tmp_path, plane, FaultScript(5, 0.5, ("corrupt_payload",), skip=4))
        try:
            run_load(ends)
            assert ends.decode.sink.counters.integrity_errors > 0
        finally:
            ends.stop()


def test_a_connection_that_only_loses_everything_fails_in_time(tmp_path: Path) -> None:
    """RB-009: no answer ever comes; both sides let go by their own clocks."""
    ends = make_ends(tmp_path, "zmq", FaultScript(1, 1.0, ("drop",)))
    try:
        ticket, offer = ends.prefill.offer_all("k", 100)
        ends.decode.receive("k", ticket, offer)
        started = time.monotonic()
        failed = ends.decode.events.wait("k", BASE.connect_timeout_s + 5)
        assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
        assert ends.prefill.events.wait("k", BASE.ticket_ttl_s + 5).outcome == "expired"
        assert time.monotonic() - started < BASE.ticket_ttl_s + 5
        assert_nothing_left(ends, ["k"])
    finally:
        ends.stop()
