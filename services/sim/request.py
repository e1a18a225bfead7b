"""One prompt on its way through a simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.router.policy import Decision, RequestFacts
from services.sim.report import OK
from services.sim.workload import Arrival


class Stage(Enum):
    """What a request is waiting for."""

    PREFILL = "prefill"  # at its prefill slot
    ROOM = "room"  # for its KV at its decode slot
    FETCH = "fetch"  # of its KV, from one to the other
    DECODE = "decode"  # at its decode slot


@dataclass(slots=True, eq=False)
class Request:
    """A request with what is known of it so far."""

    number: int
    router: int
    arrival: Arrival
    facts: RequestFacts
    names: bytes
    usual_mode: str  # where no price decides the mode
    sent_at: float  # by its client, as it was due or later
    stage: Stage = Stage.PREFILL
    leg: int = 0  # how often it was sent somewhere; what was planned of an earlier one is void
    decision: Decision | None = None
    prefill_slot: int | None = None
    decode_slot: int | None = None
    cached_tokens: int = 0
    cached_units: int = 0
    made_tokens: int = 0  # of the answer, that its client has
    prefill_began_at: float = 0.0
    prefill_ended_at: float = 0.0
    source_tokens: int = 0  # of KV it holds where its prompt was computed
    joined_at_step: float = 0.0  # of its decode worker
    first_token_at: float | None = None
    ended_at: float | None = None
    status: str = OK
    reason: str = ""  # of its refusal
    retry_after_s: float | None = None
    num_losses: int = 0  # workers that went away under it
    uncached_hint: int = 0  # tokens to compute as of submission: what its worker reports
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def rid(self) -> str:
        """Name of its reservation."""
        return f"{self.router}.{self.number}"

    @property
    def mode(self) -> str:
        """REMOTE, LOCAL or STAY."""
        return self.decision.mode if self.decision is not None else self.usual_mode

    @property
    def prompt_tokens(self) -> int:
        """What a prefill has to make KV of: the prompt, and the answer as far as it is there."""
        return self.arrival.num_tokens + self.made_tokens

    @property
    def left_tokens(self) -> int:
        """Tokens of the answer that are still to be made."""
        return self.arrival.output_tokens - self.made_tokens

    @property
    def final_tokens(self) -> int:
        """Tokens of KV it holds at its end."""
        return self.arrival.num_tokens + self.arrival.output_tokens

    @property
    def depends_on(self) -> tuple[int | None, ...]:
        """Slots of the workers without which it cannot go on as it is."""
        if self.stage is Stage.PREFILL:
            return (self.prefill_slot,)
        if self.stage is Stage.DECODE:
            return (self.decode_slot,)
        return (self.prefill_slot, self.decode_slot)

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_token_at is not None, "a simulation ends when all are served"
        return self.first_token_at - self.arrival.at_s
