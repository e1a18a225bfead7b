"""The short way of a plain answer's tokens from a worker's frame to its client.

Most tokens of most answers are the next one, a whole text, and nothing hangs on them. Going from
layer to layer cost such a token more than all the rest. A lane does what they would have done, and
sends back whatever it is not made for.
"""

from __future__ import annotations

from services.common.ids import WorkerId
from services.router.api import OutputSink, TextWriter
from services.router.legs import Leg
from services.router.request import PlainChoice
from services.router.timing import Marks

_NOTED_AT_ONCE = 32  # tokens: what is told of them is that much behind


class Lane:
    """Takes tokens of one leg of one request while nothing else happens to it.

    Opened after a token that went the long way, and closed before anything but tokens is handled:
    so no choice ends, no leg changes and nothing waits in the buffer while there is one.
    """

    __slots__ = ("_leg", "_marks", "_plain", "_sink", "_times", "_write")

    def __init__(
        self, leg: Leg, plain: PlainChoice, marks: Marks, sink: OutputSink, write: TextWriter
    ) -> None:
        self._leg = leg
        self._plain = plain
        self._marks = marks
        self._sink = sink
        self._write = write
        self._times: list[float] = []  # of tokens that nobody was told of

    def take(
        self, worker_id: WorkerId, attempt: int, index: int, token_id: int, now: float
    ) -> bool:
        """Write a token; False when it has to go the long way, and nothing was done."""
        leg, plain = self._leg, self._plain
        if leg.attempt != attempt or leg.worker_id != worker_id or not leg.is_open:
            return False
        if index != len(plain.token_ids) or index >= plain.end_index:
            return False
        text = plain.text_of(token_id)
        # No text: a special token, or one that begins or ends within a character.
        if not text or not self._write(text):
            return False
        plain.token_ids.append(token_id)
        times = self._times
        times.append(now)
        if len(times) >= _NOTED_AT_ONCE:
            self._note()
        return True

    def close(self) -> None:
        """Bring everybody up to date; not to be used again."""
        self._leg.note_tokens(0, len(self._plain.token_ids))
        self._note()

    def _note(self) -> None:
        if self._times:
            self._marks.newest_token = self._times[-1]
            self._sink.note(self._times)
            self._times = []
