"""The router's knowledge of its cluster, kept fresh: store polling, Links, hints, breakers.

The store may be down, slow, frozen or empty: workers that are linked stay usable, requests are
routed without hints, and everything heals when it answers again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.ids import WorkerId
from services.common.model_manifest import ModelManifest
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import WorkerRecord
from services.registry.reader import RegistryReader
from services.resilience.breaker import BreakerConfig, BreakerState, CircuitBreaker, Outcome
from services.router.api import RequestTiming
from services.router.booking import Bookings
from services.router.config import RouterConfig
from services.router.hooks import RouterHooks
from services.router.link import LinkEvents, WorkerLink
from services.router.pair_book import PairBook
from services.router.policy import REMOTE, Links
from services.router.route_desk import RouteDesk
from services.router.view import (
    LIVE,
    SUSPECT,
    ClusterView,
    LinkStatus,
    ViewInputs,
    ViewMaker,
    expected_identity,
)
from services.telemetry.logs import get_logger

log = get_logger(__name__)

# A slow store is left alone for a second once half of a few calls missed their deadline.
_STORE_BREAKER = BreakerConfig(window_s=5.0, min_calls=4, failure_share=0.5, open_s=1.0)
_WARN_EVERY_S = 60.0
_LOOK_S = 0.01  # between looks at Links that are being made


class ClusterWatch:
    """Workers, Links, hints and bookings of one router. Belongs to the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        manifest: ModelManifest,
        reader: RegistryReader,
        clock: Clock,
        hooks: RouterHooks,
    ) -> None:
        self._config = config
        self._expected = expected_identity(manifest)
        self._reader = reader
        self._clock = clock
        self._hooks = hooks
        self._events: LinkEvents | None = None
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._records_at = clock.now()
        self._links: dict[WorkerId, WorkerLink] = {}
        self._breakers: dict[WorkerId, CircuitBreaker] = {}
        self._tripped: set[WorkerId] = set()  # whose breakers are not closed: mostly nobody's
        self._store_breaker = CircuitBreaker(_STORE_BREAKER)
        self._degraded = "the store has not answered yet"
        self._view_maker = ViewMaker()
        self._warned_at = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.bookings = Bookings()
        self.pairs = PairBook()
        self.desk = RouteDesk(config.policy, config.incarnation, reader, clock, self)

    # -- life --------------------------------------------------------------------------------

    async def start(self, events: LinkEvents) -> None:
        """Read the store once, then keep polling; an absent store is no reason not to start.

        Workers that are there are linked before this returns, if they are not too slow: a router
        of several that serves earlier would decide by half of what it should know.
        """
        self._events = events
        await self._poll_once()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.link.connect_timeout_s):
                while any(link.is_coming for link in self._links.values()):  # noqa: ASYNC110 - bounded
                    await asyncio.sleep(_LOOK_S)
        self._tasks = [
            asyncio.create_task(self._poll(), name="registry-poll"),
            asyncio.create_task(self.desk.keep(), name="registry-reservations"),
        ]

    async def stop(self) -> None:
        """Stop polling and close every Link."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)
        await self.desk.close()
        await self._reader.close()

    # -- questions ---------------------------------------------------------------------------

    @property
    def degraded(self) -> str:
        """Why the router decides without the store; empty when it does not."""
        return self._degraded

    def link(self, worker_id: WorkerId) -> WorkerLink | None:
        """Return the Link to a worker."""
        return self._links.get(worker_id)

    def view(self) -> ClusterView:
        """Return the cluster as it is now."""
        now = self._clock.now()
        return self._view_maker.build(
            ViewInputs(
                records=self._records,
                records_at=self._records_at,
                links={worker_id: link.state() for worker_id, link in self._links.items()},
                booked=self.bookings.booked(),
                expected=self._expected,
                broken=frozenset([w for w in self._tripped if not self._breakers[w].can_call(now)]),
            ),
            now,
        )

    def links(self) -> Links:
        """Return what is known of the ways between workers."""
        return self.pairs.links(self._clock.now())

    def is_anyone_usable(self) -> bool:
        """Say whether there is any worker to choose."""
        return any(worker.state == LIVE for worker in self.view().workers)

    def is_anyone_coming(self) -> bool:
        """Say whether a worker that is not usable now may be in a moment."""
        for worker in self.view().workers:
            link = self._links.get(worker.worker_id)
            if worker.state == SUSPECT and link is not None and link.is_coming:
                return True
        return False

    def may_ask_store(self) -> bool:
        """Say whether the store may be asked now; half open, the first to ask is the probe."""
        return not self._degraded and self._store_breaker.acquire(self._clock.now())

    # -- what dispatch learns ----------------------------------------------------------------

    def acquire(self, worker_id: WorkerId) -> None:
        """Note a dispatch: with its breaker half open it is the probe."""
        breaker = self._breakers.get(worker_id)
        if breaker is not None:
            breaker.acquire(self._clock.now())

    def record(self, worker_id: WorkerId, outcome: Outcome) -> None:
        """Learn how a work item ended at a worker."""
        breaker = self._breakers.get(worker_id)
        if breaker is not None:
            breaker.record(outcome, self._clock.now())
            if breaker.state is BreakerState.CLOSED:
                self._tripped.discard(worker_id)
            else:
                self._tripped.add(worker_id)

    def note_handoff(self, timing: RequestTiming) -> None:
        """Learn what a request shows of the link its KV crossed."""
        if timing.mode != REMOTE or timing.migrations or not timing.decode_worker:
            return
        pair = (WorkerId(timing.prefill_worker), WorkerId(timing.decode_worker))
        now = self._clock.now()
        if timing.recomputed:
            self.pairs.failed(pair, now)
            return
        moved = (timing.handoff_blocks - timing.handoff_blocks_deduped) * BLOCK_TOKENS
        beyond_s = max(0.0, timing.handoff_us / 1e6 - self._config.policy.handoff_s)
        self.pairs.exchanged(pair, moved, beyond_s, now)

    # -- polling -----------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            try:
                await self._poll_once()
            except Exception:
                # The outermost loop: a fault here must not end discovery for ever.
                log.exception("router.poll_fault")

    async def _poll_once(self) -> None:
        started = self._clock.now()
        try:
            records = await self._reader.snapshot()
        except StoreUnavailable as error:
            self.note_store_call("snapshot", started, error)
            self._degraded = f"no answer from the store: {error}"
            self._drop_dead_links()
            return
        self.note_store_call("snapshot", started, None)
        if self._degraded:
            log.info("router.store_answers")
        self._degraded = ""
        self._records = {record.info.worker_id: record for record in records}
        self._records_at = self._clock.now()
        for record in records:
            if record.lease_left_ms > 0:
                self._ensure_link(record)
        self._drop_dead_links()

    def _ensure_link(self, record: WorkerRecord) -> None:
        worker_id = record.info.worker_id
        link = self._links.get(worker_id)
        if link is not None:
            if link.info.address == record.info.address:
                if record.info.incarnation != link.info.incarnation:
                    self.pairs.forget(worker_id)
                # A new life at the same address, which the Link finds, or another pool.
                link.info = record.info
                return
            self._close_link(worker_id)
        assert self._events is not None, "polling begins in start"
        link = WorkerLink(
            record.info,
            self._config.router_id,
            self._config.incarnation,
            self._events,
            self._clock,
            self._config.link,
        )
        self._links[worker_id] = link
        self._breakers[worker_id] = CircuitBreaker()
        link.start()

    def _drop_dead_links(self) -> None:
        """Forget workers that neither the store nor their Link has seen for a while."""
        now = self._clock.now()
        for worker_id, link in list(self._links.items()):
            state, record = link.state(), self._records.get(worker_id)
            age_ms = (now - self._records_at) * 1000
            is_leased = record is not None and record.lease_left_ms - age_ms > 0
            is_dead = state.status in (LinkStatus.DOWN, LinkStatus.CONNECTING)
            # While the store is away nobody is forgotten: it could not tell us of them again.
            if not is_dead or is_leased or self._degraded:
                continue
            if now - state.since > self._config.forget_s:
                self._close_link(worker_id)

    def _close_link(self, worker_id: WorkerId) -> None:
        link = self._links.pop(worker_id)
        self._breakers.pop(worker_id, None)
        self._tripped.discard(worker_id)
        self.pairs.forget(worker_id)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def note_store_call(self, op: str, started: float, error: StoreUnavailable | None) -> None:
        """Learn what became of a call, which began at `started`."""
        now = self._clock.now()
        self._hooks.store_called(op, "error" if error else "ok", now - started)
        if op != "snapshot":
            outcome = Outcome.FAILURE if error else Outcome.SUCCESS
            self._store_breaker.record(outcome, now)
        if error is not None and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            log.warning("router.store_unavailable", op=op, error=str(error))
