"""Whether a prompt's blocks are announced as they are sealed, or all at once at its end. Pure.

An announcement wakes both sides and costs each some work beside the prefill; what it buys is that
the copy of its blocks hides under the chunks to come. Where each would cost more than it hides,
a prompt goes in a single shot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# The copy that a single shot leaves for the end; longer would be felt by the second token.
MAX_EXPOSED_S = 0.001
MIN_SAMPLES = 3  # of each cost, before anything is decided by it
_WEIGHT = 0.2  # of a new sample
_MAX_BELIEVED_S = 60.0
_MAX_OUTLIER = 4.0  # a thread that was not run for a while is no cost of ours

REASONS = (
    "nothing_left",
    "costs_unknown",
    "hides_more",
    "copy_too_long",
    "costs_more",
    "asked_again",
    "off",
)


@dataclass(frozen=True, slots=True)
class AnnouncePlan:
    """What to do, why, and the two sides of the balance in seconds."""

    is_single_shot: bool
    reason: str  # one of REASONS
    hidden_s: float = 0.0  # copying that streaming could hide, at most
    cost_s: float = 0.0  # of the announcements it needs


NOTHING_LEFT = AnnouncePlan(True, "nothing_left")  # the prefill was over before anyone asked
ASKED_AGAIN = AnnouncePlan(False, "asked_again")  # the reader waits: let it see what there is
OFF = AnnouncePlan(False, "off")


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of one plane; None while it is not."""

    announce_s: float | None = None  # of one announcement, on both sides together
    copy_s_per_byte: float | None = None
    chunk_blocks: float | None = None  # sealed by one step of the prefill


@dataclass(frozen=True, slots=True)
class Pending:
    """A prompt at the moment when its first announcement is due."""

    num_blocks: int
    num_sealed: int
    frame_bytes: int


def plan_announcements(pending: Pending, costs: Costs) -> AnnouncePlan:
    """Decide for one prompt. Never a single shot where it would expose more than it saves."""
    announce_s, copy_s_per_byte = costs.announce_s, costs.copy_s_per_byte
    if announce_s is None or copy_s_per_byte is None or costs.chunk_blocks is None:
        return AnnouncePlan(False, "costs_unknown")
    chunk_blocks = max(costs.chunk_blocks, 1.0)
    num_left = pending.num_blocks - pending.num_sealed
    # The last chunk is announced together with the end of the prefill in any case.
    num_later = max(0, math.ceil(num_left / chunk_blocks) - 1)
    copy_s = pending.frame_bytes * copy_s_per_byte  # of a block
    num_early = min(pending.num_sealed + num_later * chunk_blocks, float(pending.num_blocks))
    hidden_s, cost_s = num_early * copy_s, (1 + num_later) * announce_s
    # Each one for itself: a prompt is then never sent whole where a shorter one is not.
    most_blocks = max(float(pending.num_sealed), chunk_blocks if num_later else 0.0)
    if most_blocks * copy_s > announce_s:
        return AnnouncePlan(False, "hides_more", hidden_s, cost_s)
    if hidden_s > MAX_EXPOSED_S:
        return AnnouncePlan(False, "copy_too_long", hidden_s, cost_s)
    return AnnouncePlan(True, "costs_more", hidden_s, cost_s)


@dataclass(slots=True)
class Mean:
    """A moving mean that forgets, and does not believe a single large value."""

    value: float = 0.0
    num_samples: int = 0

    def add(self, sample: float) -> None:
        """Take a sample."""
        self.num_samples += 1
        if self.num_samples == 1:
            self.value = sample
            return
        bounded = min(sample, _MAX_OUTLIER * self.value) if self.value > 0 else sample
        # The first few count alike; later ones by a fixed weight.
        self.value += (bounded - self.value) * max(_WEIGHT, 1 / self.num_samples)

    def known(self) -> float | None:
        """Return the mean once there are enough samples."""
        return self.value if self.num_samples >= MIN_SAMPLES else None


@dataclass(slots=True)
class PlaneMeter:
    """What announcing and copying cost over one plane, as it was measured."""

    ready_s: Mean = field(default_factory=Mean)  # ours, for one announcement
    pulled_s: Mean = field(default_factory=Mean)  # ours, for the answer to one
    peer_s: Mean = field(default_factory=Mean)  # the reader's, for one announcement
    copy_s_per_byte: Mean = field(default_factory=Mean)


class CostMeter:
    """Learns what handoffs of this source cost; belongs to its thread."""

    def __init__(self) -> None:
        self._planes: dict[str, PlaneMeter] = {}
        self._chunk_blocks = Mean()

    def plane(self, name: str) -> PlaneMeter:
        """Return the meter of a plane."""
        return self._planes.setdefault(name, PlaneMeter())

    def note_chunk(self, num_blocks: int) -> None:
        """Note what a step sealed after a prompt's first one; that may have been cached."""
        self._chunk_blocks.add(float(num_blocks))

    def note_done(
        self, plane: str, num_announced: int, size_bytes: int, copy_s: float, overhead_s: float
    ) -> None:
        """Take what the reader says about a transfer that is over."""
        if copy_s > _MAX_BELIEVED_S or overhead_s > _MAX_BELIEVED_S:
            return  # no such transfer takes a minute of work
        meter = self.plane(plane)
        if num_announced > 0 and overhead_s > 0:
            meter.peer_s.add(overhead_s / num_announced)
        if size_bytes > 0 and copy_s > 0:
            meter.copy_s_per_byte.add(copy_s / size_bytes)

    def costs(self, plane: str) -> Costs:
        """Return what is known of a plane by now."""
        meter = self.plane(plane)
        parts = (meter.ready_s.known(), meter.pulled_s.known(), meter.peer_s.known())
        known = [part for part in parts if part is not None]
        return Costs(
            announce_s=sum(known) if len(known) == len(parts) else None,
            copy_s_per_byte=meter.copy_s_per_byte.known(),
            chunk_blocks=self._chunk_blocks.known(),
        )
