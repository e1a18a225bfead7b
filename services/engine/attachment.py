"""What a sequence reads in a peer's pool, how far it has moved home, and when it moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.config import EngineConfig
from services.kv.attached import AttachedKv


class AttachedChanged(Exception):
    """A block read in a peer's pool is no longer what was attached."""


@dataclass(slots=True, eq=False)
class Attachment:
    """Attached blocks of one sequence. They move in token order; the first `num_moved` have."""

    kv: AttachedKv
    num_moved: int = 0
    is_urgent: bool = False  # their owner wants them back, or is gone
    verifies: bool = False  # digests are checked when a block moves

    @property
    def num_left(self) -> int:
        """Blocks still read where they are."""
        return len(self.kv) - self.num_moved


def num_to_move(attached: Attachment, num_generated: int, config: EngineConfig) -> int:
    """Return how many blocks move before this step.

    Most answers are over before moving has paid for itself: whether one goes on is known only
    when it does, so nothing moves before `attach_move_after_tokens`.
    """
    if attached.is_urgent:
        return min(attached.num_left, config.attach_move_blocks_urgent)
    if num_generated <= config.attach_move_after_tokens:
        return 0
    return min(attached.num_left, config.attach_move_blocks)


def will_move(attached: Attachment, expected_tokens: int, config: EngineConfig) -> int:
    """Return how many more blocks of ours these will probably take."""
    stays = expected_tokens <= config.attach_move_after_tokens and not attached.is_urgent
    return 0 if stays else attached.num_left
