"""Faults a scenario brings itself: what is planned, what was done, what became of requests. Pure.

They are for a cluster of this machine that `isthmus up --json-status FILE` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.figures import recovery_s
from loadtest.records import RequestRecord, Status
from loadtest.result import FaultOutcome
from loadtest.slo import Slo
from services.common.settings import Section, setting

_FAILED = (Status.ERROR, Status.TIMEOUT, Status.REJECTED)


class Fault(Section):
    """Something that is done to one process of a cluster on this machine."""

    at_s: float = setting(..., "when, from the start of the run", unit="s", ge=0)
    action: Literal["kill", "freeze", "restart"] = setting(
        ..., "kill = it ends at once, restart = it is asked to end, freeze = it stands still"
    )
    process: str = setting(
        ..., "its name, or a role: the first of it that is ready", public=True, min_length=1
    )
    for_s: float = setting(1.0, "how long it stands still", unit="s", gt=0, le=600)


@dataclass(slots=True)
class BroughtFault:
    """A fault and what became of the process."""

    fault: Fault
    at_s: float  # when it was done, or was to be
    process: str  # the name, where it was asked for by role
    back_s: float | None = None  # from then until it was ready again
    failure: str = ""  # why it could not be done


def outcomes(
    faults: Sequence[BroughtFault], records: Sequence[RequestRecord], slo: Slo, ended_s: float
) -> Iterator[FaultOutcome]:
    """Say what each fault did to the requests between it and the next one."""
    ordered = sorted(faults, key=lambda fault: fault.at_s)
    for number, brought in enumerate(ordered, 1):
        end_s = ordered[number].at_s if number < len(ordered) else ended_s
        at_s, fault = brought.at_s, brought.fault
        after = [record for record in records if at_s <= record.scheduled_s < end_s]
        open_then = [
            record
            for record in records
            if record.scheduled_s < at_s and (record.done_s is None or record.done_s >= at_s)
        ]
        touched = [*open_then, *after]
        yield FaultOutcome(
            at_s=at_s,
            action=fault.action,
            process=brought.process,
            for_s=fault.for_s if fault.action == "freeze" else None,
            failure=brought.failure,
            back_s=brought.back_s,
            recovery_s=recovery_s(after, slo, at_s, ended_s),
            num_requests=len(touched),
            num_failed=sum(record.status in _FAILED for record in touched),
        )
