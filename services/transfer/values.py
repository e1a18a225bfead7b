"""What the transfer state machines take and give: plain values, no sockets, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.kv.layout import KvLayout
from services.transfer.api import FinalInfo, FirstTokenInfo

U64Array = npt.NDArray[np.uint64]
U32Array = npt.NDArray[np.uint32]


class Peer(NamedTuple):
    """Another worker: `base` names one life of it, `route` one connection of that life."""

    base: bytes
    route: bytes


class RejectCode(IntEnum):
    """Why an OPEN was refused; numbers are those of the wire."""

    UNSPECIFIED = 0
    UNKNOWN = 1
    EXPIRED = 2
    BUSY = 3
    AUTH = 4
    LAYOUT = 5
    FENCED = 6


@dataclass(frozen=True, slots=True)
class OpenArgs:
    """What OPEN says besides the ticket."""

    attempt: int
    have: tuple[bool, ...]  # one per full block
    plane: str
    credit_bytes: int = 0
    traceparent: str = ""
    wire: KvLayout | None = None  # what a payload frame is; None = the sender's block as it is


@dataclass(frozen=True, slots=True)
class ReadyArgs:
    """Sealed full blocks [lo, lo + len(gens)) may be pulled."""

    lo: int
    gens: U64Array  # [n]
    digests: U64Array  # [n, digests_per_block]
    source_blocks: U32Array  # [n] index in the source pool

    @property
    def hi(self) -> int:
        """End of the range."""
        return self.lo + len(self.gens)


@dataclass(frozen=True, slots=True)
class FinalArgs:
    """First tokens and the frozen tail; nothing runs at decode before this came."""

    first: tuple[FirstTokenInfo, ...]
    num_tokens: int
    num_blocks: int
    tail_valid_tokens: int
    tail_source_block: int
    tail_gen: int
    tail_digest: int
    prefill_us: int
    is_single_shot: bool = False

    def info(self) -> FinalInfo:
        """Return what the worker shell is told; its own tail block it knows itself."""
        return FinalInfo(
            first=self.first,
            num_tokens=self.num_tokens,
            tail_block=None,
            tail_valid_tokens=self.tail_valid_tokens,
            prefill_us=self.prefill_us,
        )


@dataclass(frozen=True, slots=True)
class FinalBlocks:
    """The end of a prefill as the sender keeps it."""

    info: FinalInfo
    tail_gen: int = 0
    tail_digest: int = 0
