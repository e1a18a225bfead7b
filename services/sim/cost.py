"""What a run cost, and each token of it: pure sums over what was provisioned, busy and served.

Per pool: GPU-hours * (rate + operations) + energy + a share of what all pools share. Three readings
of the same money: allocated (all of it), used (while busy), and good (per token of requests that
met their SLO), which is the one to compare clusters by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from services.sim.prices import PoolPrices, Prices, Role

HOURS_PER_YEAR = 8760
_PRICE_FACTORS = (0.8, 1.2)
_UTILISATIONS = (0.3, 0.6, 0.9)
_MICROS = 1_000_000


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What one pool was and did; times are summed over its workers."""

    role: Role
    provisioned_s: float
    busy_s: float
    prefill_busy_s: float = 0.0  # of busy_s; asked of an aggregated pool only, as is the next
    decode_busy_s: float = 0.0
    energy_j: float | None = None  # measured at the GPUs; None = by the model of power
    scaling_lag_s: float = 0.0  # of workers that were asked for and not ready

    @property
    def utilisation(self) -> float:
        """Share of its time a worker was busy."""
        return self.busy_s / self.provisioned_s if self.provisioned_s else 0.0


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What was served to one tenant."""

    tenant: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    good_tokens: int  # input and output of requests that met their SLO
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunUsage:
    """A run to be priced; a run without tenants has one."""

    duration_s: float
    pools: tuple[PoolUsage, ...]
    tenants: tuple[TenantUsage, ...]
    num_violated: int = 0
    num_refused: int = 0  # or abandoned
    cache_gib_h: float = 0.0  # of KV kept outside GPUs

    @property
    def input_tokens(self) -> int:
        """Prompt tokens, as they are billed."""
        return sum(t.input_tokens for t in self.tenants)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens nobody had to compute."""
        return sum(t.cached_tokens for t in self.tenants)

    @property
    def output_tokens(self) -> int:
        """Answer tokens."""
        return sum(t.output_tokens for t in self.tenants)

    @property
    def good_tokens(self) -> int:
        """Tokens of requests that met their SLO."""
        return sum(t.good_tokens for t in self.tenants)


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What one pool cost, in $."""

    role: Role
    gpu_h: float
    gpus_usd: float
    ops_usd: float
    energy_usd: float
    shared_usd: float
    used_usd: float  # the part of the total while it was busy
    prefill_usd: float  # the part of the total for prompts
    decode_usd: float  # and for answers

    @property
    def total_usd(self) -> float:
        """All of it."""
        return self.gpus_usd + self.ops_usd + self.energy_usd + self.shared_usd

    @property
    def idle_usd(self) -> float:
        """The part of the total while it was idle."""
        return self.total_usd - self.used_usd


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's part of the whole."""

    tenant: str
    micro_usd: int  # those of all tenants add up to the whole exactly
    per_m_good: float | None


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The same tokens bought elsewhere."""

    api_usd: float
    load_share: float  # of this run's load, at which this cluster and the API cost the same


@dataclass(frozen=True, slots=True)
class Variant:
    """The headline under another assumption."""

    name: str
    per_m_good: float | None


@dataclass(frozen=True, slots=True)
class CostReport:
    """All figures of a run; None where nothing was served that could bear a price."""

    duration_s: float
    pools: tuple[PoolCost, ...]
    per_m_allocated: float | None
    per_m_used: float | None
    per_m_good: float | None
    per_m_input_uncached: float | None
    per_m_input_billed: float | None
    per_m_output: float | None
    cache_saving_usd: float
    opportunity_usd: float
    tenants: tuple[TenantCost, ...]
    break_even: BreakEven | None
    sensitivity: tuple[Variant, ...]

    @property
    def total_usd(self) -> float:
        """What the run cost."""
        return sum(pool.total_usd for pool in self.pools)

    @property
    def used_usd(self) -> float:
        """What it cost while workers were busy."""
        return sum(pool.used_usd for pool in self.pools)

    @property
    def idle_usd(self) -> float:
        """What it cost while they were idle."""
        return self.total_usd - self.used_usd

    @property
    def usd_per_h(self) -> float:
        """What an hour of such a cluster costs."""
        return self.total_usd * 3600 / self.duration_s


def cost_of(usage: RunUsage, prices: Prices) -> CostReport:
    """Price a run.

    Raises:
        ValueError: a figure of the run that cannot be.
    """
    _check(usage)
    pools = _pool_costs(usage, prices)
    total = sum(pool.total_usd for pool in pools)
    prefill, decode = (sum(p.prefill_usd for p in pools), sum(p.decode_usd for p in pools))
    num_tokens = usage.input_tokens + usage.output_tokens
    uncached = _per_million(prefill, usage.input_tokens - usage.cached_tokens)
    return CostReport(
        duration_s=usage.duration_s,
        pools=pools,
        per_m_allocated=_per_million(total, num_tokens),
        per_m_used=_per_million(sum(pool.used_usd for pool in pools), num_tokens),
        per_m_good=_per_million(total, usage.good_tokens),
        per_m_input_uncached=uncached,
        per_m_input_billed=_per_million(prefill, usage.input_tokens),
        per_m_output=_per_million(decode, usage.output_tokens),
        cache_saving_usd=usage.cached_tokens * (uncached or 0.0) / 1e6
        - usage.cache_gib_h * prices.cache.per_gib_h,
        opportunity_usd=_opportunity(usage, prices),
        tenants=_tenant_costs(usage, pools),
        break_even=_break_even(usage, prices, total),
        sensitivity=_sensitivity(usage, prices),
    )


def gpu_usd_per_h(prices: PoolPrices) -> float:
    """Return what an hour of one GPU costs: its rent, or what was paid written off."""
    if prices.mode == "rent":
        return prices.rent_per_gpu_h
    paid = prices.capex_per_gpu * (1 + prices.overhead)
    yearly = paid * capital_recovery(prices.interest, prices.life_years)
    return yearly / HOURS_PER_YEAR / prices.availability


def capital_recovery(interest: float, life_years: float) -> float:
    """Return the share of a loan paid back each year, interest included: r / (1 - (1 + r)^-n)."""
    if interest == 0:
        return 1 / life_years
    return interest / -math.expm1(-life_years * math.log1p(interest))


def standing_usd_per_h(role: Role, prices: Prices) -> float:
    """Return what one worker costs by being there: an hour of it, idle.

    What work adds (energy) is the same for every cluster that does the same work, so this is what
    sizes of clusters are compared by.
    """
    pool = prices.pool(role)
    idle_usd = pool.idle_w / 1000 * prices.energy.pue * prices.energy.per_kwh
    energy = idle_usd if pool.mode == "own" else 0.0
    return pool.gpus_per_worker * (gpu_usd_per_h(pool) + pool.ops_per_gpu_h + energy)


def exact_shares(total_micros: int, weights: Sequence[float]) -> list[int]:
    """Split whole micro-dollars by weight, each part within one of its own; the parts add up."""
    whole = sum(weights)
    if whole <= 0:
        raise ValueError("nothing to split by")
    # Rounding where a part ends, not how large it is: what one loses the next one gets.
    ends = [round(total_micros * min(1.0, at / whole)) for at in accumulate(weights)]
    ends[-1] = total_micros
    return [end - begin for begin, end in pairwise([0, *ends])]


def _check(usage: RunUsage) -> None:
    if usage.duration_s <= 0 or not usage.pools or not usage.tenants:
        raise ValueError("a run to be priced has a duration, pools and tenants")
    for pool in usage.pools:
        # Sums of times that were rounded may be a hair above the whole.
        if not 0 <= pool.busy_s <= pool.provisioned_s * (1 + 1e-6):
            raise ValueError(
                f"pool {pool.role} was busy for {pool.busy_s} s of {pool.provisioned_s} s"
            )
    for tenant in usage.tenants:
        counts = (tenant.cached_tokens, tenant.input_tokens - tenant.cached_tokens)
        served = (*counts, tenant.output_tokens, tenant.good_tokens)
        if min(*served, tenant.prefill_busy_s, tenant.decode_busy_s) < 0:
            raise ValueError(f"tenant {tenant.tenant} was served less than nothing")


def _per_million(usd: float, num_tokens: int) -> float | None:
    return usd / num_tokens * 1e6 if num_tokens > 0 else None


def _pool_costs(usage: RunUsage, prices: Prices) -> tuple[PoolCost, ...]:
    hours = [_gpu_h(pool, prices, pool.provisioned_s) for pool in usage.pools]
    shared = prices.shared.per_h * usage.duration_s / 3600
    return tuple(
        _pool_cost(pool, prices, gpu_h, shared * gpu_h / sum(hours) if sum(hours) else 0.0)
        for pool, gpu_h in zip(usage.pools, hours, strict=True)
    )


def _pool_cost(pool: PoolUsage, prices: Prices, gpu_h: float, shared: float) -> PoolCost:
    own = prices.pool(pool.role)
    gpus, ops = gpu_h * gpu_usd_per_h(own), gpu_h * own.ops_per_gpu_h
    energy = _energy_usd(pool, prices)
    total = gpus + ops + energy + shared
    prefill = total * _prefill_share(pool)
    return PoolCost(
        role=pool.role,
        gpu_h=gpu_h,
        gpus_usd=gpus,
        ops_usd=ops,
        energy_usd=energy,
        shared_usd=shared,
        used_usd=total * pool.utilisation,
        prefill_usd=prefill,
        decode_usd=total - prefill,
    )


def _prefill_share(pool: PoolUsage) -> float:
    """Two pools split prompts from answers exactly; one pool by what it was busy with."""
    if pool.role != "aggregated":
        return 1.0 if pool.role == "prefill" else 0.0
    busy = pool.prefill_busy_s + pool.decode_busy_s
    return pool.prefill_busy_s / busy if busy else 0.5


def _gpu_h(pool: PoolUsage, prices: Prices, worker_s: float) -> float:
    return worker_s * prices.pool(pool.role).gpus_per_worker / 3600


def _energy_usd(pool: PoolUsage, prices: Prices) -> float:
    own = prices.pool(pool.role)
    if own.mode == "rent":
        return 0.0
    # Power is linear in utilisation, so its integral needs no more than the busy time.
    watt_s = own.idle_w * pool.provisioned_s + (own.max_w - own.idle_w) * pool.busy_s
    joules = watt_s * own.gpus_per_worker if pool.energy_j is None else pool.energy_j
    return joules / 3.6e6 * prices.energy.pue * prices.energy.per_kwh


def _opportunity(usage: RunUsage, prices: Prices) -> float:
    lost = (
        usage.num_violated * prices.loss.penalty_per_violation
        + usage.num_refused * prices.loss.margin_per_request
    )
    for pool in usage.pools:
        unused_s = pool.provisioned_s - pool.busy_s + pool.scaling_lag_s
        lost += _gpu_h(pool, prices, unused_s) * gpu_usd_per_h(prices.pool(pool.role))
    return lost


def _tenant_costs(usage: RunUsage, pools: Sequence[PoolCost]) -> tuple[TenantCost, ...]:
    """Give each tenant its part: prompts by the time they took, answers likewise.

    Where nothing measured the time, tokens stand for it; where nobody was served at all, nobody
    used more than another.
    """
    total = round(sum(pool.total_usd for pool in pools) * _MICROS)
    prefill = round(sum(pool.prefill_usd for pool in pools) * _MICROS)
    tenants = usage.tenants
    by_prefill = _weights(
        [t.prefill_busy_s for t in tenants],
        [t.input_tokens - t.cached_tokens for t in tenants],
    )
    by_decode = _weights([t.decode_busy_s for t in tenants], [t.output_tokens for t in tenants])
    parts = zip(
        tenants,
        exact_shares(prefill, by_prefill),
        exact_shares(total - prefill, by_decode),
        strict=True,
    )
    return tuple(
        TenantCost(t.tenant, a + b, _per_million((a + b) / _MICROS, t.good_tokens))
        for t, a, b in parts
    )


def _weights(busy_s: Sequence[float], num_tokens: Sequence[int]) -> Sequence[float]:
    if sum(busy_s) > 0:
        return busy_s
    return num_tokens if sum(num_tokens) > 0 else [1.0] * len(num_tokens)


def _break_even(usage: RunUsage, prices: Prices, total_usd: float) -> BreakEven | None:
    api, uncached = prices.api, usage.input_tokens - usage.cached_tokens
    bought = (
        uncached * api.per_m_input
        + usage.cached_tokens * api.per_m_cached
        + usage.output_tokens * api.per_m_output
    ) / 1e6
    return BreakEven(bought, total_usd / bought) if bought > 0 else None


def _sensitivity(usage: RunUsage, prices: Prices) -> tuple[Variant, ...]:
    """Price the run again: GPUs at another price, and the same work on fewer or more workers.

    Of work that nobody saw, no number of workers can be told.
    """
    variants = [
        (f"GPU price {factor - 1:+.0%}", usage, _repriced(prices, factor))
        for factor in _PRICE_FACTORS
    ]
    if any(pool.busy_s for pool in usage.pools):
        variants += [(f"utilisation {u:.0%}", _utilised(usage, u), prices) for u in _UTILISATIONS]
    return tuple(
        Variant(
            name,
            _per_million(sum(p.total_usd for p in _pool_costs(changed, at)), usage.good_tokens),
        )
        for name, changed, at in variants
    )


def _repriced(prices: Prices, factor: float) -> Prices:
    def at(pool: PoolPrices) -> PoolPrices:
        changed = {
            "rent_per_gpu_h": pool.rent_per_gpu_h * factor,
            "capex_per_gpu": pool.capex_per_gpu * factor,
        }
        return pool.model_copy(update=changed)

    pools = {
        "prefill": at(prices.prefill),
        "decode": at(prices.decode),
        "aggregated": at(prices.aggregated),
    }
    return prices.model_copy(update=pools)


def _utilised(usage: RunUsage, utilisation: float) -> RunUsage:
    pools = tuple(
        replace(pool, provisioned_s=pool.busy_s / utilisation, energy_j=None)
        for pool in usage.pools
    )
    return replace(usage, pools=pools)
