"""What a router can tell of its requests: those that run, and the last that ended. Pure.

No prompt and no answer is in any of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.light_value import light_value
from services.common.quantile import nearest_rank
from services.router.api import RequestTiming
from services.router.legs import CONTINUE, Progress
from services.router.policy import REMOTE, Decision
from services.router.timing import ttft_stages

WINDOW_S = 10.0  # of the latencies told beside the totals
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request under way. Times are monotonic seconds."""

    request_id: str
    tenant: str
    model: str
    stage: str  # waiting | prefill | handoff | decode
    received_at: float
    deadline: float
    mode: str
    workers: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    attempts: int


@light_value
class RequestReport:
    """Why a request ran where it ran, and where its time went."""

    request_id: str
    tenant: str
    model: str
    received_at: float
    outcome: str  # running, ok, cancelled, or the code of its error
    message: str = ""  # of its error
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_retries: int = 0
    choices: tuple[Decision, ...] = ()
    ttft_stages: tuple[tuple[str, int], ...] = ()  # microseconds
    timing: RequestTiming | None = None  # of one that ended well
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all requests of a router's life."""

    requests_ok: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of requests that ended well lately, seconds; zeros where there were none."""

    num_requests: int = 0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p50_s: float = 0.0
    tpot_p99_s: float = 0.0


class RecentRequests:
    """The last reports by request id, and totals of all there ever were."""

    def __init__(self, max_reports: int) -> None:
        self._max_reports = max_reports
        self._reports: OrderedDict[str, RequestReport] = OrderedDict()
        self._ok = self._failed = 0
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    def add(self, report: RequestReport) -> None:
        """Count a request that is over and remember it; the oldest is forgotten first."""
        if report.outcome == "ok":
            self._ok += 1
            self._prompt_tokens += report.prompt_tokens
            self._cached_tokens += report.cached_tokens
        elif report.outcome != "cancelled":
            self._failed += 1
        self._completion_tokens += report.completion_tokens
        self._reports[report.request_id] = report
        while len(self._reports) > self._max_reports:
            self._reports.popitem(last=False)

    def find(self, request_id: str) -> RequestReport | None:
        """Return the report of a request that is still remembered."""
        return self._reports.get(request_id)

    def newest(self, count: int) -> tuple[RequestReport, ...]:
        """Return the last reports, newest first."""
        newest = reversed(self._reports.values())
        return tuple(report for report, _ in zip(newest, range(count), strict=False))

    def totals(self, running: Iterable[RunningRequest]) -> Totals:
        """Sum up; tokens of answers under way count already."""
        under_way = sum(request.completion_tokens for request in running)
        return Totals(
            requests_ok=self._ok,
            requests_failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens + under_way,
        )

    def latencies(self, now: float) -> Latencies:
        """Look at the requests that ended well within the window."""
        ttfts: list[float] = []
        tpots: list[float] = []
        for report in reversed(self._reports.values()):
            if report.ended_at is None or now - report.ended_at > WINDOW_S:
                break
            timing = report.timing
            if timing is None:
                continue
            ttfts.append(timing.ttft_us / 1e6)
            if report.completion_tokens > 1:
                answering_us = timing.e2e_us - timing.ttft_us
                tpots.append(answering_us / 1e6 / (report.completion_tokens - 1))
        num_requests = len(ttfts)
        ttfts, tpots = ttfts or [0.0], tpots or [0.0]
        return Latencies(
            num_requests=num_requests,
            ttft_p50_s=nearest_rank(ttfts, 0.5),
            ttft_p99_s=nearest_rank(ttfts, 0.99),
            tpot_p50_s=nearest_rank(tpots, 0.5),
            tpot_p99_s=nearest_rank(tpots, 0.99),
        )


def running_request(progress: Progress) -> RunningRequest:
    """Describe a request that is not over."""
    call = progress.call
    return RunningRequest(
        request_id=call.request_id,
        tenant=call.tenant,
        model=call.model,
        stage=_stage(progress),
        received_at=call.received_at,
        deadline=call.deadline,
        mode=progress.mode,
        workers=tuple(dict.fromkeys(leg.worker_id for leg in progress.legs_to_cancel())),
        prompt_tokens=progress.facts.num_tokens,
        completion_tokens=progress.logical.completion_tokens,
        max_tokens=call.sampling.max_tokens,
        attempts=progress.attempt,
    )


def report_of(
    progress: Progress,
    outcome: str,
    *,
    message: str = "",
    timing: RequestTiming | None = None,
    ended_at: float | None = None,
) -> RequestReport:
    """Describe a request from its progress, whether it is over or not."""
    call = progress.call
    return RequestReport(
        request_id=call.request_id,
        tenant=call.tenant,
        model=call.model,
        received_at=call.received_at,
        outcome=outcome,
        message=message,
        prompt_tokens=progress.facts.num_tokens,
        cached_tokens=progress.cached_tokens,
        completion_tokens=progress.logical.completion_tokens,
        num_retries=progress.num_retries + progress.num_losses,
        choices=tuple(progress.choices),
        ttft_stages=ttft_stages(progress.marks, timing) if timing is not None else (),
        timing=timing,
        ended_at=ended_at,
    )


def _stage(progress: Progress) -> str:
    if not progress.legs:
        return "waiting"
    if not progress.logical.has_first_tokens:
        return "prefill"
    receiver = progress.newest(CONTINUE)
    if receiver is None:
        return "handoff" if progress.mode == REMOTE else "decode"
    return "handoff" if receiver.is_open and not receiver.has_tokens else "decode"
