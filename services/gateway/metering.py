"""What a request costs its tenant: tokens for its limits, and for its bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.rate_limits import RateLimits
from services.gateway.usage import Usage, UsageBook
from services.router.api import ChoiceDelta, RequestEnd, RouterOutput

_CHARGE_EVERY = 64  # tokens; a long answer is charged while it is written


@dataclass(slots=True)
class Bill:
    """One run of a request, from its prompt's tokens to its end, well or not.

    Tokens count when they were made for the client: of a request that failed before its first one
    nothing is billed but the request. What was delivered of an answer that broke off is billed.
    """

    tenant: str
    prompt_tokens: int
    rates: RateLimits
    book: UsageBook
    num_made: int = 0
    num_charged: int = 0
    end: RequestEnd | None = None

    def open(self) -> None:
        """Charge the prompt."""
        self.rates.charge(self.tenant, self.prompt_tokens)

    def refused(self) -> None:
        """Give the prompt back: no worker has read it."""
        if not self.num_made:
            self.rates.charge(self.tenant, -self.prompt_tokens)

    def note(self, output: RouterOutput) -> None:
        """Count an output."""
        if isinstance(output, ChoiceDelta):
            self._made(len(output.token_ids))
        elif isinstance(output, RequestEnd):
            self.end = output

    def note_written(self, times: Sequence[float]) -> None:
        """Count tokens that were written, one at each of these times."""
        self._made(len(times))

    def close(self) -> None:
        """Charge the rest, and write the bill."""
        self._charge()
        end = self.end
        if end is not None:
            usage = Usage(1, end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        elif self.num_made:
            usage = Usage(1, self.prompt_tokens, 0, self.num_made)
        else:
            usage = Usage(1)
        self.book.add(self.tenant, usage)

    def _made(self, num_tokens: int) -> None:
        self.num_made += num_tokens
        if self.num_made - self.num_charged >= _CHARGE_EVERY:
            self._charge()

    def _charge(self) -> None:
        if self.num_made > self.num_charged:
            self.rates.charge(self.tenant, self.num_made - self.num_charged)
            self.num_charged = self.num_made
