"""Plane attach, decode side: which receives may read their blocks in the peer's pool, and which do.

The pool is mapped as on memfd. What differs: full blocks are verified where they are instead of
being copied, and the transfer stays open, its lease renewed, until the engine has let go of them.
"""

from __future__ import annotations

from dataclasses import replace

from services.kv.attached import AttachedKv, PoolBases
from services.kv.form import EXACT
from services.telemetry.logs import get_logger
from services.transfer.config import TransferConfig
from services.transfer.counters import SinkCounters
from services.transfer.handshake import LocalEnd
from services.transfer.receive import Receive

log = get_logger(__name__)


class Attachments:
    """Receives whose blocks are read in place; belongs to the sink's thread."""

    def __init__(
        self, bases: PoolBases | None, config: TransferConfig, counters: SinkCounters
    ) -> None:
        self._bases = bases
        self._counters = counters
        self._verifies_moves = config.digest_sampling == 1
        self._by_key: dict[str, Receive] = {}  # bounded by the engine's open work items

    def end_of(self, end: LocalEnd) -> LocalEnd:
        """Return what HELLO says of us: only an engine that can read in place offers to."""
        if self._bases is not None:
            return end
        return replace(end, planes=tuple(plane for plane in end.planes if plane != "attach"))

    def prepare(self, receive: Receive) -> None:
        """Give the peer's pool a number before anything is attached, or have it copied."""
        self._drop(receive)
        if receive.plane != "attach":
            return
        why = self._why_not(receive)
        if not why:
            return
        receive.plane = "memfd"
        self._counters.attach_refused += 1
        log.warning(
            "transfer.plane_fallback", peer=receive.ticket.worker_id, reason=why, plane="memfd"
        )

    def _why_not(self, receive: Receive) -> str:
        """Hold the peer's pool for this receive; return why it cannot be read in place, if so."""
        if self._bases is None or receive.pool is None or receive.conversion is not None:
            return "the pool cannot be read as it is"
        if receive.request.is_shard:
            return "a shard is a part of our blocks"
        if receive.kv_form != EXACT:
            return "the KV is not exact"
        number = self._bases.hold(receive.pool)
        if number is None:
            return "no more pools can be read in place"
        receive.pool_id = number
        return ""

    def begin(self, receive: Receive) -> AttachedKv | None:
        """Note what the engine is about to read in place; None if everything was copied."""
        attached = receive.attached(verifies_moves=self._verifies_moves)
        if attached is not None:
            self._by_key[receive.key] = receive
        return attached

    def end(self, key: str) -> Receive | None:
        """Note that the engine has let go; return the receive if it was reading."""
        return self._by_key.pop(key, None)

    def forget(self, receive: Receive) -> None:
        """Give up the peer's pool: the receive is over."""
        self._drop(receive)

    def _drop(self, receive: Receive) -> None:
        if receive.pool_id and self._bases is not None:
            self._bases.drop(receive.pool_id)
            receive.pool_id = 0
