"""The one way a request takes from either door to the router and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from services.common.clock import Clock
from services.common.errors import IsthmusError, RequestError
from services.common.ids import new_request_id
from services.gateway.accounting import Accounting
from services.gateway.config import GatewayConfig
from services.gateway.errors import cut_off_error, internal_error, is_own_cancel
from services.gateway.idempotency import IdempotencyTable
from services.gateway.mirror import Mirror
from services.gateway.prepare import Preparer
from services.gateway.shared_run import SharedRun
from services.gateway.spec import GenerateSpec
from services.gateway.validate import Arrival, deadline_of
from services.router.api import GenerateCall, OutputSink, RouterOutput, RouterPort, WriteOutputs
from services.router.output_sink import TappedSink
from services.telemetry.logs import get_logger

log = get_logger(__name__)

# The router ends a request at its deadline; the doors only step in if it does not.
DEADLINE_GRACE_S = 1.0


class FrontDesk:
    """Runs requests, joins repeated ones, knows whether it is open, counts what is inside."""

    def __init__(
        self,
        router: RouterPort,
        preparer: Preparer,
        config: GatewayConfig,
        clock: Clock,
        accounting: Accounting,
    ) -> None:
        self.preparer = preparer
        self.config = config
        self.clock = clock
        self.accounting = accounting
        self._router = router
        self._table: IdempotencyTable[SharedRun] = IdempotencyTable(
            config.max_idempotency_keys, config.max_kept_outputs, config.idempotency_ttl_s
        )
        self._shared: set[SharedRun] = set()  # running
        self._mirror = Mirror(router, config.max_mirrors, config.note_mirrored)
        self._num_open = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests inside now."""
        return self._num_open

    def is_ready(self) -> tuple[bool, str]:
        """Whether new requests would be served, and why not."""
        if self._is_draining:
            return False, "draining"
        fault = self.accounting.fault()
        return (False, fault) if fault else self._router.is_ready()

    @property
    def is_degraded(self) -> bool:
        """Whether requests are served, but routed without the store."""
        return self._router.is_degraded[0]

    def time_left_s(self, spec: GenerateSpec, arrival: Arrival) -> float:
        """Give how long a door may spend on a request before it gives it up."""
        deadline = deadline_of(spec.timeout_ms, arrival, self.config.limits)
        return max(0.0, deadline - self.clock.now() + DEADLINE_GRACE_S)

    async def generate(
        self,
        spec: GenerateSpec,
        arrival: Arrival,
        write: WriteOutputs,
        key: str = "",
        fingerprint: bytes = b"",
        sink: OutputSink | None = None,
    ) -> None:
        """Run a request, or join the one of the same idempotency key. Raises IsthmusError.

        A sink is used where the caller is the only reader: it has no key.
        """
        if self._is_draining:
            raise RequestError("draining", "the server is shutting down", retry_after_ms=1000)
        # Before anything is made whose size the request decides.
        self.preparer.check(spec)
        if not key:
            await self._run(spec, arrival, sink, write)
            return
        claim = self._table.claim(arrival.tenant, key, fingerprint, self.clock.now())
        if claim.reason == "forgotten":
            raise RequestError(
                "duplicate_request",
                "a request with this idempotency key has finished; its answer is no longer kept",
            )
        if claim.run is not None:
            await claim.run.read(write)
            return
        run = SharedRun(
            partial(self._run, spec, arrival, None),
            lambda done: self._run_done(arrival.tenant, key, done),
            self.config.orphan_grace_s,
        )
        self._table.start(arrival.tenant, key, fingerprint, run)
        self._shared.add(run)
        await run.read(write)

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is inside; give False if some still are after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel the runs nobody may be reading."""
        await self._mirror.close()
        for run in tuple(self._shared):
            await run.close()

    async def _run(
        self,
        spec: GenerateSpec,
        arrival: Arrival,
        sink: OutputSink | None,
        write: WriteOutputs,
    ) -> None:
        self._num_open += 1
        self._idle.clear()
        has_ended = False
        try:
            call = await self.preparer.call(spec, arrival)
            with self.accounting.billed(arrival.tenant, len(call.token_ids)) as bill:
                if sink is not None:
                    call = replace(call, sink=TappedSink(sink, bill))

                async def note_and_write(outputs: Sequence[RouterOutput]) -> None:
                    for output in outputs:
                        bill.note(output)
                    await write(outputs)

                await self._router.generate(call, note_and_write)
                has_ended = bill.end is not None
        except IsthmusError:
            raise
        except asyncio.CancelledError:
            if is_own_cancel():
                raise
            # Some task under us was cancelled, not us: the client still waits for an answer.
            log.exception("gateway.request_cut_off", request_id=arrival.request_id)
            raise cut_off_error() from None
        except Exception:  # outermost for one request: log, answer, let the others go on
            log.exception("gateway.request_failed", request_id=arrival.request_id)
            raise internal_error(arrival.request_id) from None
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()
            if has_ended:
                self._offer_copy(spec, arrival)

    def _offer_copy(self, spec: GenerateSpec, arrival: Arrival) -> None:
        """Have a request that is over answered once more, where a rule says so."""
        mirrored = self.preparer.mirrored(spec, arrival)
        if mirrored is None:
            return
        # It is nobody's: billed to none, in no hurry, with no target to meet.
        copy = replace(mirrored, priority=0, slo_ttft_ms=0, slo_tpot_ms=0, force_mode=None)
        nobody = replace(
            arrival,
            request_id=new_request_id(),
            received_at=self.clock.now(),
            tenant="",
            traceparent="",
            time_left_s=None,
        )

        async def prepare() -> GenerateCall:
            self.preparer.check(copy)
            return await self.preparer.call(copy, nobody)

        self._mirror.offer(prepare)

    def _run_done(self, tenant: str, key: str, run: SharedRun) -> None:
        self._shared.discard(run)
        error = run.error
        if error is not None and (error.spec.retryable or error.spec.code in _NOT_KEPT):
            self._table.drop(tenant, key)
        else:
            self._table.finish(tenant, key, len(run.outputs), self.clock.now())


# Ends that say nothing about the request itself: the same key may try again.
_NOT_KEPT = frozenset({"cancelled", "internal", "slow_reader", "deadline_exceeded"})
