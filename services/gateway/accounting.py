"""What is owed to whoever pays and whoever asks later: limits, usage, the audit log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from services.common.clock import Clock
from services.common.errors import IsthmusError, RequestError
from services.gateway.hooks import GatewayHooks, RequestRecord
from services.gateway.metering import Bill
from services.gateway.namespaces import Namespaces, random_secret
from services.gateway.rate_limits import LimitShare, RateLimits
from services.gateway.usage import UsageBook
from services.resilience.tenant_limiter import Verdict
from services.resilience.token_bucket import TokenBucket
from services.telemetry.audit import AuditLog

_AUDIT_CLOSE_S = 3.0
# How requests end that the router did not let in: their clients come again, and pay then.
_NOT_BEGUN = frozenset({"overloaded", "no_workers", "draining"})
# Whoever has no key must not be able to fill the disk.
_REFUSALS_PER_S, _REFUSALS_BURST = 10.0, 100.0


@dataclass(slots=True)
class Accounting:
    """Everything of one router process that keeps accounts. Belongs to the event loop."""

    rates: RateLimits
    book: UsageBook
    audit: AuditLog | None = None
    must_audit: bool = True  # refuse what could not be logged
    store: LimitShare | None = None  # None = limits are of this router alone
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    def none(cls, clock: Clock) -> Accounting:
        """Keep no accounts."""
        return cls(RateLimits(None, Namespaces(random_secret()), clock), UsageBook(None, ""))

    def fault(self) -> str:
        """Why nothing can be let in now, empty if it can."""
        if self.audit is not None and self.must_audit and self.audit.is_blocked:
            return "the audit log cannot be written"
        return ""

    def admitted(self, tenant: str) -> AbstractContextManager[Verdict]:
        """Let a request in for as long as the context lasts; raises RequestError, here or there."""
        fault = self.fault()
        if fault:
            raise RequestError("audit_unavailable", fault, retry_after_ms=1000)
        return self.rates.admitted(tenant)

    @contextlib.contextmanager
    def billed(self, tenant: str, prompt_tokens: int) -> Iterator[Bill]:
        """Account for one run of a request."""
        bill = Bill(tenant, prompt_tokens, self.rates, self.book)
        bill.open()
        try:
            yield bill
        except IsthmusError as error:
            if error.spec.code in _NOT_BEGUN:
                bill.refused()
            raise
        finally:
            bill.close()

    def start(self) -> None:
        """Begin to share and to write."""
        if self.audit is not None:
            self.audit.start()
            self.audit.write("router.started")
        if self.store is not None:
            self._tasks.append(asyncio.create_task(self.rates.share_forever(self.store)))
        self._tasks.append(asyncio.create_task(self.book.flush_forever()))

    async def stop(self) -> None:
        """Write what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self.book.close()
        if self.audit is not None:
            self.audit.write("router.stopped")
            await asyncio.to_thread(self.audit.close, _AUDIT_CLOSE_S)


class AuditHooks:
    """GatewayHooks that also write every finished request into the audit log."""

    def __init__(self, inner: GatewayHooks, audit: AuditLog, clock: Clock) -> None:
        self._inner = inner
        self._audit = audit
        self._clock = clock
        self._refusals = TokenBucket(_REFUSALS_PER_S, _REFUSALS_BURST, clock.now())
        self._num_unlogged = 0

    def request_finished(self, record: RequestRecord) -> None:
        """Write who asked for what and how it ended; no text of it."""
        self._inner.request_finished(record)
        if record.is_probe:
            return
        if record.code == "unauthenticated" and not self._may_log_refusal():
            return
        end = record.end
        self._audit.write(
            "request",
            door=record.door,
            route=record.route,
            code=record.code,
            tenant=record.tenant,
            key_id=record.key_id,
            peer=record.peer,
            request_id=record.request_id,
            prompt_tokens=0 if end is None else end.prompt_tokens,
            completion_tokens=0 if end is None else end.completion_tokens,
        )

    def render_metrics(self) -> tuple[str, bytes]:
        """Give the content type and body of /metrics."""
        return self._inner.render_metrics()

    def _may_log_refusal(self) -> bool:
        now = self._clock.now()
        if self._refusals.wait_s(1, now):
            self._num_unlogged += 1
            return False
        self._refusals.charge(1, now)
        if self._num_unlogged:
            self._audit.write("request.refusals_left_out", num_events=self._num_unlogged)
            self._num_unlogged = 0
        return True
