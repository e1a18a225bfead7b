"""Everything one run leaves behind, before anything is computed from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.faults import BroughtFault
from loadtest.records import RequestRecord, Sample
from loadtest.target import TargetFacts


@dataclass(slots=True)
class RunLog:
    """Records are in the order their requests became due; those still open are `CENSORED`."""

    facts: TargetFacts
    started_at: str  # ISO 8601, UTC
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    duration_s: float = 0.0
    faults: list[BroughtFault] = field(default_factory=list)
    is_interrupted: bool = False  # stopped by a person or by the budget: what there is
    num_shed: int = 0  # due, and not sent because the client had no room: a fault of the client
    notes: list[str] = field(default_factory=list)  # plain sentences, for the report
