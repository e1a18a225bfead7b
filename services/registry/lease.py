"""A worker's lease in the registry: a thread that heartbeats, publishes hints and rejoins.

The store may be down, slow, restarted empty or swapped under the worker: the thread tries again
for ever, never blocks a caller, and never takes more than its socket timeout for one call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import redis

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.ids import BlockHash
from services.registry.answers import parse_join, parse_status
from services.registry.base import HintChange, LoadReport, WorkerInfo
from services.registry.schema import Keys, encode_info, pack_record
from services.registry.scripts import Invocation, ScriptCalls
from services.registry.store_client import StoreAddress, SyncStore
from services.telemetry.logs import get_logger

log = get_logger(__name__)

RENEWAL_OUTCOMES = ("ok", "gone", "failed")


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Times and bounds of a WorkerLease."""

    lease_ms: int = 2000
    heartbeat_s: float = 0.5
    batch_delay_s: float = 0.010
    batch_blocks: int = 512
    upload_blocks: int = 1000
    max_pending: int = 65_536  # hint changes waiting; more than that and the table is sent anew
    call_timeout_s: float = 0.25
    retry_s: float = 0.25  # between attempts while the store does not answer


class WorkerLease:
    """Keeps one worker registered. Methods may be called from any thread and do not wait."""

    def __init__(
        self,
        store: StoreAddress,
        namespace: str,
        info: WorkerInfo,
        load: Callable[[], LoadReport],
        cached_hashes: Callable[[], Sequence[BlockHash]],
        clock: Clock,
        config: LeaseConfig | None = None,
    ) -> None:
        self._config = config or LeaseConfig()
        self._calls = ScriptCalls(Keys(namespace), lease_ms=self._config.lease_ms)
        self._info = info
        self._load = load
        self._cached_hashes = cached_hashes
        self._clock = clock
        self._store = SyncStore(store, self._config.call_timeout_s)
        self._changed = threading.Condition()
        # Guarded by the condition. The last change of a hash wins: owner sets are sets.
        self._pending: OrderedDict[BlockHash, bool] = OrderedDict()
        self._pending_since = 0.0
        self._state = "live"
        self._must_renew = False
        self._must_rejoin = False
        self._is_stopping = False
        self._has_overflowed = False
        # Written by the lease thread only.
        self._slot: int | None = None
        self._gen = 0
        self._previous_gen = 0
        self._seq = 0
        self._is_down = False
        self._is_superseded = False
        self._batch: tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]] | None = None
        self.renewals = dict.fromkeys(RENEWAL_OUTCOMES, 0)  # for metrics, read by any thread
        self._thread = threading.Thread(target=self._run, name="isthmus-lease", daemon=True)

    # -- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it joins as soon as the store answers."""
        self._thread.start()

    def publish(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Note blocks that entered and left the prefix cache; removals are applied first."""
        with self._changed:
            was_empty = not self._pending
            for hashes, is_added in ((removed, False), (added, True)):
                for block_hash in hashes:
                    self._pending.pop(block_hash, None)
                    self._pending[block_hash] = is_added
            if len(self._pending) > self._config.max_pending:
                self._pending.clear()
                self._has_overflowed = True
            if was_empty and self._pending:
                self._pending_since = self._clock.now()
                self._changed.notify()
            elif self._has_overflowed or len(self._pending) >= self._config.batch_blocks:
                self._changed.notify()

    def set_state(self, state: str) -> None:
        """Announce "live" or "draining" now rather than at the next heartbeat."""
        pack_record(self._info.role, state, LoadReport())  # refuses an unknown state
        with self._changed:
            self._state = state
            self._must_renew = True
            self._changed.notify()

    def set_role(self, role: str) -> None:
        """Register anew, in another pool; hints are sent again under a new generation."""
        pack_record(role, "live", LoadReport())  # refuses an unknown role
        with self._changed:
            self._info = replace(self._info, role=role)
            self._must_rejoin = True
            self._changed.notify()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Leave the registry and end the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._store.close()

    @property
    def slot(self) -> int | None:
        """Slot held, or None while not registered."""
        return self._slot

    @property
    def slot_gen(self) -> int:
        """Generation of the slot; 0 before the first join."""
        return self._gen

    @property
    def slot_gens(self) -> tuple[int, ...]:
        """The current generation and the one before it, which routers may still know."""
        return tuple(gen for gen in (self._gen, self._previous_gen) if gen)

    @property
    def is_registered(self) -> bool:
        """Whether the store has this worker, as far as the last call could tell."""
        return self._slot is not None and not self._is_down

    @property
    def is_superseded(self) -> bool:
        """True once a later process of the same name holds the slot: this one is a leftover."""
        return self._is_superseded

    # -- the lease thread --------------------------------------------------------------------

    def _run(self) -> None:
        next_renewal = self._clock.now()
        while self._wait(next_renewal):
            try:
                next_renewal = self._step(next_renewal)
                if self._is_down:
                    self._is_down = False
                    log.info("registry.store_back", worker=self._info.worker_id)
            except (redis.RedisError, OSError, StoreUnavailable) as error:
                next_renewal = self._clock.now() + self._config.retry_s
                self._note_down(error)
            except Exception:
                # The outermost loop of a thread that must outlive every fault.
                log.exception("registry.lease_fault", worker=self._info.worker_id)
                next_renewal = self._clock.now() + self._config.retry_s
        self._leave()

    def _wait(self, next_renewal: float) -> bool:
        """Sleep until there is something to do; False once stopping."""
        with self._changed:
            while not self._is_stopping:
                now = self._clock.now()
                due = next_renewal
                if not self._is_down and self._slot is not None:
                    if self._must_renew or self._must_rejoin or self._has_overflowed:
                        return True
                    if self._batch is not None:
                        return True
                    if len(self._pending) >= self._config.batch_blocks:
                        return True
                    if self._pending:
                        due = min(due, self._pending_since + self._config.batch_delay_s)
                if now >= due:
                    return True
                self._changed.wait(due - now)
            return False

    def _step(self, next_renewal: float) -> float:
        """Do the most urgent thing; return when the next renewal is due."""
        heartbeat_s = self._config.heartbeat_s
        if self._is_superseded:
            return self._clock.now() + heartbeat_s
        if self._must_rejoin:
            self._must_rejoin = False
            self._slot = None  # joins again until it succeeds
        if self._slot is None or self._has_overflowed:
            self._join()
            return self._clock.now() + heartbeat_s
        if self._take_batch():
            self._send_batch()
            # Publishing renews the lease too, but only a renewal sweeps: it keeps its own time.
            return next_renewal if self._slot is not None else 0.0
        if self._must_renew or self._clock.now() >= next_renewal:
            return self._clock.now() + heartbeat_s if self._renew(self._slot) else 0.0
        return next_renewal

    def _renew(self, slot: int) -> bool:
        """Extend the lease; False when the slot is not ours any more."""
        self._must_renew = False
        outcome = "failed"
        try:
            answer = self._call(self._calls.renew(slot, self._gen, self._record()))
            outcome = "gone" if parse_status(answer) == "GONE" else "ok"
        finally:
            self.renewals[outcome] += 1
        if outcome == "gone":
            self._forget_slot("renew")
        return outcome == "ok"

    def _join(self) -> None:
        """Take a slot under a new generation and send the whole table."""
        answer = parse_join(
            self._call(
                self._calls.join(
                    worker_id=self._info.worker_id,
                    incarnation=self._info.incarnation,
                    info=encode_info(self._info),
                    record=self._record(),
                    # After a flush the new generation must not repeat an old one by chance.
                    proposed_gen=self._gen or self._info.incarnation % 65535,
                    is_rejoin=self._gen != 0,
                )
            )
        )
        if answer.outcome == "SUPERSEDED":
            self._is_superseded = True
            self._slot = None
            log.error("registry.superseded", worker=self._info.worker_id)
            return
        if answer.outcome != "OK":
            raise StoreUnavailable(f"the registry refused to admit: {answer.outcome}")
        with self._changed:
            # Changes from here on are applied on top of what cached_hashes() says next.
            self._pending.clear()
            self._has_overflowed = False
            self._must_renew = False
            self._batch = None
        self._previous_gen, self._gen = self._gen, answer.gen
        self._slot, self._seq = answer.slot, 0
        log.info("registry.joined", worker=self._info.worker_id, slot=answer.slot, gen=answer.gen)
        self._upload(tuple(self._cached_hashes()))

    def _upload(self, hashes: tuple[BlockHash, ...]) -> None:
        for lo in range(0, len(hashes), self._config.upload_blocks):
            if self._slot is None:
                return
            self._batch = (hashes[lo : lo + self._config.upload_blocks], ())
            self._seq += 1
            try:
                self._send_batch()
            except BaseException:
                self._slot = None  # half a table: join again, under another generation
                raise

    def _take_batch(self) -> bool:
        """Move pending changes into the batch in flight, unless one is left from before."""
        if self._batch is not None:
            return True
        with self._changed:
            if not self._pending:
                return False
            full = len(self._pending) >= self._config.batch_blocks
            if not full and self._clock.now() < self._pending_since + self._config.batch_delay_s:
                return False
            taken = [
                self._pending.popitem(last=False)
                for _ in range(min(len(self._pending), self._config.batch_blocks))
            ]
            self._pending_since = self._clock.now()
        added = tuple(block_hash for block_hash, is_added in taken if is_added)
        removed = tuple(block_hash for block_hash, is_added in taken if not is_added)
        self._batch = (added, removed)
        self._seq += 1
        return True

    def _send_batch(self) -> None:
        """Send the batch; on a lost answer it is sent again with the same sequence number."""
        assert self._batch is not None
        assert self._slot is not None
        status = parse_status(
            self._call(
                self._calls.publish(
                    slot=self._slot,
                    gen=self._gen,
                    seq=self._seq,
                    change=HintChange(*self._batch),
                    record=self._record(),
                )
            )
        )
        self._batch = None
        if status == "RESYNC":
            log.warning("registry.resync", worker=self._info.worker_id)
            self._forget_slot("publish")
        elif status == "GONE":
            self._forget_slot("publish")

    def _forget_slot(self, during: str) -> None:
        self._slot = None
        log.warning("registry.slot_lost", worker=self._info.worker_id, during=during)

    def _leave(self) -> None:
        if self._slot is None:
            return
        try:
            self._call(self._calls.leave(self._slot, self._gen))
        except (redis.RedisError, OSError) as error:
            # The lease runs out by itself two seconds later.
            log.warning("registry.leave_failed", error=type(error).__name__)
        self._slot = None

    def _note_down(self, error: Exception) -> None:
        if not self._is_down:
            # Foreign messages may quote the address, which may hold a password.
            reason = str(error) if isinstance(error, StoreUnavailable) else type(error).__name__
            log.warning("registry.store_down", worker=self._info.worker_id, reason=reason)
        self._is_down = True

    def _record(self) -> bytes:
        return pack_record(self._info.role, self._state, self._load())

    def _call(self, call: Invocation) -> object:
        return self._store.run(call)
