"""What waits in a router for the workers of one role, and what was learned of such waits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.resilience.fair_queue import FairQueue, Waiting
from services.router.admission import (
    AdmissionConfig,
    Backlog,
    DrainRate,
    Standing,
    WaitMargin,
    has_room,
)
from services.router.policy import PolicyConfig
from services.router.view import WorkerView

_MAX_TENANTS = 1024  # whose waits are remembered


@dataclass(slots=True, eq=False)
class PoolQueue:
    """What waits for the workers of one role; modes that enter by another are not held up."""

    role: str
    queue: FairQueue
    drain: DrainRate = field(default_factory=DrainRate)
    starting_tokens: int = 0  # let go, and no worker has them yet
    stuck_since: float | None = None  # nobody can take what is next
    _margins: dict[str, WaitMargin] = field(default_factory=dict)  # by tenant, least used first

    def margin(self, tenant: str) -> WaitMargin:
        """Return a tenant's own: what a flood suffers from others must not count for them."""
        margin = self._margins.pop(tenant, None) or WaitMargin()
        self._margins[tenant] = margin
        if len(self._margins) > _MAX_TENANTS:
            del self._margins[next(iter(self._margins))]
        return margin

    def unstick(self, now: float) -> None:
        """Somebody could take what is next, if not now."""
        if self.stuck_since is not None:
            self.stuck_since = None
            self.note_left(0, now)

    def note_left(self, tokens: int, now: float) -> None:
        """Learn that so many tokens left the queue; a time without workers tells nothing."""
        is_busy = len(self.queue) > 0 and self.stuck_since is None
        self.drain.note(tokens, now, is_busy=is_busy)

    def is_full(
        self, workers: Sequence[WorkerView], policy: PolicyConfig, config: AdmissionConfig
    ) -> bool:
        """Say whether none of the pool's usable workers has room; none at all is not full."""
        starting = self.starting_tokens / max(1, len(workers))
        return bool(workers) and not any(has_room(w, starting, policy, config) for w in workers)

    def standing(
        self,
        waiting: Waiting,
        tokens: int,
        backlog: Backlog,
        ratio: float,
        *,
        fits_queue: bool,
        gaps_s: tuple[float, float],
        router_s: float = 0.0,
    ) -> Standing:
        """Say what a request would find if it came into the queue now.

        Args:
            tokens: of its prompt that are to be computed.
            ratio: measured over predicted TTFT.
            gaps_s: between tokens where it would decode: now, and with nothing else there.
        """
        queue = self.queue
        ahead = queue.cost_ahead(waiting.tenant, waiting.priority, waiting.cost, waiting.queued_at)
        # Until it is measured what leaves the queue: as if all were like this request.
        prior = backlog.pool_tok_s / ratio * waiting.cost / max(1, tokens)
        return Standing(
            queue_wait_s=ahead / self.drain.rate(prior) if ahead else 0.0,
            margin_s=self.margin(waiting.tenant).value_s if ahead else 0.0,
            router_s=router_s,
            worker_wait_s=backlog.worker_s * ratio,
            work_s=backlog.work_s * ratio,
            has_room=backlog.has_room,
            num_queued=len(queue),
            fits_queue=fits_queue,
            gap_s=gaps_s[0],
            idle_gap_s=gaps_s[1],
        )
