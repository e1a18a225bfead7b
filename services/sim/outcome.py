"""What became of simulated requests and workers, as frozen values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from services.sim.fleet import Member
from services.sim.report import OK, PoolUse, Served
from services.sim.request import Request


def served_of(request: Request) -> Served:
    """Report a request that has ended."""
    arrival, ended_at, first_at = request.arrival, request.ended_at, request.first_token_at
    if request.status != OK or ended_at is None or first_at is None:
        return Served(
            request.number, arrival.at_s, arrival.num_tokens, arrival.output_tokens,
            request.status, num_units=len(arrival.units), num_losses=request.num_losses,
            reason=request.reason, retry_after_s=request.retry_after_s,
            unsent_s=request.sent_at - arrival.at_s,
        )  # fmt: skip
    later = arrival.output_tokens - 1
    return Served(
        request.number,
        arrival.at_s,
        arrival.num_tokens,
        arrival.output_tokens,
        OK,
        num_units=len(arrival.units),
        num_losses=request.num_losses,
        ttft_s=request.ttft_s,
        tpot_s=(ended_at - first_at) / later if later else None,
        e2e_s=ended_at - arrival.at_s,
        cached_tokens=request.cached_tokens,
        cached_units=request.cached_units,
        mode=request.mode,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        unsent_s=request.sent_at - arrival.at_s,
    )


def pool_use(members: Sequence[Member], ended_at: float) -> PoolUse:
    """Report all workers there ever were in a pool, at least one."""
    workers = [member.worker for member in members]
    work = [worker.work_tokens for worker in workers]
    spans = [_span(member, ended_at) for member in members]
    # At one instant who goes makes room for who comes.
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return PoolUse(
        peak_workers=max(accumulate(step for _, step in steps)),
        provisioned_s=sum(end - begin for begin, end in spans),
        prefill_busy_s=sum(worker.prefill_busy_s for worker in workers),
        decode_busy_s=sum(worker.decode_busy_s for worker in workers),
        work_tokens=sum(work),
        busiest_to_mean=max(work) * len(work) / sum(work) if sum(work) else 1.0,
    )


def _span(member: Member, ended_at: float) -> tuple[float, float]:
    gone_at = ended_at if member.gone_at is None else min(member.gone_at, ended_at)
    return min(member.asked_at, gone_at), gone_at
