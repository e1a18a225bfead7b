"""What the two transfer ends count; each field is written by its end's thread alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SourceCounters:
    """Totals of a source since its start."""

    offers: int = 0
    opened: int = 0  # OPENs answered with OPENED, repeated ones too
    renewals: int = 0  # leases prolonged by RENEW
    released: dict[str, int] = field(default_factory=dict)  # by outcome
    rejects: dict[str, int] = field(default_factory=dict)  # by code
    bad_frames: int = 0
    muted_frames: int = 0  # dropped unread: their peer has sent too many bad ones
    resends: int = 0  # blocks asked for again
    incompatible: int = 0
    asked_back: int = 0  # times a reader in place was asked to move
    plans: dict[str, int] = field(default_factory=dict)  # how prompts were announced, by reason
    unpinned: int = 0  # blocks given back before their transfer's end
    key_refusals: dict[str, int] = field(default_factory=dict)  # peers turned away, by reason
    key_file_errors: int = 0  # changes of the key file that could not be used

    def note_key_refusal(self, reason: str, count: int) -> None:
        """Count peers that were turned away for their keys."""
        self.key_refusals[reason] = self.key_refusals.get(reason, 0) + count

    def note_released(self, outcome: str) -> None:
        """Count one end of an offer."""
        self.released[outcome] = self.released.get(outcome, 0) + 1

    def note_plan(self, reason: str) -> None:
        """Count one prompt that was announced, or held back, for a reason."""
        self.plans[reason] = self.plans.get(reason, 0) + 1

    def note_reject(self, code: str) -> None:
        """Count one REJECT."""
        self.rejects[code] = self.rejects.get(code, 0) + 1


@dataclass(slots=True)
class SinkCounters:
    """Totals of a sink since its start."""

    opened: int = 0  # OPENED received for a receive that waited for it
    blocks: int = 0  # written and verified
    ready: int = 0
    attached: int = 0  # blocks verified in place, to be read there
    attach_refused: int = 0  # receives that were agreed to be read in place, and were copied
    released: dict[str, int] = field(default_factory=dict)  # by code
    integrity_errors: int = 0
    bad_frames: int = 0
    gaps: int = 0
    plane_fallbacks: int = 0  # connections that went on over a lesser plane than was agreed
    discarded_frames: int = 0
    key_refused: int = 0  # connections that no key of ours opened
    key_file_errors: int = 0  # changes of the key file that could not be used

    def note_released(self, code: str) -> None:
        """Count one receive that ended without KV."""
        self.released[code] = self.released.get(code, 0) + 1
