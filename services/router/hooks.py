"""What the router tells telemetry, as calls that do nothing unless somebody listens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from services.common.errors import IsthmusError
from services.common.ids import WorkerId
from services.common.light_value import light_value
from services.router.admission import Admission
from services.router.api import GenerateCall, RequestEnd
from services.router.policy import Decision
from services.router.timing import STAGES
from services.router.view import ClusterView
from services.telemetry import catalog
from services.telemetry.metrics import Metrics, Reading


@light_value
class RequestSummary:
    """How a request ended; exactly one of `end` and `error` is set, or none: the client left."""

    call: GenerateCall
    decision: Decision | None
    end: RequestEnd | None = None
    error: IsthmusError | None = None

    @property
    def outcome(self) -> str:
        """ "ok", or the error's code."""
        if self.end is not None:
            return "ok"
        return self.error.spec.code if self.error is not None else "cancelled"


class RouterHooks:
    """Base of listeners; override what you want to hear. Called on the event loop."""

    def admitted(self, call: GenerateCall, admission: Admission) -> None:
        """A request may start, has to wait, or was refused."""

    def ttft_predicted(self, predicted_s: float, measured_s: float) -> None:
        """A first token came; so long was it to take by the prediction made at arrival."""

    def decided(self, call: GenerateCall, decision: Decision, seconds: float) -> None:
        """A mode and a first worker were chosen, `seconds` after the request came to the router."""

    def retried(self, call: GenerateCall, code: str) -> None:
        """A work item was dispatched again because of that error."""

    def migrated(self, call: GenerateCall, gap_s: float) -> None:
        """A request went on at another decode worker, that long after its last token."""

    def waited(self, call: GenerateCall, outcome: str) -> None:
        """A request waited for a worker: "taken", or the code it ended with."""

    def hedged(self, call: GenerateCall, outcome: str) -> None:
        """A slow prefill got a second worker: "sent"; later "won" if that one was first."""

    def quarantined(self, call: GenerateCall) -> None:
        """A request was blamed for the death of workers."""

    def store_called(self, op: str, outcome: str, seconds: float) -> None:
        """The store answered, or did not."""

    def hint_checked(self, error_tokens: int) -> None:
        """A worker had so many tokens fewer cached than it was chosen for (more: below zero)."""

    def link_cut(self, worker_id: WorkerId, reason: str) -> None:
        """A Link broke."""

    def handoff_failed(self, code: str) -> None:
        """A decode worker that was given a ticket came to no token."""

    def ended(self, summary: RequestSummary) -> None:
        """A request is over."""

    def watch(
        self, num_open: Callable[[], int], view: Callable[[], ClusterView],
        is_degraded: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Gauges may be read from these."""

    def watch_admission(
        self, num_queued: Callable[[], int], ttft_ratio: Callable[[], float],
        lag_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Gauges may be read from these."""


@dataclass(frozen=True, slots=True)
class _Watched:
    num_open: Callable[[], int]
    view: Callable[[], ClusterView]
    is_degraded: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _WatchedGate:
    num_queued: Callable[[], int]
    ttft_ratio: Callable[[], float]
    lag_s: Callable[[], float]


class MetricsHooks(RouterHooks):
    """Writes the catalogue's router metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._add_prompt = metrics.adder(catalog.PROMPT_TOKENS)
        self._add_cached = metrics.adder(catalog.CACHED_TOKENS)
        self._add_completion = metrics.adder(catalog.COMPLETION_TOKENS)
        self._read_stages_us = attrgetter(*(f"{stage}_us" for stage in STAGES))
        self._observe_stages = metrics.parts_observer(catalog.STAGE, "stage", STAGES)
        # One for each model this process routes to.
        self._watched: list[_Watched] = []
        self._gates: list[_WatchedGate] = []

    def admitted(self, call: GenerateCall, admission: Admission) -> None:
        """Count it by what was done and why."""
        self._metrics.add(catalog.ADMISSIONS, 1, action=admission.action, reason=admission.reason)

    def ttft_predicted(self, predicted_s: float, measured_s: float) -> None:
        """Note how far off the prediction was."""
        if predicted_s > 0:
            self._metrics.observe(catalog.TTFT_PREDICTION, measured_s / predicted_s)

    def decided(self, call: GenerateCall, decision: Decision, seconds: float) -> None:
        """Count the decision."""
        self._metrics.add(catalog.ROUTE_DECISIONS, 1, mode=decision.mode, reason=decision.reason)
        self._metrics.observe(catalog.ROUTE_TIME, seconds)

    def retried(self, call: GenerateCall, code: str) -> None:
        """Count the retry."""
        self._metrics.add(catalog.RETRIES, 1, code=code)

    def migrated(self, call: GenerateCall, gap_s: float) -> None:
        """Count it and note its gap."""
        self._metrics.add(catalog.MIGRATIONS, 1)
        self._metrics.observe(catalog.MIGRATION_GAP, gap_s)

    def waited(self, call: GenerateCall, outcome: str) -> None:
        """Count it."""
        self._metrics.add(catalog.WAITED, 1, outcome=outcome)

    def hedged(self, call: GenerateCall, outcome: str) -> None:
        """Count it."""
        self._metrics.add(catalog.HEDGES, 1, outcome=outcome)

    def quarantined(self, call: GenerateCall) -> None:
        """Count it."""
        self._metrics.add(catalog.QUARANTINED, 1)

    def handoff_failed(self, code: str) -> None:
        """Count it; which plane it would have taken only its worker knows."""
        self._metrics.add(catalog.HANDOFFS, 1, plane="none", outcome=code)

    def store_called(self, op: str, outcome: str, seconds: float) -> None:
        """Count and time the call."""
        self._metrics.add(catalog.STORE_CALLS, 1, op=op, outcome=outcome)
        self._metrics.observe(catalog.STORE_CALL_TIME, seconds)

    def hint_checked(self, error_tokens: int) -> None:
        """Note the size of the error."""
        sign = "missing" if error_tokens > 0 else "extra"
        self._metrics.observe(catalog.HINT_ERROR, float(abs(error_tokens)), sign=sign)

    def link_cut(self, worker_id: WorkerId, reason: str) -> None:
        """Count the cut by kind; the text of a reason is no label."""
        kinds = {"silent": "silent", "the worker closed": "closed"}
        kind = next((kind for text, kind in kinds.items() if reason.startswith(text)), "broken")
        self._metrics.add(catalog.LINK_CUTS, 1, reason=kind)

    def ended(self, summary: RequestSummary) -> None:
        """Record outcome, tokens and stage times."""
        metrics = self._metrics
        end, decision = summary.end, summary.decision
        mode = end.timing.mode if end is not None else (decision.mode if decision else "none")
        metrics.add(catalog.REQUESTS, 1, mode=mode, outcome=summary.outcome)
        if end is None:
            return
        timing = end.timing
        self._add_prompt(end.prompt_tokens)
        self._add_cached(end.cached_tokens)
        self._add_completion(end.completion_tokens)
        metrics.observe(catalog.TTFT, timing.ttft_us / 1e6, mode=mode)
        metrics.observe(catalog.E2E, timing.e2e_us / 1e6, mode=mode)
        self._observe_stages([us / 1e6 for us in self._read_stages_us(timing)])
        if timing.decode_worker and timing.prefill_worker:
            plane = timing.plane or "none"
            outcome = "recomputed" if timing.recomputed else "ok"
            metrics.add(catalog.HANDOFFS, 1, plane=plane, outcome=outcome)
            metrics.add(catalog.HANDOFF_BYTES, timing.handoff_bytes, plane=plane)
            metrics.add(catalog.HANDOFF_BLOCKS, timing.handoff_blocks, how="moved")
            metrics.add(catalog.HANDOFF_BLOCKS, timing.handoff_blocks_deduped, how="deduped")
            metrics.add(catalog.HANDOFF_BLOCKS, timing.handoff_blocks_attached, how="attached")

    def watch(
        self, num_open: Callable[[], int], view: Callable[[], ClusterView],
        is_degraded: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Register the gauges; they are sums over all that is watched."""
        watched = self._watched
        watched.append(_Watched(num_open, view, is_degraded))

        def workers() -> list[Reading]:
            counts = Counter((w.role, w.state) for each in watched for w in each.view().workers)
            return [(n, {"role": role, "state": state}) for (role, state), n in counts.items()]

        self._metrics.watch(catalog.REQUESTS_OPEN, lambda: sum(w.num_open() for w in watched))
        self._metrics.watch(catalog.WORKERS, workers)
        self._metrics.watch(catalog.DEGRADED, lambda: float(any(w.is_degraded() for w in watched)))

    def watch_admission(
        self, num_queued: Callable[[], int], ttft_ratio: Callable[[], float],
        lag_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Register the gauges: the sum of the queues, and what the worst off have."""
        gates = self._gates
        gates.append(_WatchedGate(num_queued, ttft_ratio, lag_s))
        self._metrics.watch(catalog.QUEUED, lambda: sum(gate.num_queued() for gate in gates))
        self._metrics.watch(catalog.LOOP_LAG, lambda: max(gate.lag_s() for gate in gates))
        self._metrics.watch(catalog.TTFT_RATIO, lambda: max(gate.ttft_ratio() for gate in gates))
