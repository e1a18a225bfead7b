"""Records of a load as tests need them: a queue worked off exactly, or one request by its times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from loadtest.records import Chunk, RequestRecord, Status


def make_record(
    number: int = 0,
    due_s: float = 0.0,
    ttft_s: float | None = 0.1,
    itl_s: float = 0.01,
    osl: int = 11,
    sent_s: float | None = None,
    **more: Any,
) -> RequestRecord:
    """One answered request; with `ttft_s` None one that is open at the end of the run."""
    record = RequestRecord(
        number=number, scheduled_s=due_s, sent_s=due_s if sent_s is None else sent_s, isl=100
    )
    if ttft_s is not None:
        record.chunks = [Chunk(due_s + ttft_s + n * itl_s, 1) for n in range(osl)]
        record.done_s = record.chunks[-1].at_s
        record.osl = record.num_heard = osl
        record.status = Status.OK
    for name, value in more.items():
        setattr(record, name, value)
    return record


def first_come_first_served(
    due_s: Iterable[float], service_s: float, num_servers: int
) -> Iterator[RequestRecord]:
    """Requests of a queue with equal service times and several servers, one token each."""
    free_s = [0.0] * num_servers
    for number, at_s in enumerate(due_s):
        server = number % num_servers  # equal service: they become free in turn
        free_s[server] = max(free_s[server], at_s) + service_s
        yield make_record(number, at_s, ttft_s=free_s[server] - at_s, osl=1)
