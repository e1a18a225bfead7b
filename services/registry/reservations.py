"""Work sent to workers that their load reports do not show yet, for all routers. Pure.

What was booked well before a report is in it. Bookings are summed in two epochs, the newer of
which is younger than SETTLE_MS or waits for the next report: no list, whatever the rate.
"""

from __future__ import annotations

import heapq
import struct
from dataclasses import dataclass, field

from services.registry.cost import Booked
from services.registry.owners import Owner

RESERVE_MS = 60_000
SETTLE_MS = 150  # a report so much younger than a booking includes it
SWEEP_RESERVATIONS = 16  # expired ones ended by one decision

_NOTHING = Booked()


@dataclass(slots=True)
class _Account:
    gen: int
    began_ms: float
    newest_ms: float
    in_flight: int = 0
    epoch: int = 0
    prefill: int = 0
    resident: int = 0
    old_prefill: int = 0
    old_resident: int = 0


@dataclass(slots=True)
class _Held:
    owner: Owner
    epoch: int
    prefill: int
    resident: int
    expiry_ms: float
    due_ms: float  # when it is looked at: an expiry it had


@dataclass(slots=True)
class Reservations:
    """Every open reservation of a namespace."""

    reserve_ms: int = RESERVE_MS
    touched: set[int] = field(default_factory=set)  # slots that changed, for who keeps an order
    _accounts: dict[int, _Account] = field(default_factory=dict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _due: list[tuple[float, bytes, str]] = field(default_factory=list)  # a heap; some are void

    def booked(self, owner: Owner) -> Booked:
        """Return what one life of a slot has coming."""
        account = self._accounts.get(owner[0])
        if account is None or account.gen != owner[1]:
            return _NOTHING
        return Booked(
            account.in_flight,
            account.prefill + account.old_prefill,
            account.resident + account.old_resident,
        )

    def reserve(
        self, rid: str, owner: Owner, prefill_tokens: int, resident_tokens: int, now_ms: float
    ) -> None:
        """Book work that is being sent; what the id held ends."""
        self.release(rid)
        slot, gen = owner
        account = self._accounts.get(slot)
        if account is None or account.gen != gen:
            account = self._accounts[slot] = _Account(gen, now_ms, now_ms)
        self.touched.add(slot)
        account.in_flight = min(0xFFFF, account.in_flight + 1)
        account.prefill = min(0xFFFFFFFF, account.prefill + prefill_tokens)
        account.resident = min(0xFFFFFFFF, account.resident + resident_tokens)
        account.newest_ms = now_ms
        until = now_ms + self.reserve_ms
        self._held[rid] = _Held(owner, account.epoch, prefill_tokens, resident_tokens, until, until)
        heapq.heappush(self._due, (until, _order(owner, rid), rid))

    def release(self, rid: str) -> Owner | None:
        """End a reservation; return whose it was, None when it is not known."""
        held = self._held.pop(rid, None)
        if held is None:
            return None
        account = self._accounts.get(held.owner[0])
        if account is None or account.gen != held.owner[1]:
            return held.owner
        self.touched.add(held.owner[0])
        account.in_flight = max(0, account.in_flight - 1)
        if held.epoch == account.epoch:
            account.prefill = max(0, account.prefill - held.prefill)
            account.resident = max(0, account.resident - held.resident)
        elif held.epoch == account.epoch - 1:
            account.old_prefill = max(0, account.old_prefill - held.prefill)
            account.old_resident = max(0, account.old_resident - held.resident)
        return held.owner

    def hold(self, rid: str, now_ms: float) -> None:
        """Extend a reservation whose request still runs."""
        held = self._held.get(rid)
        if held is not None:
            held.expiry_ms = now_ms + self.reserve_ms

    def settle(self, owner: Owner, now_ms: float) -> None:
        """A report of that moment came in: what was booked well before it is in it."""
        account = self._accounts.get(owner[0])
        if account is None or account.gen != owner[1]:
            return
        self.touched.add(owner[0])
        if not abs(now_ms - account.newest_ms) < SETTLE_MS:
            account.epoch += 2
            account.prefill = account.resident = 0
            account.old_prefill = account.old_resident = 0
        elif not abs(now_ms - account.began_ms) < SETTLE_MS:
            account.epoch += 1
            account.old_prefill, account.old_resident = account.prefill, account.resident
            account.prefill = account.resident = 0
        else:
            return
        account.began_ms = now_ms

    def sweep(self, now_ms: float) -> None:
        """End some reservations nobody released."""
        num_ended = 0
        while self._due and self._due[0][0] <= now_ms and num_ended < SWEEP_RESERVATIONS:
            due_ms, order, rid = heapq.heappop(self._due)
            held = self._held.get(rid)
            if held is None or held.due_ms != due_ms:
                continue  # released since, and perhaps reserved anew
            if held.expiry_ms > due_ms:
                held.due_ms = held.expiry_ms
                heapq.heappush(self._due, (held.due_ms, order, rid))
                continue
            del self._held[rid]
            num_ended += 1
            account = self._accounts.get(held.owner[0])
            if account is not None and account.gen == held.owner[1]:
                account.in_flight = max(0, account.in_flight - 1)
                self.touched.add(held.owner[0])

    def clear(self) -> None:
        """Forget everything."""
        self.touched.update(self._accounts)
        self._accounts.clear()
        self._held.clear()
        self._due.clear()

    def __len__(self) -> int:
        """Return the number of open reservations."""
        return len(self._held)


def _order(owner: Owner, rid: str) -> bytes:
    """Return how the store orders reservations that expire at one moment."""
    return struct.pack("<HH", *owner) + rid.encode()
