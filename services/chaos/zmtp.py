"""Finds the messages in a plaintext ZMTP 3 stream, so that a proxy can treat one as a whole."""

from __future__ import annotations

from dataclasses import dataclass

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes that travel together: some of the greeting, a command, or all frames of a message."""

    data: bytes
    is_message: bool


class MessageSplitter:
    """One direction of one connection. What is not ZMTP passes through as it comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # end of the frames of the current message that are complete
        self._greeting_left = _GREETING_BYTES
        self._is_lost = False

    def feed(self, data: bytes) -> list[Unit]:
        """Return the units that are complete with these bytes."""
        self._buffer += data
        units: list[Unit] = []
        while not self._is_lost:
            unit = self._next()
            if unit is None:
                break
            units.append(unit)
        if self._is_lost and self._buffer:
            units.append(self._take(len(self._buffer), is_message=False))
        return units

    def _next(self) -> Unit | None:
        if self._greeting_left:
            # Never held back: each side waits for the other's first bytes before it goes on.
            size = min(self._greeting_left, len(self._buffer))
            self._greeting_left -= size
            return self._take(size, is_message=False) if size else None
        while True:
            header = self._frame()
            if header is None:
                return None
            flags, end = header
            if end > _MAX_MESSAGE_BYTES or flags & ~(_MORE | _LONG | _COMMAND):
                self._is_lost = True
                return None
            if len(self._buffer) < end:
                return None
            self._at = end
            if not flags & _MORE:
                return self._take(end, is_message=not flags & _COMMAND)

    def _frame(self) -> tuple[int, int] | None:
        """Flags and end of the frame that begins at `_at`; None if its head is not here yet."""
        buffer, at = self._buffer, self._at
        if len(buffer) < at + 1:
            return None
        flags = buffer[at]
        head = 9 if flags & _LONG else 2
        if len(buffer) < at + head:
            return None
        return flags, at + head + int.from_bytes(buffer[at + 1 : at + head], "big")

    def _take(self, size: int, *, is_message: bool) -> Unit:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._at = 0
        return Unit(data, is_message)
