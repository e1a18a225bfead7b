"""Who is let in next: the order of waiting sequences, and the checks at the door. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.api import EngineRequest, WorkKind
from services.engine.config import EngineConfig
from services.engine.request import RequestState, Sequence

# A token of uncached work weighs as much as this much waiting: 0.4 ms is 2,500 tokens a second.
# Only the balance of "short first" against "old first" depends on it.
_TOKEN_WAIT_S = 0.0004
_AGEING_GAIN = 4.0  # an uncached token is outweighed by a quarter of its own compute time


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a work item is not taken; `code` is of ERROR_TABLE."""

    code: str
    message: str


def check_request(
    request: EngineRequest, config: EngineConfig, num_blocks: int, now: float
) -> Refusal | None:
    """Return why this work item can never run here, or None."""
    return (
        _check_sampling(request, config)
        or _check_prompt(request, config)
        or _check_generated(request, config)
        or _check_size(request, config, num_blocks)
        or _check_deadline(request, now)
    )


def _check_sampling(request: EngineRequest, config: EngineConfig) -> Refusal | None:
    sampling = request.sampling
    if sampling.max_tokens < 1:
        return Refusal("invalid_argument", "max_tokens must be at least 1")
    if not 1 <= sampling.n <= config.max_num_seqs:
        return Refusal("invalid_argument", f"n must be between 1 and {config.max_num_seqs}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        return Refusal("invalid_argument", "temperature, top_p or min_p is out of range")
    if sampling.repetition_penalty <= 0 or sampling.top_k < 0 or sampling.top_logprobs < 0:
        return Refusal(
            "invalid_argument", "repetition_penalty, top_k or top_logprobs is out of range"
        )
    return None


def _check_prompt(request: EngineRequest, config: EngineConfig) -> Refusal | None:
    tokens = request.token_ids
    if not len(tokens):
        return Refusal("empty_prompt", "the prompt has no tokens")
    if int(tokens.max()) >= config.vocab_size:
        return Refusal(
            "token_out_of_range", f"token ids must be below {config.vocab_size}, the vocabulary"
        )
    if len(request.block_hashes) != len(tokens) // config.block_size:
        return Refusal("hash_mismatch", "there must be one block hash for every full block")
    return None


def _check_generated(request: EngineRequest, config: EngineConfig) -> Refusal | None:
    resumed = request.resumed
    if request.generated and (resumed or request.sampling.n != 1):
        return Refusal("invalid_argument", "tokens so far must say which choice they are of")
    if resumed and request.kind is not WorkKind.WHOLE:
        return Refusal("invalid_argument", "several choices under way go on at one worker only")
    choices = [one.choice for one in resumed]
    if len(set(choices)) != len(choices) or not all(
        0 <= choice < request.sampling.n for choice in choices
    ):
        return Refusal("invalid_argument", "the choices that go on are not those of the request")
    for generated in (request.generated, *(one.generated for one in resumed)):
        if len(generated) >= request.sampling.max_tokens:
            return Refusal("invalid_argument", "the work item has all its tokens already")
        if not all(0 <= token < config.vocab_size for token in generated):
            return Refusal(
                "token_out_of_range", f"token ids must be below {config.vocab_size}, the vocabulary"
            )
    return None


def _check_size(request: EngineRequest, config: EngineConfig, num_blocks: int) -> Refusal | None:
    num_prompt = len(request.token_ids)
    wanted = num_prompt + request.sampling.max_tokens
    if wanted > config.max_model_len:
        return Refusal(
            "context_length_exceeded",
            f"{num_prompt} prompt tokens and max_tokens {request.sampling.max_tokens} make "
            f"{wanted}, the limit is {config.max_model_len}",
        )
    # The last token is never computed. A hand-off leaves this pool with its prompt.
    resident = wanted - 1
    if request.kind is WorkKind.PREFILL:
        resident = num_prompt + len(request.generated)
    limit = num_blocks * config.block_size
    if resident > limit:
        return Refusal(
            "prompt_too_large_for_pool",
            f"the request needs room for {resident} tokens, this worker's pool holds {limit}",
        )
    return None


def _check_deadline(request: EngineRequest, now: float) -> Refusal | None:
    if request.deadline <= now:
        return Refusal("deadline_exceeded", "the deadline had passed when the work arrived")
    return None


class AdmissionQueue:
    """Sequences without a place, ordered anew at every step.

    Order: priority, raised by waiting; then preempted ones by arrival, so that a victim is not
    overtaken again and again; then the shortest uncached work, which waiting outweighs in time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def add(self, seq: Sequence, now: float) -> None:
        """Let a sequence wait from now on."""
        seq.waiting_since = now
        self._waiting[seq] = None

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it waits."""
        self._waiting.pop(seq, None)

    def ordered(self, now: float) -> list[Sequence]:
        """Return the waiting sequences, first to be let in first."""
        return sorted(self._waiting, key=lambda seq: self._rank(seq, now))

    def has_waited_out(self, seq: Sequence, now: float) -> bool:
        """Say whether nothing may overtake this sequence any more."""
        return now - seq.waiting_since >= self._config.head_grace_s

    def num_uncached_tokens(self) -> int:
        """Prompt tokens still to compute for those who wait, but for tickets being opened."""
        return sum(seq.num_uncached_hint for seq in self.prompts())

    def prompts(self) -> list[Sequence]:
        """Return those who wait to have a prompt computed."""
        return [s for s in self._waiting if s.request.state is not RequestState.OPENING]

    def _rank(self, seq: Sequence, now: float) -> tuple[int, int, float, int]:
        waited = max(now - seq.waiting_since, 0.0)
        aged = int(waited / self._config.priority_ageing_s)
        work_s = seq.num_uncached_hint * _TOKEN_WAIT_S - waited * _AGEING_GAIN
        return (
            -(seq.request.source.priority + aged),
            0 if seq.was_preempted else 1,
            0.0 if seq.was_preempted else work_s,
            seq.request.arrival,
        )
