"""A router's word to the autoscaler, once a second, and what the autoscaler answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.registry.brief import AutoscalerBrief, decode_brief
from services.registry.scaling import Brief, ScalingStore
from services.router.dispatch import Router
from services.telemetry.logs import get_logger

log = get_logger(__name__)

TELL_S = 1.0
# Requests are held on so long without an autoscaler: one is being restarted, or another takes over.
KEEP_S = 60.0


class ScalingLink:
    """For the router of one model. Belongs to the event loop."""

    def __init__(self, router: Router, store: ScalingStore, clock: Clock) -> None:
        self._router = router
        self._store = store
        self._clock = clock
        self._brief: AutoscalerBrief | None = None
        self._led_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def brief(self) -> AutoscalerBrief | None:
        """What the autoscaler said last; None while none is at work."""
        return self._brief if self._clock.now() - self._led_at <= KEEP_S else None

    async def start(self) -> None:
        """Hear what holds before the first request, if the store answers; then go on telling."""
        with suppress(StoreUnavailable):
            await self.tell_once()
        self._task = asyncio.create_task(self._tell(), name="scaling-link")

    async def stop(self) -> None:
        """Say that this router is gone: its figures must not be waited for."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with suppress(StoreUnavailable):
            await self._store.tell(self._router.config.router_id, "")

    async def tell_once(self) -> None:
        """Say what was counted; take over what is to be held. Raises StoreUnavailable."""
        config = self._router.config
        word = self._router.signals.word(
            config.incarnation, self._router.waits(), self._clock.now()
        )
        self._take(await self._store.tell(config.router_id, word))

    def _take(self, answer: Brief) -> None:
        if answer.is_led:
            self._led_at = self._clock.now()
            self._brief = decode_brief(answer.text)
        self._router.hold(self.brief.hold if self.brief is not None else None)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            try:
                await self.tell_once()
            except StoreUnavailable as error:
                log.debug("router.tell_failed", error=str(error))
            except Exception:
                # The outermost loop: without it the autoscaler would take this router for gone.
                log.exception("router.tell_fault")
