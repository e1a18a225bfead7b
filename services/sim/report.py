"""What a simulation found: every request, every pool. Frozen values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from services.common.quantile import nearest_rank

OK, REFUSED, LOST = "ok", "refused", "lost"


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when, by whom, and how long its client waited."""

    number: int
    arrived_s: float
    num_tokens: int
    output_tokens: int
    status: str  # ok; refused; lost: with too many workers
    ttft_s: float | None = None
    tpot_s: float | None = None  # None too of an answer of one token
    e2e_s: float | None = None
    cached_tokens: int = 0
    num_units: int = 0  # the pieces of a prompt that are cached as a whole
    cached_units: int = 0
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    num_losses: int = 0  # workers it lost on its way
    reason: str = ""  # of refused: too_large, no_workers, or what admission says
    retry_after_s: float | None = None  # of refused by admission
    unsent_s: float = 0.0  # it waited at its client for others to end; part of the other times

    def is_good(self, slo_ttft_s: float | None, slo_tpot_s: float | None) -> bool:
        """Whether it was answered within the limits; None = no limit."""
        if self.status != OK or self.ttft_s is None:
            return False
        is_first_in_time = slo_ttft_s is None or self.ttft_s <= slo_ttft_s
        return is_first_in_time and (
            slo_tpot_s is None or self.tpot_s is None or self.tpot_s <= slo_tpot_s
        )


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool over the whole run."""

    peak_workers: int
    provisioned_s: float  # worker-seconds from asking for a worker until it is gone
    prefill_busy_s: float  # worker-seconds of computing prompts
    decode_busy_s: float  # and of writing answers
    work_tokens: int  # computed of prompts
    busiest_to_mean: float  # by these tokens, of its workers

    @property
    def busy_s(self) -> float:
        """Worker-seconds with work."""
        return self.prefill_busy_s + self.decode_busy_s


@dataclass(frozen=True, slots=True)
class SimReport:
    """One run. Figures are of the requests that `skip` left, refused and lost ones included."""

    requests: tuple[Served, ...]  # by number
    pools: Mapping[str, PoolUse]  # prefill and decode, or aggregated
    duration_s: float  # from the first moment to the last answer's end
    num_events: int  # arrivals, ends of prompts, of handoffs and of answers, ticks, failures
    num_reports: int  # loads and hints that were told
    num_resyncs: int
    handoff_bytes: int
    handoff_wait_s: float  # for lines that were in use

    def skip(self, share: float) -> SimReport:
        """Return the report without the first requests: caches are cold at first."""
        return self.after(int(len(self.requests) * share))

    def after(self, count: int) -> SimReport:
        """Return the report without so many of the first requests."""
        return replace(self, requests=self.requests[count:])

    @property
    def answered(self) -> list[Served]:
        """Requests that got a whole answer."""
        return [r for r in self.requests if r.status == OK]

    @property
    def refused_share(self) -> float:
        """Share of all requests that were refused."""
        refused = sum(r.status == REFUSED for r in self.requests)
        return refused / len(self.requests) if self.requests else 0.0

    @property
    def block_hit(self) -> float:
        """Share of the pieces of answered prompts that were cached."""
        total = sum(r.num_units for r in self.answered)
        return sum(r.cached_units for r in self.answered) / total if total else 0.0

    @property
    def token_hit(self) -> float:
        """Share of the tokens of answered prompts that were cached."""
        total = sum(r.num_tokens for r in self.answered)
        return sum(r.cached_tokens for r in self.answered) / total if total else 0.0

    def attainment(self, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> float:
        """Share of all requests that were answered within the limits."""
        if not self.requests:
            return 0.0
        good = sum(r.is_good(slo_ttft_s, slo_tpot_s) for r in self.requests)
        return good / len(self.requests)

    def mean(self, figure: Callable[[Served], float | None]) -> float | None:
        """Return the mean of one figure over answered requests that have it."""
        values = self._values(figure)
        return statistics.fmean(values) if values else None

    def quantile(self, figure: Callable[[Served], float | None], share: float) -> float | None:
        """Return a nearest-rank percentile of one figure over answered requests that have it."""
        values = self._values(figure)
        return nearest_rank(values, share) if values else None

    def _values(self, figure: Callable[[Served], float | None]) -> list[float]:
        return [value for r in self.answered if (value := figure(r)) is not None]
