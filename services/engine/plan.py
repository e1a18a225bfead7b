"""One step as values: what the scheduler wants computed, and what the runner found."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.sampling import SamplingParams
from services.engine.api import TokenArray, TokenLogprobs
from services.engine.request import Sequence
from services.kv.attached import AttachedKv


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Draw token `index` (from 0) of one choice from a row's logits.

    `generated` is the live list of the sequence: read it within the step only.
    """

    choice: int
    index: int
    params: SamplingParams
    prompt: TokenArray
    generated: Seq[int]


@dataclass(frozen=True, slots=True)
class AttachedRow:
    """What a row reads in a peer's pool: the blocks of `kv` from `first` on."""

    kv: AttachedKv
    first: int

    def is_current(self) -> bool:
        """Say, after the row was computed, whether what it read was what it should be."""
        return self.kv.is_current(self.first)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Tokens [start, start + len(token_ids)) of one sequence; its KV goes to `slots`."""

    sequence: Sequence
    start: int
    token_ids: TokenArray
    slots: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int32]
    tasks: tuple[SampleTask, ...]  # empty unless the last known token is in this row
    attached: AttachedRow | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step; none means there is nothing to compute now."""

    rows: tuple[PlanRow, ...]
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens the model is run on."""
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave: one Sampled per task, or an error that fails its request only.

    `is_stale`: blocks it read in a peer's pool have changed, and so nothing it gave counts.
    """

    samples: tuple[Sampled, ...] = ()
    error: str | None = None
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in row order."""

    rows: tuple[RowResult, ...]
    elapsed_s: float
