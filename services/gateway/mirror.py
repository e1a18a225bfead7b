"""Requests answered a second time, by another model and for nobody.

A copy starts when its original is over, so that it takes nothing from it, and only while few
copies run: what does not fit is not mirrored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.common.errors import IsthmusError
from services.router.api import GenerateCall, RouterOutput, RouterPort
from services.telemetry.logs import get_logger

log = get_logger(__name__)

DROPPED, FAILED, OK = "dropped", "failed", "ok"


class Mirror:
    """Runs copies and throws their answers away. Belongs to the event loop."""

    def __init__(
        self, router: RouterPort, max_open: int, note: Callable[[str], None] | None = None
    ) -> None:
        """Args:
        max_open: copies that may run at once.
        note: told of every copy: dropped, failed or ok.
        """
        self._router = router
        self._max_open = max_open
        self._note = note or (lambda _outcome: None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def offer(self, prepare: Callable[[], Awaitable[GenerateCall]]) -> None:
        """Run a copy if there is room; `prepare` makes its call."""
        if self._is_closed or len(self._tasks) >= self._max_open:
            self._note(DROPPED)
            return
        task = asyncio.create_task(self._run(prepare), name="mirror")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what runs; nobody waits for it."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, prepare: Callable[[], Awaitable[GenerateCall]]) -> None:
        outcome = FAILED
        try:
            await self._router.generate(await prepare(), _throw_away)
            outcome = OK
        except IsthmusError as error:
            log.info("gateway.mirror_failed", code=error.spec.code)
        except Exception:  # outermost for one copy: nobody else would hear of it
            log.exception("gateway.mirror_failed")
        finally:
            self._note(outcome)


async def _throw_away(_outputs: Sequence[RouterOutput]) -> None:
    pass
