"""The one table of what a request may ask for, checked before anything is allocated for it."""

from __future__ import annotations

from services.common.settings import Section, setting

# Ceilings of what may be configured: messages between workers are sized for these.
MAX_CHOICES = 128
MAX_LOGPROBS = 32


class Limits(Section):
    """Upper bounds of a request; section `limits` of the configuration."""

    max_body_bytes: int = setting(
        4 << 20, "size of an HTTP body or of a gRPC request", unit="bytes", gt=0
    )
    max_json_depth: int = setting(32, "nesting of a JSON body", unit="levels", gt=0, le=512)
    max_messages: int = setting(1024, "messages of a chat", unit="messages", gt=0)
    max_prompt_tokens: int = setting(
        0, "length of a prompt; 0 = what the model's context and pools allow", unit="tokens", ge=0
    )
    max_output_tokens: int = setting(
        0, "value of max_tokens; 0 = what the model's context leaves", unit="tokens", ge=0
    )
    max_choices: int = setting(16, "value of n", unit="choices", gt=0, le=MAX_CHOICES)
    max_stop_strings: int = setting(16, "stop strings of a request", unit="strings", gt=0)
    max_stop_bytes: int = setting(256, "UTF-8 length of one stop string", unit="bytes", gt=0)
    max_logprobs: int = setting(
        20, "alternatives per token in logprobs", unit="tokens", ge=0, le=MAX_LOGPROBS
    )
    max_stop_token_ids: int = setting(64, "entries of stop_token_ids", unit="entries", gt=0)
    max_id_bytes: int = setting(
        128, "length of a request id, idempotency key or user name", unit="bytes", gt=0
    )
    inline_tokenize_bytes: int = setting(
        64 << 10, "text tokenised on the event loop; more leaves it", unit="bytes", ge=0
    )
    default_timeout_ms: int = setting(
        600_000, "time of a request that names no deadline", unit="ms", gt=0
    )
    max_timeout_ms: int = setting(
        3_600_000, "longest deadline a request may ask for", unit="ms", gt=0
    )
