"""What an engine is told once at start."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import ConfigError
from services.kv.layout import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and targets of one engine. Times in seconds, sizes in tokens."""

    model_digest: str  # weights digest: first part of every block hash
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # prompt and output together
    block_size: int = BLOCK_TOKENS
    max_num_seqs: int = 64  # sequences computed at once; a request with n choices counts n
    max_step_tokens: int = 2048
    max_chunk_tokens: int = 512  # of one request in one step
    min_chunk_tokens: int = 16
    chunk_target_s: float = 0.05  # a cancel waits for one step, so steps are bounded by time
    chunk_target_alone_s: float = 0.1  # the same where no decode waits for the step (ADR 0010)
    initial_chunk_tokens: int = 128  # until a rate is known
    max_open_requests: int = 1024
    look_ahead: int = 8  # waiting sequences tried behind one that does not fit
    head_grace_s: float = 1.0  # after this, nothing overtakes one that does not fit
    priority_ageing_s: float = 30.0  # waiting this long counts as one priority level
    prefill_weight: float = 1.0
    decode_weight: float = 1.0
    watchdog_s: float = 3.0  # no progress for so long, or 5 predicted or usual steps, is dead
    warmup_watchdog_s: float = 60.0  # the same before the first steps are done
    idle_wait_s: float = 0.25
    # Blocks read in a peer's pool (plane attach): an answer of so many tokens never moves them.
    attach_move_after_tokens: int = 16
    attach_move_blocks: int = 4  # a step and sequence, from then on
    attach_move_blocks_urgent: int = 64  # the same when their owner wants them back

    def __post_init__(self) -> None:
        if self.block_size != BLOCK_TOKENS:
            raise ConfigError(
                f"block_size is {self.block_size}; this engine runs blocks of {BLOCK_TOKENS} tokens"
            )
        for name in ("vocab_size", "max_model_len", "max_num_seqs", "max_open_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if not 1 <= self.min_chunk_tokens <= self.max_chunk_tokens:
            raise ConfigError("min_chunk_tokens must be at least 1 and at most max_chunk_tokens")
        for name in ("attach_move_blocks", "attach_move_blocks_urgent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.max_step_tokens < self.max_num_seqs + self.min_chunk_tokens:
            raise ConfigError(
                "max_step_tokens must hold a token of each of max_num_seqs sequences and one chunk"
            )
        check_role_weights(self.prefill_weight, self.decode_weight)


def check_role_weights(prefill_weight: float, decode_weight: float) -> None:
    """Raise ConfigError unless both are finite, none negative and one positive."""
    weights = (prefill_weight, decode_weight)
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ConfigError("role weights must be non-negative and not both zero")
