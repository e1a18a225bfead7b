"""What this router has sent to each worker and not yet seen in its load reports. Pure.

A report shows work that arrived before it was written, so a booking counts until a report
comes that is safely younger. All totals return to exactly zero when all bookings are released.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.common.ids import WorkerId
from services.registry.cost import Booked
from services.registry.reservations import SETTLE_MS

SETTLE_S = SETTLE_MS / 1000


@dataclass(slots=True, eq=False)
class Booking:
    """Work of one leg at one worker; made by `Bookings.book` and released once."""

    worker_id: WorkerId
    booked_at: float
    prefill_tokens: int
    resident_tokens: int
    is_settled: bool = False
    is_released: bool = False


@dataclass(slots=True)
class _Totals:
    in_flight: int = 0
    prefill_tokens: int = 0
    resident_tokens: int = 0


class Bookings:
    """All bookings of one router."""

    def __init__(self) -> None:
        self._totals: dict[WorkerId, _Totals] = {}
        self._unsettled: dict[WorkerId, deque[Booking]] = {}
        self._booked: dict[WorkerId, Booked] = {}  # of totals that have not changed since

    def book(
        self, worker_id: WorkerId, prefill_tokens: int, resident_tokens: int, now: float
    ) -> Booking:
        """Count work from the moment it is sent: choosing and booking are one step."""
        booking = Booking(worker_id, now, prefill_tokens, resident_tokens)
        totals = self._totals.setdefault(worker_id, _Totals())
        self._booked.pop(worker_id, None)
        totals.in_flight += 1
        totals.prefill_tokens += prefill_tokens
        totals.resident_tokens += resident_tokens
        self._unsettled.setdefault(worker_id, deque()).append(booking)
        return booking

    def release(self, booking: Booking) -> None:
        """End a booking; idempotent, since every path out of a leg releases it."""
        if booking.is_released:
            return
        booking.is_released = True
        totals = self._totals[booking.worker_id]
        self._booked.pop(booking.worker_id, None)
        totals.in_flight -= 1
        self._settle(booking)
        if totals.in_flight == 0:
            # Nothing of this worker is open, so nothing unsettled is either.
            del self._totals[booking.worker_id]
            self._unsettled.pop(booking.worker_id, None)

    def load_reported(self, worker_id: WorkerId, reported_at: float) -> None:
        """A report of that time came in: it shows what was booked well before it."""
        waiting = self._unsettled.get(worker_id)
        while waiting and waiting[0].booked_at <= reported_at - SETTLE_S:
            self._settle(waiting.popleft())

    def booked(self) -> dict[WorkerId, Booked]:
        """Return the totals per worker with open bookings."""
        if len(self._booked) != len(self._totals):
            for worker_id, t in self._totals.items():
                if worker_id not in self._booked:
                    booked = Booked(t.in_flight, t.prefill_tokens, t.resident_tokens)
                    self._booked[worker_id] = booked
        return dict(self._booked)

    def check_integrity(self) -> None:
        """Raise AssertionError when totals do not match the unsettled bookings."""
        assert self._booked.keys() <= self._totals.keys()
        for worker_id, totals in self._totals.items():
            open_ones = [b for b in self._unsettled.get(worker_id, ()) if not b.is_settled]
            assert totals.in_flight > 0
            told = self._booked.get(worker_id)
            now = Booked(totals.in_flight, totals.prefill_tokens, totals.resident_tokens)
            assert told is None or told == now
            assert totals.prefill_tokens == sum(b.prefill_tokens for b in open_ones)
            assert totals.resident_tokens == sum(b.resident_tokens for b in open_ones)

    def _settle(self, booking: Booking) -> None:
        if booking.is_settled:
            return
        booking.is_settled = True
        self._booked.pop(booking.worker_id, None)
        totals = self._totals[booking.worker_id]
        totals.prefill_tokens -= booking.prefill_tokens
        totals.resident_tokens -= booking.resident_tokens
