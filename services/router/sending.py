"""Chooses workers for a request's parts and sends them work: one leg for every work item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.kv.hashing import pack_token_ids
from services.router.cluster_watch import ClusterWatch
from services.router.config import RouterConfig
from services.router.legs import CONTINUE, PREFILL, WHOLE, Leg, Progress
from services.router.policy import (
    LOCAL,
    REMOTE,
    STAY,
    Decision,
    RequestFacts,
    expected_tokens,
)
from services.router.view import WorkerView
from services.router.wire import WorkHead, build_work

Choose = Callable[[RequestFacts, frozenset[WorkerId]], Decision]


class Sender:
    """Sends the work of one router; what comes again comes under a higher attempt."""

    def __init__(self, config: RouterConfig, cluster: ClusterWatch, clock: Clock) -> None:
        self._config = config
        self._cluster = cluster
        self._clock = clock

    # -- choosing ----------------------------------------------------------------------------

    def begin(self, progress: Progress, exclude: frozenset[WorkerId]) -> Decision:
        """Choose mode and worker for all that the client does not have yet, and send it.

        Raises:
            RequestError: no_workers.
        """
        facts = _facts_now(progress)
        is_several = progress.logical.num_choices > 1 and progress.logical.has_output
        while True:
            if is_several:
                # Each choice has come as far as it has: they share no ticket any more.
                decision = self._choose_whole(progress, facts, exclude)
            else:
                decision = _take_decided(progress, exclude) or self._choose(
                    progress, facts, exclude
                )
            if self._start(progress, decision):
                return decision
            # Its Link broke in this very moment, or its queue is full.
            exclude |= {decision.worker.worker_id}

    def pass_on(self, progress: Progress, source: Leg, reserved: Decision | None = None) -> bool:
        """Pass a ticket to a decode worker, the reserved one first; False when none can take it."""
        excluded = set(progress.failed)
        if source.generated:
            excluded.add(source.worker_id)  # it offers, so it should not go on there
        while True:
            view = self._cluster.view()
            prefill, decision = view.find(source.worker_id), None
            if reserved is not None and reserved.worker.worker_id not in excluded:
                decision = reserved
            elif prefill is not None:
                decision = self._choose_decode(progress, prefill, excluded)
            if decision is None:
                return False
            worker = view.find(decision.worker.worker_id)
            if worker is not None and self._send(progress, CONTINUE, worker, source=source):
                progress.choices.append(decision)
                self._cluster.pairs.sent((source.worker_id, worker.worker_id), self._clock.now())
                if not source.generated:
                    progress.marks.continued = self._clock.now()
                return True
            # It is gone, its Link is down or full: not now, which is no refusal of its own.
            excluded.add(decision.worker.worker_id)

    def _choose_decode(
        self, progress: Progress, prefill: WorkerView, excluded: set[WorkerId]
    ) -> Decision | None:
        # Who was lost may be back, but others come first.
        desk = self._cluster.desk
        others = desk.choose_decode(progress.facts, prefill, frozenset(excluded | progress.lost_at))
        return others or desk.choose_decode(progress.facts, prefill, frozenset(excluded))

    def stay(self, progress: Progress, source: Leg) -> bool:
        """Let the prefill worker go on by itself: nobody is left to hand off to.

        A higher attempt fences its first one there: the prompt is in its cache. Once the client
        has tokens, going on counts for more than the mode that was asked for.
        """
        worker = self._cluster.view().find(source.worker_id)
        is_forced = progress.facts.force_mode == REMOTE and not progress.logical.has_output
        if worker is None or source.kind != PREFILL or is_forced:
            return False
        progress.attempt += 1
        if not self._send(progress, WHOLE, worker):
            return False
        progress.mode, progress.reason = STAY, "no_decode_worker"
        source.has_failed = True
        self.close(source)
        return True

    def take_back(self, progress: Progress) -> bool:
        """Give a request to the worker that stopped it and offers it, draining or not."""
        offer = progress.offer()
        worker = self._cluster.view().find(offer.worker_id) if offer is not None else None
        if worker is None:
            return False
        progress.attempt += 1
        return self._send(progress, WHOLE, worker)

    def hedge(self, progress: Progress, first: Leg) -> bool:
        """Have a second worker do the same prefill; False when there is none."""
        facts = replace(progress.facts, force_mode=REMOTE)
        excluded = frozenset({*progress.failed, *progress.lost_at, first.worker_id})
        try:
            decision = self._choose(progress, facts, excluded)
        except RequestError:
            return False
        progress.attempt += 1
        progress.choices.append(decision)
        return self._send(progress, PREFILL, decision.worker, decision=decision)

    def can_take(self, progress: Progress, source: WorkerView) -> bool:
        """Say whether a decode worker could take over what decodes at `source`."""
        failed = frozenset(progress.failed)
        return self._cluster.desk.choose_decode(progress.facts, source, failed) is not None

    def _choose(
        self, progress: Progress, facts: RequestFacts, exclude: frozenset[WorkerId]
    ) -> Decision:
        return self._cluster.desk.choose(facts, progress.depth, exclude)

    def _choose_whole(
        self, progress: Progress, facts: RequestFacts, exclude: frozenset[WorkerId]
    ) -> Decision:
        try:
            return self._choose(progress, replace(facts, force_mode=LOCAL), exclude)
        except RequestError:
            return self._choose(progress, replace(facts, force_mode=STAY), exclude)

    # -- sending -----------------------------------------------------------------------------

    def _start(self, progress: Progress, decision: Decision) -> bool:
        progress.attempt += 1
        progress.mode, progress.reason = decision.mode, decision.reason
        progress.choices.append(decision)
        if progress.decision is None:
            progress.decision = decision
        kind = PREFILL if decision.mode == REMOTE else WHOLE
        return self._send(progress, kind, decision.worker, decision=decision)

    def _send(
        self,
        progress: Progress,
        kind: str,
        worker: WorkerView,
        *,
        source: Leg | None = None,
        decision: Decision | None = None,
    ) -> bool:
        """Send one work item and book it; False when the Link cannot take it.

        Args:
            source: of CONTINUE: whose ticket the worker gets.
            decision: why this worker, where it was chosen for a prefill.
        """
        link = self._cluster.link(worker.worker_id)
        if link is None or link.incarnation is None:
            return False
        now = self._clock.now()
        head = WorkHead(
            request=progress.number,
            attempt=progress.attempt,
            kind=kind,
            incarnation=link.incarnation,
            # After a first failure the generation is left out: the store's word on it may be old.
            slot_gen=0 if progress.num_retries or progress.num_losses else worker.slot_gen,
            deadline_ms=max(1, int((progress.call.deadline - now) * 1000)),
        )
        head = _with_tokens_so_far(head, progress, source)
        if not link.send_work(build_work(head, progress.call, progress.hashes)):
            return False
        self._cluster.acquire(worker.worker_id)
        resident = 0 if kind == PREFILL else expected_tokens(progress.facts, self._config.policy)
        uncached = _uncached(decision) if decision is not None else 0
        leg = Leg(
            kind=kind,
            worker_id=worker.worker_id,
            incarnation=link.incarnation,
            attempt=progress.attempt,
            booking=self._cluster.bookings.book(worker.worker_id, uncached, resident, now),
            next_index=_next_index(progress, head),
            sent_at=now,
            source=source,
            first_index=head.first_index,
            goes_on=_goes_on(progress, kind, source),
            predicted_s=decision.terms[0].prefill_s if decision is not None else 0.0,
        )
        progress.legs.append(leg)
        if progress.marks.sent is None:
            progress.marks.sent = now
        return True

    def cancel(self, progress: Progress, leg: Leg, reason: str) -> None:
        """Tell a leg's worker that it is not wanted any more."""
        link = self._cluster.link(leg.worker_id)
        if link is not None and link.incarnation == leg.incarnation:
            link.cancel(progress.number, leg.attempt, reason)

    def close(self, leg: Leg) -> None:
        """Expect nothing more of a leg, and give its booking back."""
        leg.is_open = False
        self._cluster.bookings.release(leg.booking)

    def withdraw(self, progress: Progress, leg: Leg, reason: str) -> None:
        """Cancel a leg whose work another one does."""
        leg.has_failed = True
        self.cancel(progress, leg, reason)
        self.close(leg)


def _take_decided(progress: Progress, exclude: frozenset[WorkerId]) -> Decision | None:
    """Return the store's decision the first time, unless it has become a bad one."""
    decided, progress.decided = progress.decided, None
    if decided is None or decided.worker.worker_id in exclude:
        return None
    return decided


def _facts_now(progress: Progress) -> RequestFacts:
    """Return the facts of what is left to do: tokens so far are as good as prompt."""
    longest = max(progress.logical.next_indexes)
    facts = progress.facts
    if not longest:
        return facts
    return replace(
        facts,
        num_tokens=facts.num_tokens + longest,
        max_tokens=max(1, facts.max_tokens - longest),
    )


def _with_tokens_so_far(head: WorkHead, progress: Progress, source: Leg | None) -> WorkHead:
    if head.kind == CONTINUE and source is not None:
        return replace(head, ticket=source.ticket, generated=source.generated)
    so_far = progress.logical.so_far
    if not so_far:
        return head
    if progress.logical.num_choices > 1:
        return replace(head, resumed=so_far)
    return replace(head, generated=pack_token_ids(so_far[0].token_ids) if so_far else b"")


def _next_index(progress: Progress, head: WorkHead) -> list[int]:
    if head.kind == CONTINUE:
        return [head.first_index] * progress.logical.num_choices
    return list(progress.logical.next_indexes)


def _goes_on(progress: Progress, kind: str, source: Leg | None) -> bool:
    if kind == CONTINUE:
        # What a prefill worker hands off is heard of first from it.
        return source is not None and bool(source.generated) and source.kind != PREFILL
    return progress.logical.has_output


def _uncached(decision: Decision) -> int:
    """Prompt tokens the chosen worker has to compute."""
    return decision.terms[0].uncached_tokens
