"""Limits a request has to keep to be good. Pure."""

from __future__ import annotations

from loadtest.records import RequestRecord, Status
from services.common.settings import Section, setting


class Slo(Section):
    """Limits of one request; a limit that is absent always holds."""

    ttft_s: float | None = setting(None, "longest time to the first token", unit="s", gt=0)
    tpot_s: float | None = setting(
        None, "longest mean time of a token after the first", unit="s", gt=0
    )
    max_stall_s: float | None = setting(None, "longest wait between two chunks", unit="s", gt=0)
    e2e_s: float | None = setting(None, "longest time to the end of the answer", unit="s", gt=0)

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request succeeded within every limit. A figure it has not breaks none."""
        if record.status is not Status.OK:
            return False
        # A record's figures have the names of the limits; those without one are not computed.
        limits = ((name, limit) for name, limit in self if limit is not None)
        return all((v := getattr(record, name)) is None or v <= limit for name, limit in limits)

    def judge(self, record: RequestRecord, ended_s: float) -> bool | None:
        """Return whether a request is good; None where a run's end came before that was decided.

        One that was open at the end and had already waited longer than it may is not good.
        """
        if record.status is not Status.CENSORED:
            return self.is_met(record)
        until_s = ended_s if record.done_s is None else record.done_s
        waited_s = until_s - record.scheduled_s
        is_late = (self.e2e_s is not None and waited_s > self.e2e_s) or (
            self.ttft_s is not None
            and (waited_s if record.ttft_s is None else record.ttft_s) > self.ttft_s
        )
        return False if is_late else None

    @property
    def has_limits(self) -> bool:
        """Whether anything is asked."""
        return any(limit is not None for limit in self.model_dump().values())
