"""Whether a worker held what hints said it held. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.ids import BlockHash
from services.common.light_value import light_value
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.router.legs import CONTINUE, Progress
from services.router.policy import STRIDE_TOKENS, Decision

MAX_LIES = 64  # withdrawn for one request


@light_value
class HintCheck:
    """How far off a decision's hit was, and the hints to withdraw."""

    error_tokens: int
    lies: tuple[BlockHash, ...] = ()


def check_progress(progress: Progress) -> HintCheck | None:
    """Judge the hints of a request by what its worker said; None where that says nothing of them.

    After a failure the first decision says nothing of the worker that did the work.
    """
    decision = progress.decision
    leg = next((g for g in progress.legs if g.kind != CONTINUE), None)
    if decision is None or decision.is_local or leg is None or not leg.has_report:
        return None
    if progress.num_retries or progress.num_losses or leg.worker_id != decision.worker.worker_id:
        return None
    return check_hints(decision, leg.cached_tokens, progress.facts.num_tokens, progress.hashes)


def check_hints(
    decision: Decision, cached_tokens: int, num_tokens: int, hashes: Sequence[BlockHash]
) -> HintCheck:
    """Compare the hit a worker was chosen for with what it found in its cache."""
    terms = decision.terms[0]
    error = _usable(terms.hit_tokens, num_tokens) - cached_tokens
    if _usable(terms.hint_tokens, num_tokens) <= cached_tokens:
        return HintCheck(error)
    first, last = cached_tokens // STRIDE_TOKENS, terms.hint_tokens // STRIDE_TOKENS
    names = hashes[HINT_STRIDE_BLOCKS - 1 :: HINT_STRIDE_BLOCKS]
    return HintCheck(error, tuple(names[first:last][:MAX_LIES]))


def _usable(hit_tokens: int, num_tokens: int) -> int:
    """Tokens of a hit that can be used: whole blocks, without the one with the last token."""
    return min(hit_tokens, (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
