"""How many workers meet an SLO at the least cost: two pools, one pool, and which of them. Pure.

Every size is tried in the simulator on several runs, and counts as enough only when the interval of
its attainment is above the target. The least one of each kind is tried again on runs it was not
chosen by, and grows where those say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.common.clock import Clock
from services.common.progress import Progress, silent
from services.kv.layout import BLOCK_TOKENS
from services.sim.alone import check_reach, each_alone
from services.sim.cost import CostReport, cost_of
from services.sim.performance import PerformanceModel
from services.sim.prices import Prices, Role
from services.sim.search import PairSearch, least_pool, pair_guess
from services.sim.trials import OutOfTime, Run, Size, Slo, Trial, Trials
from services.sim.workload import Workload, faster

TWO_POOLS, ONE_POOL = "two pools", "one pool"
HEADROOM = 1.2  # times the load
_MAX_GROWTHS = 4
_GROWTH = 0.05  # of a pool, at least one worker
_MAX_SHRINKS = 6


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be served, how well, by what, for how much."""

    runs: tuple[Run, ...]  # the size is chosen by these
    check_runs: tuple[Run, ...]  # and confirmed by these
    slo: Slo
    model: PerformanceModel
    prices: Prices
    max_workers: int  # of a pool


@dataclass(frozen=True, slots=True)
class Option:
    """The least cluster of one kind that is enough. None = there was no time for it."""

    size: Size
    trial: Trial
    check: Trial | None  # on runs the size was not chosen by
    fewer: tuple[Trial, ...]  # a worker less of one pool
    busier: Trial | None  # HEADROOM times the load
    usd_per_h: float
    least_usd_per_h: float  # of the cheapest of its kind that the trials do not rule out
    cost: CostReport

    @property
    def is_confirmed(self) -> bool:
        """Whether runs it was not chosen by say the same."""
        return self.check is not None and self.check.outcome == "meets"

    @property
    def limit(self) -> Trial | None:
        """The worker whose lack would hurt most; None with nothing to take away."""
        return min(self.fewer, key=lambda t: t.attainment) if self.fewer else None

    @property
    def limiting_role(self) -> Role | None:
        """The pool of that worker."""
        if self.limit is None:
            return None
        ours, theirs = self.size.workers(), self.limit.size.workers()
        return next(role for role, number in ours.items() if theirs[role] < number)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which kind to take. `choice` is None where the trials cannot tell."""

    choice: str | None  # TWO_POOLS or ONE_POOL
    saving: float  # share of the other's cost
    sentence: str


@dataclass(frozen=True, slots=True)
class Sizing:
    """The whole answer."""

    two_pools: Option | None  # None = not even max_workers of each are enough
    one_pool: Option | None
    verdict: Verdict
    out_of_reach: float  # share of requests that miss the SLO on idle workers
    is_complete: bool  # False: time ran out, so a cheaper size may do
    tried: tuple[Trial, ...]  # on the runs that sizes are chosen by


def size_cluster(
    question: Question, clock: Clock, *, budget_s: float = math.inf, tell: Progress = silent
) -> Sizing:
    """Search both kinds of cluster, and compare them.

    Raises:
        ConfigError: an SLO that too many requests miss on idle workers.
    """
    missed = max(
        check_reach([run.workload for run in runs], question.model, question.slo)
        for runs in (question.runs, question.check_runs)
    )
    search = _Search(question, clock, clock.now() + budget_s, tell)
    # The shorter search first: without it the other's answer cannot be compared.
    one, two = search.one_pool(), search.two_pools()
    verdict = compare(two, one)
    if not search.is_complete:
        # What there was no time for may change who is cheaper.
        said = f"no verdict, {budget_s:g} s were too short; so far: {verdict.sentence}"
        verdict = Verdict(None, 0.0, said)
    return Sizing(two, one, verdict, missed, search.is_complete, search.tried)


class _Search:
    """One search: what was tried, and whether there was time for all of it."""

    def __init__(self, question: Question, clock: Clock, deadline: float, tell: Progress) -> None:
        self._question = question
        self.is_complete = True

        def trials(runs: Sequence[Run], what: str) -> Trials:
            return Trials(tuple(runs), question.model, question.slo, clock, deadline, tell, what)

        busier = [replace(run, workload=_busier(run.workload)) for run in question.check_runs]
        self._trials = trials(question.runs, "trying")
        self._checks = trials(question.check_runs, "checking")
        self._busier = trials(busier, "at more load")

    @property
    def tried(self) -> tuple[Trial, ...]:
        """Everything that was tried on the runs that sizes are chosen by."""
        return tuple(self._trials.tried.values())

    def two_pools(self) -> Option | None:
        """Find the cheapest two pools."""
        question = self._question
        search = PairSearch(
            lambda p, d: self._trials.is_enough(Size(p, d)),
            lambda p, d: self._usd_per_h(Size(p, d)),
            question.max_workers,
        )
        prefill, decode = _pools_guess(question)
        try:
            pair = search.run((prefill, decode))
            size = None if pair is None else Size(*pair)
        except OutOfTime:
            size = self._best_tried(is_one_pool=False)
        return None if size is None else self._option(size)

    def one_pool(self) -> Option | None:
        """Find the least single pool, with chunks that leave answers their time or with long ones.

        Where prompts and answers share a step, the length of its chunk is what one gives the other.
        """
        question, found = self._question, None
        guess, limit = sum(_pools_guess(question)), question.max_workers
        try:
            for chunk in (chunk_for_answers(question), 0):
                number = self._least_single(chunk, guess, limit)
                if number is None:
                    continue
                found = Size(num_aggregated=number, chunk_tokens=chunk)
                if number == 1 or not chunk:
                    break
                guess = limit = number - 1  # the other chunk has to do with less
        except OutOfTime:
            found = self._best_tried(is_one_pool=True)
        return None if found is None else self._option(found)

    def _least_single(self, chunk: int, guess: int, limit: int) -> int | None:
        def is_enough(number: int) -> bool:
            return self._trials.is_enough(Size(num_aggregated=number, chunk_tokens=chunk))

        return least_pool(is_enough, guess, limit)

    def _best_tried(self, *, is_one_pool: bool) -> Size | None:
        self.is_complete = False
        enough = [
            size
            for size, trial in self._trials.tried.items()
            if trial.outcome == "meets" and bool(size.num_aggregated) == is_one_pool
        ]
        return min(enough, key=self._usd_per_h, default=None)

    def _option(self, size: Size) -> Option:
        size, check = self._confirmed(size)
        trial = self._trials.of(size)  # tried before, so there is time
        least = self._least_not_ruled_out(size)
        fewer = tuple(t for s in _smaller(size) if (t := self._doubted(s)))
        usage = trial.usage if check is None else check.usage
        return Option(
            size=size,
            trial=trial,
            check=check,
            fewer=fewer,
            busier=self._if_time(self._busier, size),
            usd_per_h=self._usd_per_h(size),
            least_usd_per_h=self._usd_per_h(least),
            cost=cost_of(usage, self._question.prices),
        )

    def _least_not_ruled_out(self, size: Size) -> Size:
        """Take workers away, pool by pool, until the trials are sure that it is not enough."""
        least = size
        for pool in ("num_prefill", "num_decode", "num_aggregated"):
            smaller = size
            for _ in range(_MAX_SHRINKS):
                if getattr(smaller, pool) <= 1:
                    break
                smaller = replace(smaller, **{pool: getattr(smaller, pool) - 1})
                doubted = self._doubted(smaller)
                if doubted is None or doubted.outcome == "fails":
                    break
                least = min(least, smaller, key=self._usd_per_h)
        return least

    def _confirmed(self, size: Size) -> tuple[Size, Trial | None]:
        """Try a size on other runs, and let it grow while they say that it is too small."""
        check = self._if_time(self._checks, size)
        for _ in range(_MAX_GROWTHS):
            if check is None or check.outcome == "meets":
                break
            grown = _grown(size, check, self._question.max_workers)
            if self._if_time(self._trials, grown) is None:
                break
            size, check = grown, self._if_time(self._checks, grown)
        return size, check

    def _doubted(self, size: Size) -> Trial | None:
        """Try a size that should be too small; where the runs do not say so, others may."""
        trial = self._if_time(self._trials, size)
        if trial is None or trial.outcome != "meets":
            return trial
        return self._if_time(self._checks, size)

    def _if_time(self, trials: Trials, size: Size) -> Trial | None:
        try:
            return trials.of(size)
        except OutOfTime:
            self.is_complete = False
            return None

    def _usd_per_h(self, size: Size) -> float:
        return size.usd_per_h(self._question.prices)


def compare(two: Option | None, one: Option | None) -> Verdict:
    """Say which kind costs less, if the trials can tell."""
    verdict = _compared(two, one)
    doubtful = [str(o.size) for o in (two, one) if o is not None and not o.is_confirmed]
    if not doubtful:
        return verdict
    said = f"{verdict.sentence} (not confirmed by other runs: {', '.join(doubtful)})"
    return replace(verdict, sentence=said)


def _compared(two: Option | None, one: Option | None) -> Verdict:
    if two is None or one is None:
        return _only(two, one)
    ours, theirs = two.usd_per_h, one.usd_per_h
    if ours < one.least_usd_per_h:
        saving = 1 - ours / theirs
        said = f"{two.size} meet the SLO at {saving:.0%} less than {one.size}: disaggregate"
        return Verdict(TWO_POOLS, saving, said)
    if theirs < two.least_usd_per_h:
        saving = 1 - theirs / ours
        said = f"{one.size} meets the SLO at {saving:.0%} less than {two.size}: do not disaggregate"
        return Verdict(ONE_POOL, saving, said)
    if two.least_usd_per_h == ours == theirs == one.least_usd_per_h:
        return Verdict(None, 0.0, f"a tie: {two.size} and {one.size} both cost ${ours:.2f} an hour")
    said = f"too close to call: {two.size} at {_range(two)}, {one.size} at {_range(one)}"
    return Verdict(None, 0.0, f"{said}; more or longer runs may tell")


def _only(two: Option | None, one: Option | None) -> Verdict:
    """Say which of the two is enough at all."""
    if two is not None:
        return Verdict(TWO_POOLS, 0.0, f"{two.size} meet the SLO, no one pool does: disaggregate")
    if one is not None:
        said = f"{one.size} meets the SLO, no two pools do: do not disaggregate"
        return Verdict(ONE_POOL, 0.0, said)
    return Verdict(None, 0.0, "neither two pools nor one pool of that many workers is enough")


def _range(option: Option) -> str:
    if option.least_usd_per_h < option.usd_per_h:
        return f"${option.least_usd_per_h:.2f} to ${option.usd_per_h:.2f} an hour"
    return f"${option.usd_per_h:.2f} an hour"


def _busier(workload: Workload) -> Workload:
    return Workload(workload.name, workload.unit_tokens, faster(workload.arrivals, HEADROOM))


def _smaller(size: Size) -> Iterator[Size]:
    if size.num_aggregated > 1:
        yield replace(size, num_aggregated=size.num_aggregated - 1)
    if size.num_prefill > 1:
        yield replace(size, num_prefill=size.num_prefill - 1)
    if size.num_decode > 1:
        yield replace(size, num_decode=size.num_decode - 1)


def _grown(size: Size, trial: Trial, limit: int) -> Size:
    """Add to the pool whose work is late."""
    pool = "num_decode" if trial.limit in ("TPOT", "memory") else "num_prefill"
    if size.num_aggregated:
        pool = "num_aggregated"
    number = getattr(size, pool)
    return replace(size, **{pool: min(limit, number + max(1, round(number * _GROWTH)))})


def _pools_guess(question: Question) -> tuple[int, int]:
    """Guess the pools from the work of the first run, as if nothing were ever late."""
    workload, model = question.runs[0].workload, question.model
    prefill_s = decode_s = 0.0
    for alone in each_alone(workload, model):
        prefill_s += alone.ttft_s
        decode_s += alone.arrival.output_tokens * _token_s(alone.arrival.num_tokens, question)
    return pair_guess(prefill_s, decode_s, workload.arrivals[-1].at_s - workload.arrivals[0].at_s)


def chunk_for_answers(question: Question) -> int:
    """Return the longest chunk whose steps leave answers their time; 0 = the model's is no longer.

    While a worker does nothing but prompts of `n` tokens beside their answers of `m`, it begins one
    in every `n / chunk` steps and ends it `m` steps later: `m * chunk / n` answers share a step.
    """
    model, pace = question.model, question.model.prefill
    loads = list(each_alone(question.runs[0].workload, model))
    uncached, held, made = (
        sum(numbers) / len(loads)
        for numbers in zip(
            *((a.uncached_tokens, a.arrival.num_tokens, a.arrival.output_tokens) for a in loads),
            strict=True,
        )
    )
    prompt_s = pace.token_s + pace.context_s * (held - uncached / 2)
    answer_s = made / uncached * (model.decode.request_s + model.decode.token_s * (held + made))
    tokens = (question.slo.tpot_s - model.decode.fixed_s) / (prompt_s + answer_s)
    chunk = max(BLOCK_TOKENS, int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS)
    return chunk if chunk < model.chunk_tokens else 0


def _token_s(context: int, question: Question) -> float:
    """Return a worker's seconds for one token of an answer, beside as many as the SLO allows."""
    model, pace = question.model, question.model.decode
    each_s = pace.request_s + pace.token_s * context
    by_slo = (question.slo.tpot_s - pace.fixed_s) / each_s if each_s else math.inf
    batch = max(1.0, min(pace.max_batch, model.kv_tokens / context, by_slo))
    return pace.fixed_s / batch + each_s
