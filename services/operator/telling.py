"""The status of a cluster: what serves, what is under way and what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.operator.cluster import ClusterCondition, ClusterStatus, RoleStatus
from services.operator.observed import DECODE, PREFILL, ROUTER, SERVING, Observed, tell_time

_MAX_MESSAGE = 1000

_Claim = tuple[bool, str, str]  # whether it holds, one word, one line


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pass found out."""

    generation: int
    before: ClusterStatus
    observed: Observed
    active: str = ""
    target: str = ""
    started_s: float | None = None  # when the target became it; None = it is what serves
    failed: str = ""  # why the target was given up
    is_changing: bool = False
    is_removed: bool = False
    policy_fault: str = ""
    spec_fault: str = ""


def told(facts: Facts, now_s: float) -> ClusterStatus:
    """Return the status; times of conditions stay while their claims do."""
    before = facts.before
    active = facts.active or before.active_revision
    claims = {
        "Available": _available(facts, active),
        "Progressing": _progressing(facts),
        "Degraded": _degraded(facts),
    }
    conditions = tuple(_condition(facts, kind, claim, now_s) for kind, claim in claims.items())
    has_failed = bool(facts.failed)
    roles = {part: _role(facts.observed, active, part) for part in SERVING}
    return ClusterStatus(
        observed_generation=facts.generation,
        active_revision=active,
        target_revision=facts.target or before.target_revision,
        rollout_started_at=None if facts.started_s is None else tell_time(facts.started_s),
        failed_generation=facts.generation if has_failed else 0,
        router=roles[ROUTER],
        prefill=roles[PREFILL],
        decode=roles[DECODE],
        conditions=conditions,
    )


def _role(observed: Observed, revision: str, component: str) -> RoleStatus:
    workload = observed.of(revision).get(component)
    if workload is None:
        return RoleStatus()
    return RoleStatus(ready=workload.serving, desired=workload.replicas)


def _available(facts: Facts, active: str) -> _Claim:
    missing = [part for part in SERVING if not _role(facts.observed, active, part).ready]
    if not missing:
        return True, "Serving", f"routers and both pools of {active} serve"
    return False, "NotServing", f"none is ready: {', '.join(missing)}"


def _progressing(facts: Facts) -> _Claim:
    if facts.is_removed:
        return True, "Removing", "requests are let finish"
    if facts.spec_fault:
        return False, "InvalidSpec", "nothing is changed"
    if facts.failed:
        return False, "RolloutFailed", f"{facts.target} was given up; {facts.active} goes on"
    if facts.active != facts.target:
        return True, "RollingOut", f"{facts.target} is started beside {facts.active}"
    others = [revision for revision in facts.observed.revisions if revision != facts.active]
    if others:
        return True, "Retiring", f"requests of {', '.join(others)} are let finish"
    if facts.started_s is not None:
        return True, "Starting", f"{facts.target} does not serve yet"
    if facts.is_changing:
        return True, "Updating", "resources are applied"
    return False, "Steady", "everything is as specified"


def _degraded(facts: Facts) -> _Claim:
    if facts.spec_fault:
        return True, "InvalidSpec", facts.spec_fault
    if facts.failed:
        return True, "RolloutFailed", facts.failed
    if facts.policy_fault:
        return True, "InvalidPolicy", facts.policy_fault
    if facts.observed.faults:
        first, *more = facts.observed.faults
        message = first.message + (f" (and {len(more)} more pods)" if more else "")
        return True, first.reason, message
    stalled = [w.name for w in facts.observed.workloads.values() if w.has_stalled]
    if stalled:
        return True, "ProgressDeadlineExceeded", f"{', '.join(stalled)}: no progress"
    return False, "AsExpected", ""


def _condition(facts: Facts, kind: str, claim: _Claim, now_s: float) -> ClusterCondition:
    holds, reason, message = claim
    status = "True" if holds else "False"
    old = _of_kind(facts.before.conditions, kind)
    is_same = old is not None and old.status == status
    return ClusterCondition.model_validate(
        {
            "type": kind,
            "status": status,
            "observed_generation": facts.generation,
            "last_transition_time": (
                old.last_transition_time if is_same and old is not None else tell_time(now_s)
            ),
            "reason": reason,
            "message": message[:_MAX_MESSAGE],
        }
    )


def _of_kind(conditions: Sequence[ClusterCondition], kind: str) -> ClusterCondition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
