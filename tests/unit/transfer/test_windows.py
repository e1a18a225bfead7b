"""Credit windows, turns of DATA, and the tables of peers: all bounded, none starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.transfer.credit import CreditRound
from services.transfer.data_pump import DataPump
from services.transfer.peer_table import Mutes, PeerTable

BLOCK = 100


def _round(window_bytes: int = 1_000, budget_bytes: int = 5_000) -> CreditRound:
    return CreditRound(BLOCK, window_bytes, budget_bytes, chunk_bytes=300)


def test_grants_whole_blocks_up_to_the_window() -> None:
    round_ = _round()
    assert round_.grant("p", 250) == 200
    assert round_.grant("p", 5_000) == 800
    assert round_.grant("p", 5_000) == 0
    assert round_.grant("q", 5_000) == 1_000


def test_small_grants_wait_until_they_are_worth_a_message() -> None:
    round_ = _round()
    round_.used["p"] = 900
    assert round_.grant("p", 5_000) == 0
    assert round_.grant("p", 100) == 100  # all that is wanted


def test_a_block_larger_than_the_window_goes_alone() -> None:
    round_ = _round(window_bytes=50)
    assert round_.grant("p", 300) == BLOCK
    assert round_.grant("p", 300) == 0


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 3_000)), max_size=40))
def test_windows_are_never_exceeded(wishes: list[tuple[str, int]]) -> None:
    round_ = _round(budget_bytes=1_500)
    for peer, wanted in wishes:
        size = round_.grant(peer, wanted)
        assert size % BLOCK == 0
    assert all(used <= 1_000 for used in round_.used.values())
    # A peer with nothing under way always gets one block, so that it cannot starve.
    assert sum(round_.used.values()) <= 1_500 + 2 * BLOCK


class _Sent:
    def __init__(self) -> None:
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over


def test_transfers_of_a_peer_take_turns_and_flights_are_bounded() -> None:
    pump, left, order, sent = DataPump(2), {1: 3, 2: 3}, list[int](), list[_Sent]()

    def send_one(xfer_id: int) -> bool:
        if not left[xfer_id]:
            return False
        left[xfer_id] -= 1
        order.append(xfer_id)
        sent.append(_Sent())
        pump.flying(b"p", xfer_id, sent[-1])  # type: ignore[arg-type]  # the one method is there
        return True

    pump.wants(b"p", 1)
    pump.wants(b"p", 2)
    pump.run(send_one)
    assert order == [1, 2]
    assert pump.landed() == []
    sent[0].is_over = True
    assert pump.landed() == [1]
    for _ in range(6):
        pump.run(send_one)
        for flight in sent:
            flight.is_over = True
        pump.landed()
    assert order == [1, 2, 1, 2, 1, 2]
    assert not pump.is_flying


def test_a_full_connection_does_not_spin() -> None:
    pump, calls = DataPump(2), list[int]()

    def cannot_send(xfer_id: int) -> bool:
        calls.append(xfer_id)
        return True

    pump.wants(b"p", 1)
    pump.run(cannot_send)
    assert 1 <= len(calls) <= 3


def test_peer_table_makes_room_from_idle_peers_only() -> None:
    table = PeerTable(2)
    assert table.admit(b"a", "zmq", set(), 1.0)
    assert table.admit(b"b", "zmq", set(), 2.0)
    table.heard(b"a", 3.0)
    assert table.admit(b"c", "zmq", {b"a"}, 4.0)
    assert table.get(b"b") is None
    assert not table.admit(b"d", "zmq", {b"a", b"c"}, 5.0)
    assert table.admit(b"a", "memfd", {b"a", b"c"}, 6.0)  # again, after a reconnect


def test_mutes_count_and_end() -> None:
    mutes = Mutes(3)
    assert [mutes.add(b"r", 0.0) for _ in range(4)] == [False, False, True, False]
    assert mutes.is_muted(b"r", 59.0)
    assert not mutes.is_muted(b"s", 0.0)
    assert not mutes.is_muted(b"r", 61.0)
    for i in range(3_000):
        mutes.add(str(i).encode(), 0.0)
    assert len(mutes._counts) <= 1_024
