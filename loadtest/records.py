"""What is sent and what came of it: one planned request, one record. Pure values.

All times are seconds since the run began, on one monotonic clock. An open loop measures from the
time a request was *scheduled*: a client that is late counts against the latencies, not for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Literal


class Phase(StrEnum):
    """Part of a run. Only `MEASURE` counts in figures; the others are in the raw file."""

    WARMUP = "warmup"
    MEASURE = "measure"
    COOLDOWN = "cooldown"


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"  # an error of the server or of the connection
    TIMEOUT = "timeout"  # the client's own limit passed
    REJECTED = "rejected"  # refused before work began: 429, RESOURCE_EXHAUSTED
    CENSORED = "censored"  # still open when the run ended: counted, in no latency


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens made from a key, and only when they are sent: equal keys give equal tokens.

    Of two pieces with one key the shorter is a prefix of the longer.
    """

    key: int  # 48 bits
    num_tokens: int
    role: Literal["system", "user", "assistant"] = "user"  # where it goes as a chat


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is to read; prompts that begin with the same pieces share a prefix."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """Length: exact where token ids are sent, an estimate where words are."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a schedule.

    `at_s` is None in a closed loop, where it is due `wait_s` after `after` ended. A turn of an
    open-loop conversation has both: it is due at the later of the two.
    """

    number: int  # unique in a run; requests of equal number are equal in both arms of a comparison
    prompt: Prompt
    max_tokens: int
    at_s: float | None = None
    after: int | None = None
    wait_s: float = 0.0
    session: str = ""
    kind: str = ""  # of a mixed workload, such as `short` and `long`
    model: str = ""  # "" = the only one
    tenant: str = ""
    priority: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message brought."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """One pool as its autoscaler told last."""

    pool: str
    desired: int
    ready: int
    pending: int
    draining: int
    limited_by: str = ""  # the step that kept it from the size that metrics ask for


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a run at one moment, as its client saw it."""

    at_s: float
    in_flight: int  # sent and not ended
    loop_lag_s: float | None = None  # how late the client's event loop was; None: virtual time
    replicas: Mapping[str, int] = field(default_factory=dict)  # by pool, where the target tells
    queued: int | None = None  # in the server, where it tells
    pools: tuple[PoolSize, ...] = ()  # where an autoscaler is at work and the target tells


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it, and what the server said about itself."""

    number: int
    scheduled_s: float
    phase: Phase = Phase.MEASURE
    session: str = ""
    kind: str = ""
    tenant: str = ""
    priority: int = 0
    sent_s: float | None = None
    chunks: list[Chunk] = field(default_factory=list)  # that brought tokens
    done_s: float | None = None  # the end of the stream
    isl: int = 0  # by the server's usage where it tells it, else as planned
    cached_tokens: int | None = None  # of the prompt; None: the server does not say
    osl: int = 0  # by the server's usage where it tells it, else counted
    num_heard: int = 0  # tokens counted by the client
    num_lost: int = 0  # tokens of a whole answer that never came, where the server numbers them
    num_repeated: int = 0  # and that came twice
    status: Status = Status.CENSORED
    code: str = ""  # of an error
    retries: int = 0
    is_coarse: bool = False  # of the tokens only the first and the last have a time of their own
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    migrations: int = 0
    handoff_bytes: int = 0
    stages_ms: Mapping[str, float] = field(default_factory=dict)  # by the server, stages of api.md

    @property
    def dispatch_delay_s(self) -> float | None:
        """How late the client sent it."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the scheduled time."""
        return self.chunks[0].at_s - self.scheduled_s if self.chunks else None

    @property
    def ttft_sent_s(self) -> float | None:
        """Time to the first token, from when it was really sent."""
        if not self.chunks or self.sent_s is None:
            return None
        return self.chunks[0].at_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end of the stream, from the scheduled time."""
        return None if self.done_s is None else self.done_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after those of the first chunk; None when there are none."""
        later = sum(chunk.num_tokens for chunk in self.chunks[1:])
        return (self.chunks[-1].at_s - self.chunks[0].at_s) / later if later else None

    @property
    def itls_s(self) -> list[tuple[float, int]]:
        """Gaps between chunks, shared among a chunk's tokens: (seconds a token, tokens)."""
        if self.is_coarse:
            return []  # the mean of an answer is no gap of it: that is its TPOT
        return [((b.at_s - a.at_s) / b.num_tokens, b.num_tokens) for a, b in pairwise(self.chunks)]

    @property
    def max_stall_s(self) -> float | None:
        """The longest wait between two chunks."""
        if self.is_coarse:
            return None
        gaps = [b.at_s - a.at_s for a, b in pairwise(self.chunks)]
        return max(gaps) if gaps else None

    @property
    def handoff_gap_s(self) -> float | None:
        """How much longer the wait for the second chunk was than the median one after it.

        This is where a transfer of KV between two workers shows. None with less than three gaps.
        """
        gaps = [b.at_s - a.at_s for a, b in pairwise(self.chunks)]
        return gaps[0] - statistics.median(gaps[1:]) if len(gaps) >= _MIN_GAPS else None


_MIN_GAPS = 3
