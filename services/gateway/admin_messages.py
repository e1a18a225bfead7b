"""What the router tells an operator, as messages of admin.proto."""

from __future__ import annotations

from services.gateway.grpc_spec import timing_message
from services.pb import admin_pb2, common_pb2
from services.registry.brief import AutoscalerBrief
from services.router.policy import Decision, Terms
from services.router.reports import WINDOW_S, Latencies, RequestReport, RunningRequest, Totals
from services.router.timing import STAGES
from services.router.view import DRAINING, WorkerView
from services.router.wire import load_message


def worker_message(worker: WorkerView, lease_ms: int) -> admin_pb2.WorkerView:
    """Show a worker as the router sees it; `lease_ms`: life of a lease."""
    load = load_message(worker.load)
    load.state = (
        common_pb2.WORKER_STATE_DRAINING
        if worker.state == DRAINING
        else common_pb2.WORKER_STATE_LIVE
    )
    lease_left_ms = worker.lease_left_ms if worker.lease_left_ms is not None else 0
    return admin_pb2.WorkerView(
        worker_id=worker.worker_id,
        address=worker.info.address,
        role=worker.role,
        state=worker.state,
        reason=worker.reason,
        incarnation=worker.incarnation,
        in_flight=worker.booked.in_flight,
        lease_age_ms=max(0, lease_ms - lease_left_ms),
        load=load,
        model=worker.info.model,
        weights_digest=worker.info.weights_digest,
    )


def autoscaler_message(brief: AutoscalerBrief | None) -> admin_pb2.Autoscaler | None:
    """Show what the autoscaler last said; None while none is at work."""
    if brief is None:
        return None
    return admin_pb2.Autoscaler(
        policy=brief.policy,
        mode=brief.mode,
        at_unix_ms=brief.at_unix_ms,
        pools=[
            admin_pb2.AutoscaledPool(
                pool=pool.pool,
                ready=pool.ready,
                pending=pool.pending,
                draining=pool.draining,
                desired=pool.desired,
                limited_by=pool.limited_by,
                reason=pool.reason,
            )
            for pool in brief.pools
        ],
        conditions=brief.conditions,
    )


def totals_message(totals: Totals, uptime_s: float) -> admin_pb2.Totals:
    """Show the sums of a router's life."""
    return admin_pb2.Totals(
        requests_ok=totals.requests_ok,
        requests_failed=totals.requests_failed,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        completion_tokens=totals.completion_tokens,
        uptime_ms=_ms(uptime_s),
    )


def latencies_message(latencies: Latencies) -> admin_pb2.Latencies:
    """Show how quick the last requests were."""
    return admin_pb2.Latencies(
        window_ms=_ms(WINDOW_S),
        num_requests=latencies.num_requests,
        ttft_p50_ms=latencies.ttft_p50_s * 1e3,
        ttft_p99_ms=latencies.ttft_p99_s * 1e3,
        tpot_p50_ms=latencies.tpot_p50_s * 1e3,
        tpot_p99_ms=latencies.tpot_p99_s * 1e3,
    )


def running_message(request: RunningRequest, now: float) -> admin_pb2.RunningRequest:
    """Show a request under way."""
    return admin_pb2.RunningRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        stage=request.stage,
        age_ms=_ms(now - request.received_at),
        mode=request.mode,
        workers=request.workers,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        max_tokens=request.max_tokens,
        attempts=request.attempts,
        deadline_left_ms=_ms(request.deadline - now),
    )


def report_message(
    report: RequestReport, router_id: str, now: float, unix_ms: int
) -> admin_pb2.ExplainRequestResponse:
    """Show why a request ran where it did, and where its time went."""
    message = admin_pb2.ExplainRequestResponse(
        router_id=router_id,
        request_id=report.request_id,
        tenant=report.tenant,
        model=report.model,
        outcome=report.outcome,
        message=report.message,
        received_unix_ms=unix_ms - _ms(now - report.received_at),
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        completion_tokens=report.completion_tokens,
        retries=report.num_retries,
        choices=[_choice(decision) for decision in report.choices],
        ttft_stages=[admin_pb2.Stage(name=name, us=us) for name, us in report.ttft_stages],
    )
    timing = report.timing
    if timing is not None:
        message.ttft_us, message.e2e_us = timing.ttft_us, timing.e2e_us
        message.timing.CopyFrom(timing_message(timing))
        for name in STAGES:
            message.stages.add(name=name, us=getattr(timing, f"{name}_us"))
    return message


def _choice(decision: Decision) -> admin_pb2.Choice:
    return admin_pb2.Choice(
        mode=decision.mode,
        worker_id=decision.worker.worker_id,
        reason=decision.reason,
        candidates=[_candidate(terms) for terms in decision.terms],
    )


def _candidate(terms: Terms) -> admin_pb2.Candidate:
    """Every term the policy has, whatever its cost model is made of."""
    candidate = admin_pb2.Candidate(worker_id=terms.worker_id, cost_s=terms.cost_s)
    for name, value in terms._asdict().items():
        if name in ("worker_id", "cost_s") or value is None:
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            candidate.terms[name] = value
        else:
            candidate.facts[name] = str(value).lower() if isinstance(value, bool) else value
    return candidate


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
