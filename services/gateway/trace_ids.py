"""Which trace a running request belongs to, for the log line its front door writes."""

from __future__ import annotations

from collections import OrderedDict

_MAX_IDS = 8192


class TraceIds:
    """Bounded map from request id to trace id; the oldest is forgotten first.

    Entries are taken out when their request is logged. A request that outlives its client
    (an idempotency key holds it) leaves one behind: for those there is the bound.
    """

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        self._max_ids = max_ids
        self._ids: OrderedDict[str, str] = OrderedDict()

    def put(self, request_id: str, trace_id: str) -> None:
        """Remember a request's trace; nothing is kept of one that is not traced."""
        if not trace_id:
            return
        self._ids[request_id] = trace_id
        while len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)

    def take(self, request_id: str) -> str:
        """Give the trace and forget it; empty for a request that is not traced."""
        return self._ids.pop(request_id, "")
