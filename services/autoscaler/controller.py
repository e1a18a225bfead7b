"""The autoscaler's loop: lead, look, decide, keep, act, tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from services.autoscaler.acting import Actor, DriverHangs, actions_of
from services.autoscaler.decide import decide
from services.autoscaler.decision import Condition, Decision
from services.autoscaler.drains import Drain, adopted, begun, due, still_there
from services.autoscaler.driver import Driver, DriverError
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.kept import Kept, after_tick, brief_of, counts_of, kept_from, status_of
from services.autoscaler.leadership import Lease
from services.autoscaler.observation import Observation, Replica
from services.autoscaler.policy import PoolAutoscalingPolicy
from services.autoscaler.policy_status import MAX_MESSAGE, PolicyStatus
from services.autoscaler.profile import Profile
from services.autoscaler.record import DecisionLog
from services.autoscaler.signal_reader import Read, SignalReader
from services.autoscaler.signals import SignalBook, Sources
from services.common.errors import StoreUnavailable
from services.registry.brief import encode_brief
from services.telemetry import catalog
from services.telemetry.logs import get_logger
from services.telemetry.metrics import Metrics

log = get_logger(__name__)

_RENEWALS = 4  # of the lease in its time


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller is made of."""

    policy: Callable[[], PoolAutoscalingPolicy]  # may be another one at every tick
    reader: SignalReader
    driver: Driver
    lease: Lease
    clock: EpochClock
    metrics: Metrics
    record: DecisionLog | None = None
    # Of the policy, where it names one.
    profile: Callable[[], Profile | None] = lambda: None
    # Why the policy that somebody has written is not the one in use; empty where it is.
    refusal: Callable[[], str] = lambda: ""
    # Where a status is shown besides the store.
    on_status: Callable[[PolicyStatus], None] | None = None


class Controller:
    """Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._actor = Actor(parts.driver, lambda: parts.lease.left_s, parts.metrics)
        self._kept = Kept()
        self._book = SignalBook()
        self._is_fresh = True  # nothing was decided since we lead
        self.status: PolicyStatus | None = None
        parts.metrics.watch(catalog.SCALING_LED, lambda: float(parts.lease.left_s > 0))

    async def run(self) -> None:
        """Run until cancelled; then let another one lead."""
        renewing = asyncio.create_task(self._keep_lease(), name="autoscaler-lease")
        try:
            while True:
                started = self._parts.clock.now()
                await self.tick()
                tick_s = self._parts.policy().spec.tick_seconds
                await asyncio.sleep(max(0.0, started + tick_s - self._parts.clock.now()))
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with suppress(StoreUnavailable):
                await self._parts.lease.give_back()

    # -- leading -----------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        """Renew beside the ticks: a driver that hangs must not cost us the lease."""
        while True:
            await asyncio.sleep(self._parts.lease.lease_s / _RENEWALS)
            if not self._parts.lease.left_s:
                continue
            try:
                await self.lead()
            except StoreUnavailable as error:
                log.warning("autoscaler.lease_not_renewed", reason=str(error)[:200])
            except Exception:
                # Without this loop a slow tick would cost the lease.
                log.exception("autoscaler.lease_fault")

    async def lead(self) -> bool:
        """Take or renew the lease; go on from what the one before kept. Raises StoreUnavailable."""
        lease = self._parts.lease
        taken = await lease.renew()
        if taken is not None:
            now = self._parts.clock.now()
            if taken.state is not None:
                self._kept = kept_from(taken.state, now)
                if not self._kept.at:
                    log.warning("autoscaler.state_unusable", size_bytes=len(taken.state))
            self._book, self._is_fresh = SignalBook(), True
            log.info("autoscaler.leads", token=taken.token, remembers=bool(self._kept.at))
        return lease.left_s > 0

    # -- one tick ----------------------------------------------------------------------------

    async def tick(self) -> None:
        """Look and decide once, if we lead. Never raises but for being cancelled."""
        outcome = "failed"
        try:
            outcome = await self._tick()
        except (StoreUnavailable, DriverError, DriverHangs) as error:
            log.warning("autoscaler.tick_failed", reason=str(error)[:400])
        except Exception:
            # The outermost loop: one fault must not end scaling for ever.
            log.exception("autoscaler.tick_fault")
        self._parts.metrics.add(catalog.SCALING_TICKS, outcome=outcome)

    async def _tick(self) -> str:
        parts = self._parts
        if not await self.lead():
            return "follows"
        policy = parts.policy()
        told = await self._actor.ask("replicas", parts.driver.replicas)
        now = parts.clock.now()
        read = await parts.reader.read(now)
        sources = Sources(
            read.routers, read.workers, told, read.external, parts.driver.capabilities.can_flip
        )
        seen = self._book.observe(policy.spec, sources, now, parts.profile())
        before = self._kept
        decision, state = decide(policy.spec, seen, before.state, now)
        drains = self._drains(policy, decision, told, read, now)
        shown = self._with_refusal(decision)
        kept = after_tick(before, shown, state, drains)
        status = status_of(policy, seen, shown, kept)
        brief = brief_of(policy, seen, shown, parts.clock.unix_ms())
        fields = {
            "state": kept.to_json(),
            "status": status.model_dump_json(by_alias=True, exclude_none=True),
            "brief": encode_brief(brief),
        }
        # Kept before anything is done: whoever may not write may not act either, and whoever comes
        # after us knows of all that was begun.
        if not await parts.lease.keep(fields):
            log.warning("autoscaler.fenced", token=parts.lease.token)
            return "fenced"
        self._kept, self.status = kept, status
        self._tell(before, kept, seen, decision)
        if parts.record is not None:
            self._record(parts.record, seen, before, decision, kept)
        if decision.is_acted_on:
            await self._act(decision, read, now)
        self._is_fresh = False
        return "ok"

    def _with_refusal(self, decision: Decision) -> Decision:
        """Add what no decision can know: whether it followed the newest policy."""
        why = self._parts.refusal()
        claim = Condition("PolicyRefused", bool(why), why[:MAX_MESSAGE] or "the policy is in use")
        return replace(decision, conditions=(*decision.conditions, claim))

    def _drains(
        self,
        policy: PoolAutoscalingPolicy,
        decision: Decision,
        told: Mapping[str, Sequence[Replica]],
        read: Read,
        now: float,
    ) -> tuple[Drain, ...]:
        """Return the drains under way, those of this tick included."""
        pools = {pool.name: pool for pool in policy.spec.pools}
        known = still_there(
            self._kept.drains, told, {worker.worker_id for worker in read.workers}, now
        )
        drains = {drain.replica_id: drain for drain in known}
        if not decision.is_acted_on:
            return tuple(drains.values())
        if self._is_fresh:
            flipping = {flip.replica_id for flip in self._kept.state.flips}
            for drain in adopted(told, drains.keys() | flipping, pools, now):
                drains[drain.replica_id] = drain
        for drain in begun(decision, pools, now):
            drains.setdefault(drain.replica_id, drain)  # named again until it has begun
        return tuple(drains.values())

    async def _act(self, decision: Decision, read: Read, now: float) -> None:
        workers = {worker.worker_id: worker for worker in read.workers}
        drains = {drain.replica_id: drain for drain in self._kept.drains}
        stops = due(self._kept.drains, workers, now)
        actions = tuple(actions_of(self._parts.driver, decision, drains, stops, now))
        await self._actor.act(actions)

    # -- telling -----------------------------------------------------------------------------

    def _tell(self, before: Kept, kept: Kept, seen: Observation, decision: Decision) -> None:
        """Log each size that changed, and let the gauges show this tick."""
        for change in kept.history:
            if change.at != decision.at:
                break
            log.info(
                "autoscaler.resized",
                is_acted_on=decision.is_acted_on, pool=change.pool,
                before=change.before, after=change.after, reason=change.reason,
            )  # fmt: skip
        for name, claim in kept.claims.items():
            known = before.claims.get(name)
            if known is not None and known.is_true != claim.is_true:
                log.info(
                    "autoscaler.condition", type=name, holds=claim.is_true, reason=claim.reason
                )
        self._parts.metrics.watch(catalog.REPLICAS, lambda: _sizes(seen, decision))
        claims = [(float(each.is_true), {"type": name}) for name, each in kept.claims.items()]
        self._parts.metrics.watch(catalog.SCALING_CONDITION, lambda: claims)
        self._parts.metrics.watch(catalog.SCALING_SIGNAL, lambda: _signals(seen))
        if self._parts.on_status is not None and self.status is not None:
            self._parts.on_status(self.status)

    def _record(
        self,
        record: DecisionLog,
        seen: Observation,
        before: Kept,
        decision: Decision,
        kept: Kept,
    ) -> None:
        try:
            record.write(seen, before.state, decision, kept.state)
        except OSError as error:
            log.warning("autoscaler.record_failed", error=error.strerror or str(error))


def _sizes(seen: Observation, decision: Decision) -> list[tuple[float, dict[str, str]]]:
    found: list[tuple[float, dict[str, str]]] = []
    for plan in decision.pools:
        pool = seen.pools.get(plan.pool)
        if pool is not None:
            found += [
                (float(num), {"pool": plan.pool, "state": state.value})
                for state, num in counts_of(pool).items()
            ]
        found.append((float(plan.desired), {"pool": plan.pool, "state": "desired"}))
    return found


def _signals(seen: Observation) -> list[tuple[float, dict[str, str]]]:
    return [
        (reading.value, {"pool": name, "metric": metric})
        for name, pool in seen.pools.items()
        for metric, reading in pool.readings.items()
    ]
