"""What each way to run a request would cost, in seconds, and which is cheapest. Pure.

One meaning, two implementations: `route.lua` does the same arithmetic in the same order, so that
script and twin agree to the last bit. Local mode decides with this module alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.light_value import light_value
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import LoadReport

REMOTE, LOCAL, STAY, DECODE = 1, 2, 3, 4  # what an option does; DECODE: take over from `source`
FORBIDDEN = -1.0  # link time of a pair that must not exchange KV
MAX_ROWS = 64  # above this only the promising workers are priced
SHORTLIST = 8  # of each role: so many by hit, and so many by load
MAX_OPTIONS = 8  # told with a decision
WAITING_SHARE = 0.05  # of a step, that each request on its way to a worker adds to its gaps
NOBODY = -1  # no slot: of pairs without a link of their own
MIN_RATE_TOK_S = 1.0  # a lower rate is taken as not measured: it would make every cost infinite

Pairs = Mapping[tuple[int, int], float]  # (prefill slot, decode slot) -> seconds a token


@light_value
class Weights:
    """What holds for every request of a moment."""

    displacement: float = 2.0  # how much a full pool adds to the price of new blocks
    tie_s: float = 0.002  # costs this close, or within tie_ratio of the prefill, are equal
    tie_ratio: float = 0.1
    rate_tok_s: float = 2000.0  # of workers that have not measured their own
    tbt_a_us: float = 20_000.0
    tbt_b_us: float = 1.0
    handoff_s: float = 0.005  # of a handoff, whatever its size
    link_token_s: float = 0.0  # a token's KV over a link that is not in the pairs
    stall: float = 1.0  # price of a second of prefill for each request that decodes there
    hold: float = 1.0  # price of a second in which a prefill worker decodes

    def numbers(self) -> tuple[float, ...]:
        """Return the fields in the order the script reads them."""
        return (
            self.displacement, self.tie_s, self.tie_ratio, self.rate_tok_s, self.tbt_a_us,
            self.tbt_b_us, self.handoff_s, self.link_token_s, self.stall, self.hold,
        )  # fmt: skip


@light_value
class Ask:
    """One request as far as its price goes."""

    num_tokens: int
    decode_tokens: int  # expected after the first
    need_tokens: int  # resident where it decodes, all choices
    bypass_tokens: int = 0  # so few uncached tokens may be computed by a decode worker
    max_tbt_s: float = 0.0  # a slower decode worker does no prefill; 0 = any may
    root: int = 0  # of the prefix, 32 bits: equal prefixes prefer equal workers
    force: int = 0  # an option's kind, or 0
    source: int = -1  # of DECODE: slot of the worker whose KV it is
    excluded: frozenset[int] = frozenset()  # slots

    def numbers(self) -> tuple[float, ...]:
        """Return the fields in the order the script reads them."""
        return (
            self.num_tokens, self.decode_tokens, self.need_tokens, self.bypass_tokens,
            self.max_tbt_s, self.root, self.force, self.source,
        )  # fmt: skip


class Candidate(NamedTuple):
    """A worker that may be chosen, with what only the router knows of it."""

    slot: int
    gen: int
    is_prefill: bool
    seed: int  # of its rendezvous rank, 32 bits
    newness: float = 0.0  # 1 = just started, 0 = as settled as its peers


@light_value
class Booked:
    """Work sent to a worker that its reports do not show yet."""

    in_flight: int = 0
    prefill_tokens: int = 0
    resident_tokens: int = 0


class Row(NamedTuple):
    """One candidate as it is now."""

    candidate: Candidate
    load: LoadReport
    booked: Booked
    hit_tokens: float = 0.0  # speculation included
    hint_tokens: float = 0.0  # confirmed by the worker


class Peers(NamedTuple):
    """Candidates of one role."""

    num_workers: int
    queued_tokens: int


class Census(NamedTuple):
    """All candidates, where rows were made of some only."""

    prefill: Peers
    decode: Peers

    @property
    def num_rows(self) -> int:
        """How many rows all would be."""
        return self.prefill.num_workers + self.decode.num_workers


class Option(NamedTuple):  # made by the dozen for a decision
    """One way to run the request, and what it is made of."""

    kind: int
    slot: int
    fits: bool
    partner: int  # decode slot a REMOTE was priced with; -1 = none
    cost_s: float
    prefill_s: float  # queue and own work
    handoff_s: float  # fixed part and link
    decode_s: float
    extra_s: float  # what others lose by it
    queued_tokens: float
    uncached_tokens: float
    hit_tokens: float
    hint_tokens: float
    resident_tokens: float
    in_flight: int


@light_value
class Verdict:
    """The chosen option first, then the others by cost."""

    options: tuple[Option, ...]
    can_remote: bool  # some pair could have exchanged KV

    @property
    def chosen(self) -> Option:
        """The option to take."""
        return self.options[0]


@dataclass(slots=True)
class _Priced:
    """A row with what does not depend on the option."""

    slot: int
    row: Row
    queued: float
    uncached: float
    rate: float
    prefill_s: float
    tbt_s: float
    resident: int
    fits: bool


class _Partner(NamedTuple):  # ordered: the least is the best
    is_full: bool
    seconds: float
    slot: int
    link_s: float
    decode_s: float


@dataclass(slots=True)
class _Pricing:
    weights: Weights
    ask: Ask
    pairs: Pairs
    prefill: list[_Priced] = field(default_factory=list)
    decode: list[_Priced] = field(default_factory=list)


def decide(
    weights: Weights, ask: Ask, rows: Sequence[Row], pairs: Pairs, census: Census | None = None
) -> Verdict | None:
    """Price every option and take the cheapest; None when there is none.

    Args:
        pairs: link seconds a token where they are known or FORBIDDEN; others use the default.
        census: of all candidates but the excluded, if `rows` are those that can be chosen only.
    """
    pricing = _Pricing(weights, ask, pairs)
    kept = [row for row in rows if row.candidate.slot not in ask.excluded]
    prefill = [r for r in kept if r.candidate.is_prefill]
    decode = [r for r in kept if not r.candidate.is_prefill]
    if census is None:
        census = Census(_peers(prefill), _peers(decode))
    pricing.prefill = _priced(weights, ask, prefill, census.prefill)
    pricing.decode = _priced(weights, ask, decode, census.decode)
    if census.num_rows > MAX_ROWS:
        pricing.prefill = _shortlist(pricing.prefill, lambda p: p.queued / p.rate)
        pricing.decode = _shortlist(pricing.decode, lambda p: p.tbt_s)
    options, can_remote = _options(pricing)
    if not options:
        return None
    options.sort(key=lambda o: (not o.fits, o.cost_s, o.kind, o.slot))
    chosen = _among_ties(pricing, options)
    rest = [option for option in options if option is not chosen]
    return Verdict((chosen, *rest[: MAX_OPTIONS - 1]), can_remote)


def mix32(value: int) -> int:
    """Scatter 32 bits; a bijection, so unlike workers never tie."""
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def prefill_tokens(option: Option) -> int:
    """Return the tokens a reservation of this option holds in a prefill queue."""
    return 0 if option.kind == DECODE else math.ceil(option.uncached_tokens)


def resident_tokens(option: Option, ask: Ask) -> int:
    """Return the tokens a reservation of this option holds in a pool for decoding."""
    return 0 if option.kind == REMOTE else ask.need_tokens


def _peers(rows: Sequence[Row]) -> Peers:
    queued = sum(r.load.queued_uncached_tokens + r.booked.prefill_tokens for r in rows)
    return Peers(len(rows), queued)


def _priced(weights: Weights, ask: Ask, rows: Sequence[Row], peers: Peers) -> list[_Priced]:
    return [_price(weights, ask, row, peers) for row in rows]


def _price(weights: Weights, ask: Ask, row: Row, peers: Peers) -> _Priced:
    load, booked = row.load, row.booked
    queued: float = load.queued_uncached_tokens + booked.prefill_tokens
    if row.candidate.newness > 0 and peers.num_workers > 1:
        # A newcomer looks as loaded as its peers at first: it must not draw every request.
        missing = (peers.queued_tokens - queued) / (peers.num_workers - 1) - queued
        if missing > 0:
            queued = queued + row.candidate.newness * missing
    # The last token is always computed, however much of the prompt is cached.
    uncached = ask.num_tokens - min(row.hit_tokens, ask.num_tokens - 1)
    # A free block that holds a prefix is not empty: what is computed here pushes it out.
    empty = max(0, min(load.kv_free, load.kv_total) - load.kv_cached)
    full = 1 - empty / load.kv_total if load.kv_total else 0.0
    rate = load.rate_tok_s if load.rate_tok_s >= MIN_RATE_TOK_S else weights.rate_tok_s
    work = queued + uncached * (1 + weights.displacement * full)
    is_measured = load.tbt_a_us > 0
    tbt_a = load.tbt_a_us if is_measured else weights.tbt_a_us
    tbt_b = load.tbt_b_us if is_measured else weights.tbt_b_us
    resident = load.resident_tokens + booked.resident_tokens
    # Requests in flight order workers whose gap does not depend on resident tokens (yet).
    waiting = load.waiting + booked.in_flight
    tbt_us = tbt_a * (1 + WAITING_SHARE * waiting) + tbt_b * (resident + ask.need_tokens)
    room = load.kv_free * BLOCK_TOKENS - booked.resident_tokens
    return _Priced(
        row.candidate.slot, row, queued, uncached, rate, work / rate, tbt_us / 1e6, resident,
        load.kv_total == 0 or room >= ask.need_tokens,
    )  # fmt: skip


def _shortlist(priced: list[_Priced], load: Callable[[_Priced], float]) -> list[_Priced]:
    """Keep those with the longest hits and those with the least to do, in their old order."""
    by_hit = sorted(priced, key=lambda p: (-p.row.hit_tokens, p.slot))[:SHORTLIST]
    by_load = sorted(priced, key=lambda p: (load(p), p.slot))[:SHORTLIST]
    kept = {p.slot for p in (*by_hit, *by_load)}
    return [p for p in priced if p.slot in kept]


def _options(pricing: _Pricing) -> tuple[list[Option], bool]:
    ask = pricing.ask
    if ask.force == DECODE:
        return [o for d in pricing.decode if (o := _take_over(pricing, d)) is not None], False
    usual = _partner(pricing, NOBODY) if pricing.prefill else None
    own = {prefill_slot for prefill_slot, _ in pricing.pairs}
    remote = []
    for p in pricing.prefill:
        partner = _partner(pricing, p.slot) if p.slot in own else usual
        if partner is not None:
            remote.append(_remote(pricing, p, partner))
    can_remote = bool(remote)
    options = remote if ask.force in (0, REMOTE) else []
    if ask.force in (0, LOCAL):
        options += [_local(pricing, d) for d in pricing.decode if _may_bypass(ask, d, can_remote)]
    if ask.force in (0, STAY):
        options += [_stay(pricing, p) for p in pricing.prefill]
    return options, can_remote


def _may_bypass(ask: Ask, decode: _Priced, can_remote: bool) -> bool:
    """Say whether a decode worker may do a prefill: a long one would stall what decodes there."""
    if ask.force == LOCAL or not can_remote:
        return True
    if decode.uncached > ask.bypass_tokens:
        return False
    return ask.max_tbt_s == 0 or decode.tbt_s <= ask.max_tbt_s


def _link_s(pricing: _Pricing, prefill_slot: int, decode: _Priced) -> float | None:
    """Seconds to move what the decode worker lacks; None where the pair must not."""
    token_s = pricing.weights.link_token_s
    if pricing.pairs:
        token_s = pricing.pairs.get((prefill_slot, decode.slot), token_s)
    return None if token_s < 0 else token_s * (pricing.ask.num_tokens - _held(pricing.ask, decode))


def _held(ask: Ask, decode: _Priced) -> float:
    return min(decode.row.hint_tokens, ask.num_tokens)


def _partner(pricing: _Pricing, prefill_slot: int) -> _Partner | None:
    """Choose who would decode what this worker prefills."""
    best: tuple[bool, float, int, float, float] | None = None
    decode_tokens = pricing.ask.decode_tokens
    for decode in pricing.decode:
        link_s = _link_s(pricing, prefill_slot, decode)
        if link_s is None:
            continue
        decode_s = decode_tokens * decode.tbt_s
        found = (not decode.fits, link_s + decode_s, decode.slot, link_s, decode_s)
        if best is None or found < best:
            best = found
    return None if best is None else _Partner(*best)


def _remote(pricing: _Pricing, prefill: _Priced, partner: _Partner) -> Option:
    parts = (pricing.weights.handoff_s + partner.link_s, partner.decode_s, 0.0)
    return _option(pricing, REMOTE, prefill, parts, fits=not partner.is_full, partner=partner.slot)


def _local(pricing: _Pricing, decode: _Priced) -> Option:
    decode_s = pricing.ask.decode_tokens * decode.tbt_s
    stall_s = pricing.weights.stall * decode.row.load.running * (decode.uncached / decode.rate)
    return _option(pricing, LOCAL, decode, (0.0, decode_s, stall_s), fits=decode.fits)


def _stay(pricing: _Pricing, prefill: _Priced) -> Option:
    decode_s = pricing.ask.decode_tokens * prefill.tbt_s
    hold_s = pricing.weights.hold * decode_s
    return _option(pricing, STAY, prefill, (0.0, decode_s, hold_s), fits=prefill.fits)


def _take_over(pricing: _Pricing, decode: _Priced) -> Option | None:
    if decode.slot == pricing.ask.source:
        return None
    link_s = _link_s(pricing, pricing.ask.source, decode)
    if link_s is None:
        return None
    decode_s = pricing.ask.decode_tokens * decode.tbt_s
    return _option(pricing, DECODE, decode, (link_s, decode_s, 0.0), fits=decode.fits)


def _option(
    pricing: _Pricing,
    kind: int,
    priced: _Priced,
    parts: tuple[float, float, float],  # handoff, decode, extra
    *,
    fits: bool,
    partner: int = -1,
) -> Option:
    handoff_s, decode_s, extra_s = parts
    prefill_s = 0.0 if kind == DECODE else priced.prefill_s
    row = priced.row
    return Option(
        kind, priced.slot, fits, partner, prefill_s + handoff_s + decode_s + extra_s,
        prefill_s, handoff_s, decode_s, extra_s, priced.queued, priced.uncached, row.hit_tokens,
        row.hint_tokens, priced.resident, row.booked.in_flight,
    )  # fmt: skip


def _among_ties(pricing: _Pricing, options: Sequence[Option]) -> Option:
    """Of what costs hardly more than the best: the longest hit, the shorter queue, the rank.

    A second copy of a prefix would push another one out. With equal hits nothing speaks for a
    queue twice as long, though what it adds to the cost is within the tie; less than that is
    noise, and a newcomer that looks nearly as loaded as its peers must not win by it.
    """
    best, weights = options[0], pricing.weights
    scale = best.cost_s if best.kind == DECODE else best.prefill_s
    limit = best.cost_s + max(weights.tie_s, weights.tie_ratio * scale)
    ties = [o for o in options if o.kind == best.kind and o.fits == best.fits and o.cost_s <= limit]
    if len(ties) == 1:
        return best
    seeds = {p.slot: p.row.candidate.seed for p in (*pricing.prefill, *pricing.decode)}
    return min(ties, key=lambda o: _tie_key(o, mix32(pricing.ask.root ^ seeds[o.slot])))


def _tie_key(option: Option, rank: int) -> tuple[float, ...]:
    octave = math.frexp(option.queued_tokens)[1]
    return (-option.hit_tokens, octave, option.in_flight, -rank, option.slot)
