"""Whether a request starts now, waits in the router, or is refused with a time to come back. Pure.

A request is refused only for waiting: with nothing before it, it starts, whatever it asked for.
Everything is in seconds. Predictions learn from what became of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from services.common.decayed import DecayedSums
from services.common.light_value import light_value
from services.router.policy import PolicyConfig
from services.router.view import WorkerView

START, QUEUE, REFUSE = "start", "queue", "refuse"
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 60.0
_RATIO_TAU_S = 10.0
_RATIO_BIAS_S = 0.05  # times this short are mostly overhead, and say nothing of the ratio
_MIN_RATIO, _MAX_RATIO = 0.25, 8.0
_MARGIN_DEVIATIONS = 2.0
_DRAIN_TAU_S = 3.0
_DRAIN_PRIOR_S = 0.5
_NO_WORKER_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds of the router's queue, and what its waiting is measured against."""

    max_queued: int = 4096
    max_queued_bytes: int = 128 << 20
    slo_ttft_s: float = 0.0  # of requests that name none; 0 = only their deadline counts
    slo_tpot_s: float = 0.0
    slack: float = 0.8  # share of an SLO that a prediction may use up
    worker_backlog_s: float = 0.25  # work a worker has in hand before more is kept here
    worker_backlog_tokens: int = 1024  # the same, of a slow one
    max_decode_waiting: int = 8  # sequences that wait at a decode worker before it counts as full
    short_wait_s: float = 0.02  # waiting so little is never a reason to refuse
    priority_ageing_s: float = 10.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


@light_value
class Wish:
    """What a request may wait for. Zero as an SLO is none."""

    elapsed_s: float  # since it was received
    left_s: float  # to its deadline
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request would find now. Times are predictions."""

    queue_wait_s: float  # in the router
    worker_wait_s: float  # at the worker, once it is sent
    work_s: float  # its own until the first token
    has_room: bool  # the workers could take it now
    num_queued: int
    fits_queue: bool
    gap_s: float = 0.0  # between tokens where it would decode
    idle_gap_s: float = 0.0  # the same with nothing else there
    margin_s: float = 0.0  # for what waits in the queue scatter
    router_s: float = 0.0  # for this router's own core, where that has too much to do

    @property
    def wait_s(self) -> float:
        """All waiting before its own work begins, with a margin."""
        return self.router_s + self.queue_wait_s + self.margin_s + self.worker_wait_s


@light_value
class Admission:
    """What is done with a request, and why.

    Reasons: room, no_room, behind_others, no_worker (START and QUEUE); ttft_slo, tpot_slo,
    deadline, queue_full (REFUSE).
    """

    action: str  # START | QUEUE | REFUSE
    reason: str
    predicted_ttft_s: float
    wait_s: float
    retry_after_s: float = 0.0  # of REFUSE
    late_in_s: float = inf  # of QUEUE: not started by then, its SLO cannot be met


def admit(wish: Wish, standing: Standing, config: AdmissionConfig) -> Admission:
    """Decide about one request."""
    wait_s = standing.wait_s
    predicted_s = wish.elapsed_s + wait_s - standing.margin_s + standing.work_s

    def refuse(reason: str, drain_s: float) -> Admission:
        return Admission(REFUSE, reason, predicted_s, wait_s, clamp_retry_after(drain_s))

    slo_s = wish.slo_ttft_s * config.slack or inf
    limit_s = min(slo_s - wish.elapsed_s, wish.left_s)
    spare_s = limit_s - standing.work_s
    if wait_s > max(spare_s, config.short_wait_s):
        reason = "ttft_slo" if limit_s < wish.left_s else "deadline"
        return refuse(reason, wait_s - max(spare_s, 0.0))
    # An SLO that even an idle worker would miss is no reason to send the client away.
    if standing.idle_gap_s <= wish.slo_tpot_s < standing.gap_s and wish.slo_tpot_s > 0:
        return refuse("tpot_slo", _gap_drain_s(wish, standing))
    if standing.has_room and not standing.num_queued:
        return Admission(START, "room", predicted_s, wait_s)
    if not standing.fits_queue:
        return refuse("queue_full", wait_s / 2)
    reason = "behind_others" if standing.num_queued else "no_room"
    late_in_s = _late_in_s(
        wish, standing.work_s + standing.worker_wait_s + standing.router_s, config
    )
    return Admission(QUEUE, reason, predicted_s, wait_s, late_in_s=late_in_s)


def admit_without_worker(wish: Wish, config: AdmissionConfig, *, fits_queue: bool) -> Admission:
    """Decide about a request that nobody can take now, where somebody may in a moment.

    It waits with those that came before it: nothing is known that it could be refused for.
    """
    if not fits_queue:
        return Admission(REFUSE, "queue_full", 0.0, 0.0, _NO_WORKER_RETRY_S)
    return Admission(QUEUE, "no_worker", 0.0, 0.0, late_in_s=_late_in_s(wish, 0.0, config))


def _late_in_s(wish: Wish, needs_s: float, config: AdmissionConfig) -> float:
    """Return how long a request may wait and still meet its SLO, if it names one."""
    if wish.slo_ttft_s <= 0:
        return inf
    return max(wish.slo_ttft_s - wish.elapsed_s - needs_s, config.short_wait_s)


def clamp_retry_after(drain_s: float) -> float:
    """Keep a time to come back in sensible bounds."""
    return min(max(drain_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _gap_drain_s(wish: Wish, standing: Standing) -> float:
    """Guess when decode workers are empty enough: the share to go, of a second or so an answer."""
    excess = (standing.gap_s - wish.slo_tpot_s) / (standing.gap_s - standing.idle_gap_s)
    return excess * standing.gap_s * 100


# -- what workers have in hand ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prefill work of one worker, and of its pool."""

    worker_s: float
    work_s: float
    pool_tok_s: float
    has_room: bool


def backlog_of(
    worker: WorkerView,
    pool: Sequence[WorkerView],
    uncached_tokens: int,
    starting_tokens: int,
    policy: PolicyConfig,
    config: AdmissionConfig,
) -> Backlog:
    """Return what a worker has to do before a request that is sent to it now.

    Args:
        pool: the usable workers of its role, itself included.
        starting_tokens: of requests let through whose work no worker has been sent yet.
    """
    rate = _rate(worker, policy)
    starting = starting_tokens / max(1, len(pool))
    queued = _queued_tokens(worker) + starting
    return Backlog(
        worker_s=queued / rate,
        work_s=uncached_tokens / rate,
        pool_tok_s=sum(_rate(w, policy) for w in pool) or rate,
        has_room=has_room(worker, starting, policy, config),
    )


def longest_backlog_s(
    workers: Sequence[WorkerView],
    starting_tokens: int,
    policy: PolicyConfig,
    config: AdmissionConfig,
) -> float:
    """Return the longest backlog of a pool's workers; infinite unless each has room for more.

    Args:
        starting_tokens: as of `backlog_of`.
    """
    longest_s, starting = 0.0, starting_tokens / max(1, len(workers))
    for worker in workers:
        # Not by _rate and has_room: every request asks this of every worker.
        load = worker.load
        rate = load.rate_tok_s or policy.default_rate_tok_s
        queued = load.queued_uncached_tokens + worker.booked.prefill_tokens + starting
        if queued > config.worker_backlog_tokens and queued > config.worker_backlog_s * rate:
            return inf
        if queued > longest_s * rate:
            longest_s = queued / rate
    return longest_s


def has_room(
    worker: WorkerView, starting_tokens: float, policy: PolicyConfig, config: AdmissionConfig
) -> bool:
    """Say whether a worker may be sent more before it has worked off what it has."""
    limit = max(config.worker_backlog_s * _rate(worker, policy), config.worker_backlog_tokens)
    return _queued_tokens(worker) + starting_tokens <= limit


def is_decode_full(pool: Sequence[WorkerView], config: AdmissionConfig) -> bool:
    """Say whether every decode worker has sequences waiting already; nobody there is not full."""
    return bool(pool) and min([w.load.waiting for w in pool]) > config.max_decode_waiting


def least_gaps(
    pool: Sequence[WorkerView], need_tokens: int, policy: PolicyConfig
) -> tuple[float, float]:
    """Return the least gap between tokens of all decode workers, now and if it were idle."""
    gaps = []
    for worker in pool:
        load = worker.load
        base, slope = (
            (load.tbt_a_us, load.tbt_b_us) if load.tbt_a_us > 0 else (policy.default_tbt_us, 1.0)
        )
        resident = load.resident_tokens + worker.booked.resident_tokens
        idle_us = base + slope * need_tokens
        gaps.append(((idle_us + slope * resident) / 1e6, idle_us / 1e6))
    return min(gaps, default=(0.0, 0.0))


def _queued_tokens(worker: WorkerView) -> int:
    return worker.load.queued_uncached_tokens + worker.booked.prefill_tokens


def _rate(worker: WorkerView, policy: PolicyConfig) -> float:
    return worker.load.rate_tok_s or policy.default_rate_tok_s


# -- learning -----------------------------------------------------------------------------------


class TtftRatio:
    """Measured over predicted time to the first token, averaged over the last seconds."""

    def __init__(self) -> None:
        self._sums = DecayedSums(3, _RATIO_TAU_S)  # samples, measured, predicted

    def note(self, predicted_s: float, measured_s: float, now: float) -> None:
        """Learn how one prediction turned out."""
        self._sums.add(now, 1, measured_s, predicted_s)

    @property
    def value(self) -> float:
        """What to multiply a prediction by."""
        weight, measured_s, predicted_s = self._sums.values
        if not weight:
            return 1.0
        ratio = (measured_s / weight + _RATIO_BIAS_S) / (predicted_s / weight + _RATIO_BIAS_S)
        return min(max(ratio, _MIN_RATIO), _MAX_RATIO)


class WaitMargin:
    """How much longer than predicted requests wait in the queue, as far as that varies.

    Waits of replicas that draw on the same workers, or behind others that come later, scatter. A
    request that would only just be in time by the mean would be late half of the time.
    """

    def __init__(self) -> None:
        self._sums = DecayedSums(2, _RATIO_TAU_S)  # samples, squares

    def note(self, predicted_s: float, waited_s: float, now: float) -> None:
        """Learn how one prediction turned out; one that was too long counts as right."""
        self._sums.add(now, 1, max(0.0, waited_s - predicted_s) ** 2)

    @property
    def value_s(self) -> float:
        """Seconds to add to a predicted wait."""
        weight, squares = self._sums.values
        return _MARGIN_DEVIATIONS * sqrt(squares / weight) if weight else 0.0


class DrainRate:
    """Tokens a second that leave the queue while something waits in it.

    It knows what rates of workers do not tell: that decode is what is short, that other routers
    send work to the same workers.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._at = -inf
        self._sums = DecayedSums(2, _DRAIN_TAU_S)  # tokens, busy seconds

    def note(self, tokens: int, now: float, *, is_busy: bool) -> None:
        """Learn that so many tokens left; `is_busy` says whether something still waits."""
        busy_s = max(0.0, now - self._at) if self._is_busy else 0.0
        self._sums.add(now, tokens, busy_s)
        self._at, self._is_busy = now, is_busy

    def rate(self, pool_tok_s: float) -> float:
        """Return the rate; with little to go by it is that of the pool's workers."""
        tokens, busy_s = self._sums.values
        return (tokens + pool_tok_s * _DRAIN_PRIOR_S) / (busy_s + _DRAIN_PRIOR_S)
