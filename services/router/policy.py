"""Which mode and which workers. Pure: a request, a view and hints in, a decision with terms out.

Costs are seconds. A prefill worker costs the tokens it has to compute before this request's
first token, divided by its rate; a decode worker costs the gap between tokens it would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.router.view import ClusterView, WorkerView, pair_mismatch

REMOTE, LOCAL, STAY = "REMOTE", "LOCAL", "STAY"
MODES = (REMOTE, LOCAL, STAY)
STRIDE_TOKENS = BLOCK_TOKENS * HINT_STRIDE_BLOCKS
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Weights of the cost model."""

    displacement: float = 1.0  # how much a full pool adds to the price of new blocks
    default_rate_tok_s: float = 2000.0  # until any worker has measured its own
    default_tbt_us: float = 20_000.0
    expected_output_tokens: int = 256
    tie_s: float = 0.002  # costs this close, or within tie_ratio, are equal
    tie_ratio: float = 0.1
    slow_start_s: float = 5.0  # a new worker looks as loaded as its peers, less and less so


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the policy needs to know of a request."""

    request_id: str
    num_tokens: int
    max_tokens: int
    n: int = 1
    prefix_root: bytes = b""  # hash of the first block: equal prefixes prefer equal workers
    force_mode: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What one candidate would cost, and why."""

    worker_id: WorkerId
    cost_s: float
    queued_tokens: int = 0
    uncached_tokens: int = 0
    hit_tokens: int = 0
    resident_tokens: int = 0
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Mode, first worker, and the terms of every candidate, best first."""

    mode: str
    worker: WorkerView
    reason: str
    terms: tuple[Terms, ...]


def choose(
    facts: RequestFacts,
    view: ClusterView,
    depth: Mapping[WorkerId, int],
    config: PolicyConfig,
    exclude: frozenset[WorkerId] = frozenset(),
) -> Decision:
    """Choose mode and first worker.

    Raises:
        RequestError: no_workers, when no mode (or not the forced one) is possible.
    """
    prefill = _without(view.usable("prefill"), exclude)
    decode = _without(view.usable("decode"), exclude)
    mode, reason = _choose_mode(facts, view, prefill, decode)
    if mode == LOCAL:
        chosen, terms = _cheapest(
            [_decode_terms(facts, w, decode, config) for w in decode], decode, facts, config
        )
        return Decision(mode, chosen, reason, terms)
    if mode == REMOTE:
        prefill = tuple(
            p for p in prefill if any(pair_mismatch(p.info, d.info) is None for d in decode)
        )
    candidates = [_prefill_terms(facts, w, prefill, depth, view.at, config) for w in prefill]
    chosen, terms = _cheapest(candidates, prefill, facts, config)
    return Decision(mode, chosen, reason, terms)


def choose_decode(
    facts: RequestFacts,
    prefill: WorkerView,
    view: ClusterView,
    config: PolicyConfig,
    exclude: frozenset[WorkerId] = frozenset(),
) -> Decision | None:
    """Choose who takes over from `prefill`, with the newest loads; None when nobody can."""
    decode = tuple(
        w
        for w in _without(view.usable("decode"), exclude)
        if pair_mismatch(prefill.info, w.info) is None
    )
    if not decode:
        return None
    terms = [_decode_terms(facts, w, decode, config) for w in decode]
    chosen, ordered = _cheapest(terms, decode, facts, config, spread=True)
    return Decision(REMOTE, chosen, "least_gap", ordered)


def expected_tokens(facts: RequestFacts, config: PolicyConfig) -> int:
    """Guess the tokens a request will have resident where it decodes."""
    return facts.num_tokens + min(facts.max_tokens, config.expected_output_tokens) * facts.n


def rendezvous(root: bytes, worker_id: WorkerId) -> int:
    """Rank a worker for a prefix: all replicas agree without talking to one another."""
    named = len(root).to_bytes(4, "little") + root + worker_id.encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little")


def _choose_mode(
    facts: RequestFacts,
    view: ClusterView,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
) -> tuple[str, str]:
    refused = _pair_refusal(prefill, decode)
    possible = {
        REMOTE: bool(prefill and decode) and refused is None,
        LOCAL: bool(decode),
        STAY: bool(prefill),
    }
    if facts.force_mode is not None:
        if possible[facts.force_mode]:
            return facts.force_mode, "forced"
        why = refused or view.why_unusable() or "no worker of the needed role is registered"
        raise _no_workers(f"mode {facts.force_mode} is not possible now: {why}")
    if possible[REMOTE]:
        return REMOTE, "both_pools_live"
    if possible[LOCAL]:
        return LOCAL, "pair_refused" if refused else "no_prefill_worker"
    if possible[STAY]:
        return STAY, "no_decode_worker"
    raise _no_workers(
        "no worker can take the request: " + (view.why_unusable() or "none is registered")
    )


def _pair_refusal(prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> str | None:
    """Say why no pair may exchange KV; None when one may or a pool is empty."""
    reason = None
    for p in prefill:
        for d in decode:
            reason = pair_mismatch(p.info, d.info)
            if reason is None:
                return None
    return reason


def _prefill_terms(
    facts: RequestFacts,
    worker: WorkerView,
    peers: Sequence[WorkerView],
    depth: Mapping[WorkerId, int],
    now: float,
    config: PolicyConfig,
) -> Terms:
    # The last token is always computed, however much of the prompt is cached.
    hit = min(depth.get(worker.worker_id, 0) * STRIDE_TOKENS, facts.num_tokens - 1)
    uncached = facts.num_tokens - hit
    queued = _queued(worker) + _slow_start(worker, peers, now, config)
    work = queued + uncached * (1 + config.displacement * _fullness(worker))
    rates = [w.load.rate_tok_s for w in peers if w.load.rate_tok_s > 0]
    rate = worker.load.rate_tok_s or (median(rates) if rates else config.default_rate_tok_s)
    return Terms(worker.worker_id, work / rate, round(queued), uncached, hit)


def _decode_terms(
    facts: RequestFacts, worker: WorkerView, peers: Sequence[WorkerView], config: PolicyConfig
) -> Terms:
    resident = worker.load.resident_tokens + worker.booked.resident_tokens
    need = expected_tokens(facts, config)
    base, slope = _gap_model(worker, peers, config)
    # Requests in flight order workers whose gap does not depend on resident tokens (yet).
    waiting = worker.load.waiting + worker.booked.in_flight
    cost_us = base * (1 + 0.05 * waiting) + slope * (resident + need)
    fits = worker.load.kv_total == 0 or worker.load.kv_free * BLOCK_TOKENS >= need
    return Terms(worker.worker_id, cost_us / 1e6, resident_tokens=resident, fits=fits)


def _gap_model(
    worker: WorkerView, peers: Sequence[WorkerView], config: PolicyConfig
) -> tuple[float, float]:
    """Microseconds of a step: a constant and a part per resident token; peers' where unknown."""
    if worker.load.tbt_a_us > 0:
        return worker.load.tbt_a_us, worker.load.tbt_b_us
    known = [w.load for w in peers if w.load.tbt_a_us > 0]
    if not known:
        return config.default_tbt_us, 1.0
    return median(k.tbt_a_us for k in known), median(k.tbt_b_us for k in known)


def _cheapest(
    terms: Sequence[Terms],
    workers: Sequence[WorkerView],
    facts: RequestFacts,
    config: PolicyConfig,
    *,
    spread: bool = False,
) -> tuple[WorkerView, tuple[Terms, ...]]:
    """Return the cheapest worker; among near-equals the least busy, then the rendezvous rank."""
    by_id = {w.worker_id: w for w in workers}
    pool = [t for t in terms if t.fits] or list(terms)
    best = min(t.cost_s for t in pool)
    limit = max(best + config.tie_s, best * (1 + config.tie_ratio))
    root = facts.request_id.encode() if spread or not facts.prefix_root else facts.prefix_root
    ties = [t for t in pool if t.cost_s <= limit]
    chosen = min(
        ties,
        key=lambda t: (
            by_id[t.worker_id].booked.in_flight,
            -t.hit_tokens,
            -rendezvous(root, t.worker_id),
        ),
    )
    rest = sorted((t for t in terms if t is not chosen), key=lambda t: t.cost_s)
    return by_id[chosen.worker_id], (chosen, *rest)


def _queued(worker: WorkerView) -> int:
    return worker.load.queued_uncached_tokens + worker.booked.prefill_tokens


def _slow_start(
    worker: WorkerView, peers: Sequence[WorkerView], now: float, config: PolicyConfig
) -> float:
    """Tokens to add so that an empty newcomer does not draw every request at once."""
    others = [_queued(w) for w in peers if w.worker_id != worker.worker_id]
    if not others or worker.up_since is None or config.slow_start_s <= 0:
        return 0.0
    left = 1 - (now - worker.up_since) / config.slow_start_s
    missing = sum(others) / len(others) - _queued(worker)
    return max(0.0, left) * max(0.0, missing)


def _fullness(worker: WorkerView) -> float:
    total = worker.load.kv_total
    return 1 - min(worker.load.kv_free, total) / total if total else 0.0


def _without(workers: Sequence[WorkerView], exclude: frozenset[WorkerId]) -> tuple[WorkerView, ...]:
    return tuple(w for w in workers if w.worker_id not in exclude)


def _no_workers(message: str) -> RequestError:
    return RequestError("no_workers", message, retry_after_ms=RETRY_AFTER_MS)
