"""What single scenarios measure beyond latencies, in words."""

from __future__ import annotations

from loadtest.plots import numbers
from loadtest.report.parts import NONE

# Title and how the value is written: as a figure whose name ends like this, or with a unit.
_KNOWN = {
    "hit_ratio": ("prompt tokens that were cached", "_share"),
    "ideal_hit_ratio": ("the same, in a cache without end", "_share"),
    "hit_of_ideal": ("cached, of what could have been", "_share"),
    "short_beside_long": ("short requests beside the prefill of a long one", ""),
    "short_alone": ("short requests without a long one", ""),
    **{
        f"tpot_p{share}_ms_{where}": (f"TPOT p{share} of short requests {told} a long one", "_ms")
        for share in (50, 90, 95, 99)
        for where, told in (
            ("beside_long", "beside"),
            ("alone", "without"),
            ("with_long", "in a run with"),
            ("without_long", "in one without"),
        )
    },
    "interference": ("interference: the first of these over the second", " times"),
    "sessions": ("sessions", ""),
    "sessions_whole": ("sessions that ended with their last turn", ""),
    "makespan_p50_s": ("time of a whole session, p50", "_s"),
    "makespan_p95_s": ("time of a whole session, p95", "_s"),
    "makespan_p99_s": ("time of a whole session, p99", "_s"),
    "slo_recovery_s": ("from the burst until the SLO held again", "_s"),
    "slo_debt_req_s": ("time by which requests missed their limits, added up", "_s"),
    "peak_in_flight": ("most requests in flight", ""),
    "peak_queue": ("most requests queued in the server", ""),
    "lost_in_burst": ("requests lost in the burst", ""),
    "error_share": ("requests that failed or were refused", "_share"),
    "fault_recovery_s": ("from a fault until the SLO held again, the longest", "_s"),
    "tokens_lost": ("tokens lost in whole answers", ""),
    "tokens_repeated": ("tokens that came twice", ""),
    "first_new_worker_s": ("from the burst to the first new worker", "_s"),
    "overshoot_gpu_s": ("GPU time beyond what was needed", "_s"),
}


def figure_rows(figures: dict[str, float | str | None]) -> list[tuple[str, str]]:
    """Name and write figures; one nobody named here keeps its own name."""
    return [(_title(name), _value(name, value)) for name, value in figures.items()]


def _title(name: str) -> str:
    return _KNOWN[name][0] if name in _KNOWN else numbers.title_of(name)


def _value(name: str, value: float | str | None) -> str:
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    ending = _KNOWN[name][1] if name in _KNOWN else name
    told = numbers.figure(ending, value)
    return told + ending if ending.startswith(" ") else told
