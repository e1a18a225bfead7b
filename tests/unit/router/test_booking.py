from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import WorkerId
from services.registry.cost import Booked
from services.router.booking import SETTLE_S, Booking, Bookings

W = [WorkerId("a"), WorkerId("b")]


def test_counts_until_a_report_is_safely_younger() -> None:
    bookings = Bookings()
    booking = bookings.book(W[0], 100, 50, now=10.0)
    assert bookings.booked() == {W[0]: Booked(1, 100, 50)}
    bookings.load_reported(W[0], 10.0 + SETTLE_S / 2)
    assert bookings.booked() == {W[0]: Booked(1, 100, 50)}
    bookings.load_reported(W[0], 10.0 + SETTLE_S)
    assert bookings.booked() == {W[0]: Booked(1, 0, 0)}
    bookings.release(booking)
    bookings.release(booking)
    assert bookings.booked() == {}


Steps = st.lists(
    st.tuples(st.sampled_from(["book", "release", "report"]), st.integers(0, 1),
              st.integers(0, 50), st.floats(0, 0.3)),
    max_size=120,
)  # fmt: skip


@settings(max_examples=150)
@given(Steps)
def test_totals_are_exact_and_end_at_zero(steps: list[tuple[str, int, int, float]]) -> None:
    """RB-059, I5: whatever the order of bookings, releases (also twice) and reports."""
    bookings, made, now = Bookings(), list[Booking](), 0.0
    for action, who, number, delay in steps:
        now += delay
        if action == "book":
            made.append(bookings.book(W[who], number, number * 2, now))
        elif action == "release" and made:
            bookings.release(made[number % len(made)])
        else:
            bookings.load_reported(W[who], now)
        bookings.check_integrity()
        open_ones = [b for b in made if not b.is_released]
        assert sum(b.in_flight for b in bookings.booked().values()) == len(open_ones)
    for booking in made:
        bookings.release(booking)
    assert bookings.booked() == {}
