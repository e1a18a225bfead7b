"""Which mode and which workers. Pure: a request, a view and hits in, a decision with terms out.

The prices are those of `services.registry.cost`, which the store's script computes too: here the
router's words become its numbers and its answer becomes a worker again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.common.light_value import light_value
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry import cost
from services.registry.base import LoadReport
from services.router.view import ClusterView, WorkerView, pair_mismatch

REMOTE, LOCAL, STAY = "REMOTE", "LOCAL", "STAY"
MODES = (REMOTE, LOCAL, STAY)
STRIDE_TOKENS = BLOCK_TOKENS * HINT_STRIDE_BLOCKS
RETRY_AFTER_MS = 1000
_KINDS = {REMOTE: cost.REMOTE, LOCAL: cost.LOCAL, STAY: cost.STAY}
_MODE_NAMES = {kind: mode for mode, kind in _KINDS.items()} | {cost.DECODE: REMOTE}

Pair = tuple[WorkerId, WorkerId]  # prefill, decode


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Weights of the cost model."""

    displacement: float = 2.0  # how much a full pool adds to the price of new blocks
    default_rate_tok_s: float = 2000.0  # until any worker has measured its own
    default_tbt_us: float = 20_000.0
    expected_output_tokens: int = 256  # until answers have shown how long they are
    tie_s: float = 0.002  # costs this close, or within tie_ratio, are equal
    tie_ratio: float = 0.1
    slow_start_s: float = 5.0  # a new worker looks as loaded as its peers, less and less so
    handoff_s: float = 0.005  # of a handoff, whatever its size
    stall: float = 1.0  # price of a second of prefill for each request that decodes there
    hold: float = 1.0  # price of a second in which a prefill worker decodes
    bypass_tokens: int = 512  # so few uncached tokens may skip the prefill pool; 0 = never


@light_value
class RequestFacts:
    """What the policy needs to know of a request."""

    request_id: str
    num_tokens: int
    max_tokens: int
    n: int = 1
    prefix_root: bytes = b""  # hash of the first block: equal prefixes prefer equal workers
    force_mode: str | None = None
    max_tbt_s: float = 0.0  # what the client calls a good gap between tokens; 0 = it did not say
    expected_output: int | None = None  # tokens, of one choice; None = nothing is known of such


@dataclass(frozen=True, slots=True)
class Links:
    """What is known of the ways between workers."""

    token_s: float = 0.0  # seconds to move one token's KV, where the pair has not shown its own
    pairs: Mapping[Pair, float] = field(default_factory=dict)  # the same by pair
    broken: frozenset[Pair] = frozenset()  # failed to exchange KV lately


NO_LINKS = Links()


class Terms(NamedTuple):  # made by the dozen for a decision, a third of a frozen dataclass's time
    """What one way to run the request would cost, and why."""

    worker_id: WorkerId
    mode: str
    cost_s: float
    prefill_s: float  # queue and own work
    handoff_s: float
    decode_s: float
    extra_s: float  # what others lose by it
    queued_tokens: int
    uncached_tokens: int
    hit_tokens: int
    hint_tokens: int  # of them, what the worker itself has said it holds
    resident_tokens: int
    fits: bool
    partner: WorkerId | None = None  # decode worker it was priced with


@light_value
class Decision:
    """Mode, first worker, and the terms of what was possible, the chosen first."""

    mode: str
    worker: WorkerView
    reason: str
    terms: tuple[Terms, ...]
    is_local: bool = True  # decided by this router alone


@light_value
class Field:
    """Who may be chosen at one moment, in the numbers of the cost model."""

    workers: Mapping[int, WorkerView]  # by slot, or by place where there is no store
    places: Mapping[WorkerId, int]  # of these, and of sources that are no candidates
    candidates: tuple[cost.Candidate, ...]
    pairs: Mapping[tuple[int, int], float]
    weights: cost.Weights
    refusal: str | None  # why a pair may not exchange KV, if some pair may not

    def slots_of(self, worker_ids: frozenset[WorkerId]) -> frozenset[int]:
        """Return the slots of these workers."""
        return frozenset(self.places[w] for w in worker_ids if w in self.places)


def choose(
    facts: RequestFacts,
    view: ClusterView,
    depth: Mapping[WorkerId, int],
    config: PolicyConfig,
    exclude: frozenset[WorkerId] = frozenset(),
    links: Links = NO_LINKS,
) -> Decision:
    """Choose mode and first worker without asking the store.

    Raises:
        RequestError: no_workers, when no mode (or not the forced one) is possible.
    """
    arena = lay_out(view, config, links)
    return decision_of(weigh(facts, view, arena, depth, config, exclude), arena, facts)


def weigh(
    facts: RequestFacts,
    view: ClusterView,
    arena: Field,
    depth: Mapping[WorkerId, int],
    config: PolicyConfig,
    exclude: frozenset[WorkerId] = frozenset(),
) -> cost.Verdict:
    """Choose among workers that are laid out: as `choose`, in the numbers of the cost model."""
    ask = ask_for(facts, config, arena, exclude)
    verdict = cost.decide(arena.weights, ask, _rows(arena, depth), arena.pairs)
    if verdict is None:
        raise _no_workers(facts, view, arena)
    return verdict


def choose_decode(
    facts: RequestFacts,
    prefill: WorkerView,
    view: ClusterView,
    config: PolicyConfig,
    exclude: frozenset[WorkerId] = frozenset(),
    links: Links = NO_LINKS,
) -> Decision | None:
    """Choose who takes over from `prefill` without asking the store; None when nobody can."""
    arena = lay_out(view, config, links, sources=(prefill,))
    ask = ask_to_take_over(facts, prefill, config, arena, exclude)
    verdict = cost.decide(arena.weights, ask, _rows(arena, {}), arena.pairs)
    return None if verdict is None else decision_of(verdict, arena, facts)


def any_pair(view: ClusterView, links: Links, exclude: frozenset[WorkerId]) -> bool:
    """Say whether some pair of live workers may exchange KV."""
    return any(
        pair_mismatch(p.info, d.info) is None and (p.worker_id, d.worker_id) not in links.broken
        for p in view.usable("prefill")
        for d in view.usable("decode")
        if p.worker_id not in exclude and d.worker_id not in exclude
    )


def lay_out(
    view: ClusterView,
    config: PolicyConfig,
    links: Links,
    *,
    sources: Sequence[WorkerView] = (),
    by_slot: bool = False,
) -> Field:
    """Put the live workers and the ways between them into numbers.

    Args:
        sources: workers whose KV is to be taken over; they need not be live.
        by_slot: number workers by their slots, leaving out those that have none.
    """
    live = [w for role in ("prefill", "decode") for w in view.usable(role)]
    slotted = {w.slot: w for w in live if w.slot is not None}
    workers = slotted if by_slot else dict(enumerate(live))
    candidates = tuple(
        [
            cost.Candidate(
                slot,
                worker.slot_gen & 0xFFFF,
                worker.role == "prefill",
                worker_seed(worker.worker_id),
                _newness(worker, view.at, config),
            )
            for slot, worker in workers.items()
        ]
    )
    places = {w.worker_id: slot for slot, w in workers.items()}
    # No slot has so high a number, so one that is no candidate can be told from all that are.
    absent = [w for w in {s.worker_id: s for s in sources}.values() if w.worker_id not in places]
    places.update((w.worker_id, 0xFFFF - i) for i, w in enumerate(absent))
    senders = [w for w in workers.values() if w.role == "prefill"]
    senders += [w for w in sources if w.role != "prefill" or w in absent]
    receivers = [w for w in workers.values() if w.role == "decode"]
    pairs, refusal = _pairs(senders, receivers, places, links)
    return Field(workers, places, candidates, pairs, _weights(live, config, links), refusal)


def ask_for(
    facts: RequestFacts, config: PolicyConfig, arena: Field, exclude: frozenset[WorkerId]
) -> cost.Ask:
    """Put a new request into numbers."""
    return cost.Ask(
        num_tokens=facts.num_tokens,
        decode_tokens=_decode_tokens(facts, config),
        need_tokens=expected_tokens(facts, config),
        bypass_tokens=config.bypass_tokens,
        max_tbt_s=facts.max_tbt_s,
        root=_root32(facts.prefix_root or facts.request_id.encode()),
        force=_KINDS[facts.force_mode] if facts.force_mode else 0,
        excluded=arena.slots_of(exclude),
    )


def ask_to_take_over(
    facts: RequestFacts,
    source: WorkerView,
    config: PolicyConfig,
    arena: Field,
    exclude: frozenset[WorkerId],
) -> cost.Ask:
    """Put a request that looks for its decode worker into numbers."""
    return cost.Ask(
        num_tokens=facts.num_tokens,
        decode_tokens=_decode_tokens(facts, config),
        need_tokens=expected_tokens(facts, config),
        root=_root32(facts.request_id.encode()),  # equal ones spread, whatever their prefix
        force=cost.DECODE,
        source=arena.places[source.worker_id],
        excluded=arena.slots_of(exclude),
    )


def decision_of(
    verdict: cost.Verdict, arena: Field, facts: RequestFacts, *, is_local: bool = True
) -> Decision:
    """Put a verdict into words."""
    chosen = verdict.chosen
    return Decision(
        _MODE_NAMES[chosen.kind],
        arena.workers[chosen.slot],
        _reason(verdict, arena, facts),
        tuple(
            [_terms(option, arena) for option in verdict.options if option.slot in arena.workers]
        ),
        is_local,
    )


def expected_tokens(facts: RequestFacts, config: PolicyConfig) -> int:
    """Guess the tokens a request will have resident where it decodes."""
    return facts.num_tokens + _output_tokens(facts, config) * facts.n


@lru_cache(maxsize=4096)  # the same workers at every decision
def worker_seed(worker_id: WorkerId) -> int:
    """Return 32 bits of a worker's name: all replicas agree without talking to one another."""
    return _root32(worker_id.encode())


def _root32(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")


def _decode_tokens(facts: RequestFacts, config: PolicyConfig) -> int:
    """Tokens expected after the first, which prefill makes."""
    return max(0, min(facts.max_tokens - 1, _output_tokens(facts, config)))


def _output_tokens(facts: RequestFacts, config: PolicyConfig) -> int:
    known = facts.expected_output
    return min(facts.max_tokens, config.expected_output_tokens if known is None else known)


def _rows(arena: Field, depth: Mapping[WorkerId, int]) -> list[cost.Row]:
    rows = []
    for candidate in arena.candidates:
        worker = arena.workers[candidate.slot]
        hit = float(depth.get(worker.worker_id, 0) * STRIDE_TOKENS)
        rows.append(cost.Row(candidate, worker.load, worker.booked, hit, hit))
    return rows


def _newness(worker: WorkerView, now: float, config: PolicyConfig) -> float:
    if worker.up_since is None or config.slow_start_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (now - worker.up_since) / config.slow_start_s))


def _pairs(
    senders: Sequence[WorkerView],
    receivers: Sequence[WorkerView],
    places: Mapping[WorkerId, int],
    links: Links,
) -> tuple[dict[tuple[int, int], float], str | None]:
    """Price the pairs that differ from the usual; say why if one is refused."""
    pairs: dict[tuple[int, int], float] = {}
    refusal = None
    kinds = {w.info.kv_identity_fp for w in (*senders, *receivers)}
    if len(kinds) == 1 and not links.broken and not links.pairs:
        return pairs, refusal  # with a thousand workers of each role there are a million pairs
    for p in senders:
        for d in receivers:
            pair = (p.worker_id, d.worker_id)
            place = (places[p.worker_id], places[d.worker_id])
            reason = pair_mismatch(p.info, d.info)
            if reason is None and pair in links.broken:
                reason = f"{p.worker_id} and {d.worker_id} failed to exchange KV lately"
            if reason is not None:
                pairs[place], refusal = cost.FORBIDDEN, reason
            elif pair in links.pairs:
                pairs[place] = links.pairs[pair]
    return pairs, refusal


def _weights(live: Sequence[WorkerView], config: PolicyConfig, links: Links) -> cost.Weights:
    """Price workers that have not measured themselves as their peers."""
    loads: list[LoadReport] = [w.load for w in live]
    rates = [load.rate_tok_s for load in loads if load.rate_tok_s >= cost.MIN_RATE_TOK_S]
    gaps = [load for load in loads if load.tbt_a_us > 0]
    return cost.Weights(
        displacement=config.displacement,
        tie_s=config.tie_s,
        tie_ratio=config.tie_ratio,
        rate_tok_s=median(rates) if rates else config.default_rate_tok_s,
        tbt_a_us=median([g.tbt_a_us for g in gaps]) if gaps else config.default_tbt_us,
        tbt_b_us=median([g.tbt_b_us for g in gaps]) if gaps else 1.0,
        handoff_s=config.handoff_s,
        link_token_s=links.token_s,
        stall=config.stall,
        hold=config.hold,
    )


def _reason(verdict: cost.Verdict, arena: Field, facts: RequestFacts) -> str:
    kind = verdict.chosen.kind
    if kind == cost.DECODE:
        return "least_gap"
    if facts.force_mode is not None:
        return "forced"
    if kind == cost.REMOTE:
        return "both_pools_live"
    if verdict.can_remote:
        return "bypass" if kind == cost.LOCAL else "decode_costlier"
    if arena.refusal is not None:
        return "pair_refused"
    return "no_prefill_worker" if kind == cost.LOCAL else "no_decode_worker"


def _terms(option: cost.Option, arena: Field) -> Terms:
    partner = arena.workers.get(option.partner)
    return Terms(
        worker_id=arena.workers[option.slot].worker_id,
        mode=_MODE_NAMES[option.kind],
        cost_s=option.cost_s,
        prefill_s=option.prefill_s,
        handoff_s=option.handoff_s,
        decode_s=option.decode_s,
        extra_s=option.extra_s,
        queued_tokens=round(option.queued_tokens),
        uncached_tokens=round(option.uncached_tokens),
        hit_tokens=round(option.hit_tokens),
        hint_tokens=round(option.hint_tokens),
        resident_tokens=round(option.resident_tokens),
        fits=option.fits,
        partner=partner.worker_id if partner is not None else None,
    )


def _no_workers(facts: RequestFacts, view: ClusterView, arena: Field) -> RequestError:
    why = arena.refusal or view.why_unusable()
    if facts.force_mode is not None:
        why = why or "no worker of the needed role is registered"
        message = f"mode {facts.force_mode} is not possible now: {why}"
    else:
        message = "no worker can take the request: " + (why or "none is registered")
    return RequestError("no_workers", message, retry_after_ms=RETRY_AFTER_MS)
