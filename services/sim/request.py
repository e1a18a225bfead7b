"""One prompt on its way through a simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.policy import Decision, RequestFacts
from services.sim.workload import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """A request with what is known of it so far."""

    number: int
    router: int
    arrival: Arrival
    facts: RequestFacts
    names: bytes
    usual_mode: str  # where no price decides the mode
    decision: Decision | None = None
    prefill_slot: int | None = None
    decode_slot: int | None = None
    cached_tokens: int = 0
    cached_units: int = 0
    made_tokens: int = 0  # of the answer, that its client has
    prefill_began_at: float = 0.0
    source_tokens: int = 0  # of KV it holds where its prompt was computed
    first_token_at: float | None = None
    ended_at: float | None = None
    is_refused: bool = False  # no worker can hold it
    uncached_hint: int = 0  # tokens to compute as of submission: what its worker reports

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
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_token_at is not None, "a simulation ends when all are served"
        return self.first_token_at - self.arrival.at_s
