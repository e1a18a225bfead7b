"""What `isthmus plan` found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.sim.cost import CostReport
    from services.sim.memory import WorkerMemory
    from services.sim.sizing import Option, Question, Sizing
    from services.sim.trials import Trial

_GIB = 1 << 30
_KEPT = {"meets": "kept", "unresolved": "not certain", "fails": "not kept"}


def sizing_lines(question: Question, sizing: Sizing, memory: WorkerMemory | None) -> Iterator[str]:
    """Write the answer for people, the verdict first."""
    yield sizing.verdict.sentence
    if not sizing.is_complete:
        yield "Time ran out: not every size that could be cheaper was tried (--budget-s)."
    for title, option in (("two pools", sizing.two_pools), ("one pool", sizing.one_pool)):
        yield ""
        if option is None:
            yield f"{title}: {_none_enough(title == 'one pool', question, sizing)}"
        else:
            yield from _option_lines(title, option)
    yield ""
    yield from _assumed_lines(question, sizing, memory)


def sizing_json(
    question: Question, sizing: Sizing, memory: WorkerMemory | None
) -> dict[str, object]:
    """Return the answer as one JSON object."""
    slo, model = question.slo, question.model
    return {
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "attain": slo.attain},
        "performance": {"name": model.name, "source": model.source, "kv_blocks": model.kv_blocks},
        "memory": None if memory is None else asdict(memory),
        "runs": [run.workload.name for run in question.runs],
        "check_runs": [run.workload.name for run in question.check_runs],
        "out_of_reach": sizing.out_of_reach,
        "verdict": asdict(sizing.verdict),
        "two_pools": None if sizing.two_pools is None else _option_json(sizing.two_pools),
        "one_pool": None if sizing.one_pool is None else _option_json(sizing.one_pool),
        "is_complete": sizing.is_complete,
        "tried": [_tried_json(trial, question) for trial in sizing.tried],
    }


def _none_enough(is_one_pool: bool, question: Question, sizing: Sizing) -> str:
    """Say how near the best size came; it may be above the target and not for certain."""
    if not sizing.is_complete:
        return "none was found in time"
    kind = [t for t in sizing.tried if bool(t.size.num_aggregated) == is_one_pool]
    best = max(kind, key=lambda trial: trial.attainment)
    low, high = best.bounds
    return (
        f"nothing up to {question.max_workers} a pool is enough for certain: at best "
        f"{best.attainment:.3f} (95 % interval {low:.3f} to {high:.3f}) with {best.size}"
    )


def _option_lines(title: str, option: Option) -> Iterator[str]:
    cost = option.cost
    size = str(option.size).removeprefix(f"{title} of ")
    yield f"{title}: {size}, ${option.usd_per_h:.2f} an hour"
    yield f"  attained      {_attained(option.trial)}"
    if option.check is None:
        yield "  confirmed     no: there was no time for it"
    else:
        yield f"  confirmed     {'yes' if option.is_confirmed else 'no'}: {_attained(option.check)}"
    yield f"  $/M tokens    {_usd(cost.per_m_good)} good, {_allocated(cost)}"
    yield f"  $/M by kind   {_by_kind(cost)}"
    yield f"  good $/M at   {_variants(cost)}"
    if cost.break_even is not None:
        share = cost.break_even.load_share
        yield f"  break-even    an API costs the same at {share:.0%} of this load"
    idle = cost.idle_usd / cost.total_usd if cost.total_usd else 0.0
    yield f"  utilisation   {_utilisation(option)}; {idle:.0%} of the cost is idle"
    limit = option.limit
    if limit is not None:
        yield (
            f"  limit         {limit.limit}, {option.limiting_role} workers: "
            f"{limit.attainment:.3f} with {limit.size}"
        )
    if option.busier is not None:
        yield f"  +20 % load    {_KEPT[option.busier.outcome]}: {_attained(option.busier)}"


def _assumed_lines(
    question: Question, sizing: Sizing, memory: WorkerMemory | None
) -> Iterator[str]:
    model, slo = question.model, question.slo
    yield (
        f"SLO: TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s * 1e3:g} ms for {slo.attain:.1%} of "
        f"requests; {sizing.out_of_reach:.1%} miss it on an idle worker"
    )
    yield f"load: {len(question.runs)} runs such as {question.runs[0].workload.name}"
    yield f"workers: {model.name} with {model.kv_tokens} tokens of KV; {model.source}"
    if memory is not None:
        yield (
            f"memory: weights {_gib(memory.weights_bytes)}, activations "
            f"{_gib(memory.activation_bytes)}, process {_gib(memory.overhead_bytes)}, KV "
            f"{_gib(model.kv_blocks * memory.block_bytes)} in {model.kv_blocks} blocks"
        )
    yield "A simulation is as good as its performance model: measure before buying."


def _attained(trial: Trial) -> str:
    low, high = trial.bounds
    runs = ", ".join(f"{share:.3f}" for share in trial.by_run)
    met = f"{trial.runs_met} of {len(trial.by_run)} runs alone: {runs}"
    return f"{trial.attainment:.3f} (95 % interval {low:.3f} to {high:.3f}; {met})"


def _allocated(cost: CostReport) -> str:
    return f"{_usd(cost.per_m_allocated)} allocated, {_usd(cost.per_m_used)} used"


def _by_kind(cost: CostReport) -> str:
    return (
        f"input {_usd(cost.per_m_input_billed)} billed, "
        f"{_usd(cost.per_m_input_uncached)} uncached; output {_usd(cost.per_m_output)}"
    )


def _variants(cost: CostReport) -> str:
    return ", ".join(f"{v.name} {_usd(v.per_m_good)}" for v in cost.sensitivity)


def _utilisation(option: Option) -> str:
    pools = (option.check or option.trial).usage.pools
    return ", ".join(f"{pool.role} {pool.utilisation:.0%}" for pool in pools)


def _usd(value: float | None) -> str:
    return "none" if value is None else f"${value:.3f}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"


def _option_json(option: Option) -> dict[str, object]:
    cost = asdict(option.cost)
    cost |= {"total_usd": option.cost.total_usd, "usd_per_h": option.cost.usd_per_h}
    return {
        **asdict(option.size),
        "usd_per_h": option.usd_per_h,
        "least_usd_per_h": option.least_usd_per_h,
        "is_confirmed": option.is_confirmed,
        "trial": _trial_json(option.trial),
        "check": None if option.check is None else _trial_json(option.check),
        "fewer": [_trial_json(trial) for trial in option.fewer],
        "limit": None if option.limit is None else option.limit.limit,
        "limiting_pool": option.limiting_role,
        "busier": None if option.busier is None else _trial_json(option.busier),
        "cost": cost,
    }


def _tried_json(trial: Trial, question: Question) -> dict[str, object]:
    usd_per_h = trial.size.usd_per_h(question.prices)
    return asdict(trial.size) | {"usd_per_h": usd_per_h} | _trial_json(trial)


def _trial_json(trial: Trial) -> dict[str, object]:
    low, high = trial.bounds
    return {
        "size": str(trial.size),
        "outcome": trial.outcome,
        "attainment": trial.attainment,
        "low": low,
        "high": high,
        "by_run": list(trial.by_run),
        "runs_met": trial.runs_met,
        "by_end": trial.by_end,
        "num_requests": trial.num_requests,
        "num_late": trial.num_late,
        "num_slow": trial.num_slow,
        "num_refused": trial.num_refused,
        "limit": trial.limit,
    }
