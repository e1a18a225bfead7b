"""What a router counts for the autoscaler, of one model. Pure.

Sums that only grow, and distributions likewise: whoever reads them takes differences over whatever
time it likes, and a word that was lost costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.log_histogram import LogHistogram

MAX_WORKERS = 256  # whose TTFT is told; the least recently used is forgotten first
_SAMPLED = 4  # one gap between tokens of so many is put into the distribution


@dataclass(frozen=True, slots=True)
class Waits:
    """What waits at this moment."""

    num_open: int = 0
    num_held: int = 0  # that no worker can take now
    queued_tokens: Mapping[str, int] = field(default_factory=dict)  # to be computed, by pool
    longest_s: float = 0.0  # that an open request has waited for its first token


@dataclass(slots=True)
class RouterSignals:
    """Belongs to the event loop."""

    last_request_at: float  # or the router's start
    num_requests: int = 0
    prompt_tokens: int = 0  # of requests that came
    ended_prompt_tokens: int = 0  # of requests that are over, for the share of the next
    ended_cached_tokens: int = 0
    output_tokens: int = 0
    itl: LogHistogram = field(default_factory=LogHistogram)
    _ttft: dict[str, LogHistogram] = field(default_factory=dict)  # by the first token's worker

    def arrived(self, prompt_tokens: int, now: float) -> None:
        """A request came, whether it will be served or not."""
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.last_request_at = now

    def first_token(self, worker_id: str, ttft_s: float) -> None:
        """A request's first token is here, so long after the request."""
        # Taken out and put back: the dictionary's order is that of use.
        ttft = self._ttft.pop(worker_id, None) or LogHistogram()
        ttft.add((ttft_s,))
        self._ttft[worker_id] = ttft
        self.output_tokens += 1
        if len(self._ttft) > MAX_WORKERS:
            del self._ttft[next(iter(self._ttft))]

    def gaps(self, gaps_s: Sequence[float]) -> None:
        """Further tokens came, so long after one another."""
        self.output_tokens += len(gaps_s)
        self.itl.add(gaps_s[::_SAMPLED])

    def ended(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request ended well."""
        self.ended_prompt_tokens += prompt_tokens
        self.ended_cached_tokens += cached_tokens

    def word(self, life: int, waits: Waits, now: float) -> str:
        """Write all of it as JSON; `life` tells one life of the router from the next."""
        idle_s = 0.0 if waits.num_open else now - self.last_request_at
        body = {
            "life": f"{life:x}",
            "requests": self.num_requests,
            "prompt": self.prompt_tokens,
            "ended_prompt": self.ended_prompt_tokens,
            "ended_cached": self.ended_cached_tokens,
            "output": self.output_tokens,
            "open": waits.num_open,
            "held": waits.num_held,
            "queued": dict(waits.queued_tokens),
            "longest_s": round(waits.longest_s, 4),
            "idle_s": round(idle_s, 3),
            "ttft": {worker: ttft.counts for worker, ttft in self._ttft.items()},
            "itl": self.itl.counts,
        }
        return json.dumps(body, separators=(",", ":"))
