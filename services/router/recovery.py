"""What to do when a part of a request fails at a worker. Pure: its state in, a plan out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.common.errors import ERROR_TABLE
from services.router.legs import CONTINUE, PREFILL, Leg, Progress

# The worker, not its answer, is what was lost: another try is no answer to a refusal.
LOSSES = frozenset({"worker_lost", "handoff_failed", "stale_incarnation"})


class Cure(Enum):
    """How a request goes on after one of its legs failed."""

    LEAVE = "leave"  # other legs carry it
    PASS_ON = "pass_on"  # the same ticket, to another decode worker
    REPLACE = "replace"  # choose anew; what the client has is not made again
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How often one request may be sent again."""

    max_retries: int  # after refusals for load and failures before the first token
    max_losses: int  # after a worker was lost or drained; with tokens at the client after any


@dataclass(frozen=True, slots=True)
class Plan:
    """A cure, why, and of PASS_ON the leg whose ticket is good."""

    cure: Cure
    reason: str
    source: Leg | None = None


def is_loss(code: str) -> bool:
    """Say whether an error means that a worker was lost, rather than that it would not."""
    return code in LOSSES


def tells_of_load(code: str) -> bool:
    """Say whether sending again would add to what the error complains of.

    A worker that is shutting down refuses whatever was on its way to it, many requests at once.
    """
    return not is_loss(code) and code != "draining"


def plan_recovery(progress: Progress, leg: Leg, code: str, limits: RecoveryLimits) -> Plan:
    """Decide how a request goes on without `leg`, which has just failed with `code`."""
    if leg.kind == PREFILL:
        receiver = progress.newest(CONTINUE)
        if receiver is not None and progress.logical.has_first_tokens:
            return Plan(Cure.LEAVE, "decode_goes_on")
        if any(other.kind == PREFILL and other.is_open for other in progress.legs):
            return Plan(Cure.LEAVE, "hedge_goes_on")
    if not ERROR_TABLE[code].retryable:
        return Plan(Cure.GIVE_UP, "not_retryable")
    # Several workers may drain at once: each of their refusals only says to ask another one.
    if not tells_of_load(code) or progress.logical.has_output:
        if progress.num_losses + progress.num_retries >= limits.max_losses:
            return Plan(Cure.GIVE_UP, "losses_spent")
    elif progress.num_retries >= limits.max_retries:
        # A refusal tells of load: trying everyone would add to it.
        return Plan(Cure.GIVE_UP, "retries_spent")
    if leg.kind == CONTINUE and not leg.has_tokens and not leg.is_given_up:
        source = leg.source
        # Its KV is there until a decode worker has taken it, which none has.
        if source is not None and not source.is_lost and not source.has_failed:
            return Plan(Cure.PASS_ON, "ticket_is_good", source)
    return Plan(Cure.REPLACE, "under_way" if progress.logical.has_output else "not_begun")
