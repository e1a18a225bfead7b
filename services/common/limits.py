"""The one table of what a request may ask for, checked before anything is allocated for it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Upper bounds of a request; section `limits` of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(4 << 20, gt=0, description="bytes of an HTTP body or gRPC message")
    max_json_depth: int = Field(32, gt=0, le=512, description="nesting of a JSON body")
    max_messages: int = Field(1024, gt=0, description="messages of a chat")
    max_prompt_tokens: int = Field(
        0, ge=0, description="tokens of a prompt; 0 = what the model's context and pools allow"
    )
    max_output_tokens: int = Field(
        0, ge=0, description="value of max_tokens; 0 = what the model's context leaves"
    )
    max_choices: int = Field(16, gt=0, le=128, description="value of n")
    max_stop_strings: int = Field(16, gt=0, description="stop strings of a request")
    max_stop_bytes: int = Field(256, gt=0, description="UTF-8 bytes of one stop string")
    max_logprobs: int = Field(20, ge=0, description="alternatives per token in logprobs")
    max_logit_bias: int = Field(1024, ge=0, description="entries of logit_bias")
    max_stop_token_ids: int = Field(64, gt=0, description="entries of stop_token_ids")
    max_id_bytes: int = Field(
        128, gt=0, description="bytes of a request id, idempotency key or user name"
    )
    inline_tokenize_bytes: int = Field(
        64 << 10, ge=0, description="bytes of text tokenised on the event loop; more leaves it"
    )
    default_timeout_ms: int = Field(
        600_000, gt=0, description="milliseconds a request without a deadline may take"
    )
    max_timeout_ms: int = Field(
        3_600_000, gt=0, description="milliseconds a request may ask for as its deadline"
    )
