"""What the worker shell says to the two ends of the transfer layer, and what they say back.

Both ends run on threads of their own; commands are thread-safe and never block for I/O. Events
are delivered on those threads, or on the caller's before a command or a `batch` returns. A key is
the worker's name of the request (RequestKey).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from services.common.ids import BlockHash, BlockId
from services.kv.attached import AttachedKv
from services.kv.form import EXACT


@dataclass(frozen=True, slots=True)
class Offer:
    """A request whose KV may be pulled."""

    key: str
    request_id: str
    num_tokens: int  # prompt length
    block_hashes: tuple[BlockHash, ...]  # one per full prompt block
    tenant: str
    traceparent: str = ""
    is_exact: bool = True  # its KV was computed here, or came unrounded


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """First token of one choice; logprobs are (token, logprob) with the chosen one first."""

    choice: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinalInfo:
    """What FINAL carries besides the frozen tail block."""

    first: tuple[FirstTokenInfo, ...]
    num_tokens: int
    tail_block: BlockId | None
    tail_valid_tokens: int
    prefill_us: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What a finished transfer did, for traces and metrics."""

    plane: str  # of planes.PLANES_BEST_FIRST, or "" when it never opened
    peer: str
    size_bytes: int = 0
    blocks_moved: int = 0
    blocks_deduped: int = 0
    open_us: int = 0  # OPEN sent to OPENED received
    pull_us: int = 0  # first READY to last block verified
    nacks: int = 0
    blocks_attached: int = 0  # read where they are
    single_shot: bool = False  # nothing was announced before the prefill had ended


NO_STATS = TransferStats(plane="", peer="")  # of a transfer that never opened


@dataclass(frozen=True, slots=True)
class SourceReleased:
    """The sender no longer reads the blocks of `key`; sent exactly once per offer."""

    key: str
    outcome: str  # "done" | "aborted" | "expired" | "peer_lost" | "stopped"
    reason: str
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class SinkReady:
    """Every block is written and verified, its digests stored in the pool's control page."""

    key: str
    final: FinalInfo  # tail_block is None here: the receiver knows its own
    stats: TransferStats
    kv_form: str = EXACT  # what the numbers are, of blocks that were had too
    # Full blocks that were not written: verified, and to be read in the peer's pool until `detach`.
    attached: AttachedKv | None = None


@dataclass(frozen=True, slots=True)
class SinkReleased:
    """The receive failed and the receiver no longer writes; exactly one of this and SinkReady."""

    key: str
    code: str  # of ERROR_TABLE
    message: str
    can_recompute: bool  # False when cancelled by the worker itself
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class SourceUnpinned:
    """The sender no longer reads these blocks of `key`; sent before its SourceReleased."""

    key: str
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SinkMoveWanted:
    """What `key` reads in a peer's pool must be moved into ours soon; may come more than once."""

    key: str
    reason: str


SourceEvent = SourceReleased | SourceUnpinned
ReceiveEnd = SinkReady | SinkReleased
SinkEvent = ReceiveEnd | SinkMoveWanted


class Source(Protocol):
    """Prefill side: offers KV, answers pulls."""

    def start(self, on_event: Callable[[SourceEvent], None]) -> None:
        """Bind and start the threads."""
        ...

    def offer(self, offer: Offer) -> bytes:
        """Open a transfer and return its signed ticket."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """Take what is announced inside together, at the end: with one wake-up, or with none."""
        ...

    def blocks_sealed(self, key: str, lo: int, block_ids: Sequence[BlockId]) -> None:
        """Announce full blocks [lo, lo + len(block_ids))."""
        ...

    def prefill_finished(self, key: str, final: FinalInfo) -> None:
        """Announce first tokens and tail."""
        ...

    def ask_back(self) -> None:
        """Have whoever reads our blocks in place move them, now and from now on."""
        ...

    def unpin(self, key: str) -> None:
        """Memory is short: give blocks back by SourceUnpinned once their reader has them."""
        ...

    def cancel(self, key: str, reason: str) -> None:
        """Abort; SourceReleased follows when nothing reads the blocks any more."""
        ...

    def num_open(self) -> int:
        """Transfers not yet closed."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Abort everything and join the threads."""
        ...


class Sink(Protocol):
    """Decode side: pulls KV."""

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Start the threads."""
        ...

    def open(
        self,
        key: str,
        ticket: bytes,
        attempt: int,
        have: Sequence[bool],
        block_hashes: Sequence[BlockHash],
        traceparent: str = "",
        kv_form: str = EXACT,
    ) -> None:
        """Send OPEN (credit 0); pulling begins with `reserve`.

        The ticket must name exactly `block_hashes`, or the receive fails with "hash_mismatch".
        It fails too if blocks are had and are of another form than those that would come.
        """
        ...

    def form_of(self, ticket: bytes) -> str:
        """Foretell the form of the KV a ticket brings; kv.form.UNKNOWN where that is open."""
        ...

    def reserve(
        self, key: str, block_ids: Sequence[BlockId | None], tail_block: BlockId | None
    ) -> None:
        """Lend blocks to write: one per full block (None where it is had), and the tail's."""
        ...

    def cancel(self, key: str, reason: str) -> None:
        """Abort; SinkReleased follows when nothing writes the blocks any more."""
        ...

    def detach(self, key: str, *, is_intact: bool) -> None:
        """Nothing reads the attached blocks of `key` any more; `is_intact`: they never changed."""
        ...

    def num_open(self) -> int:
        """Transfers not yet ended."""
        ...

    def planes(self) -> dict[str, str]:
        """Peer worker id -> plane in use."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Abort everything and join the threads."""
        ...
