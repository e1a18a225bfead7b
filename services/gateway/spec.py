"""What a client asked for, as both front doors say it, before anything is tokenised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.light_value import light_value
from services.gateway.wire_names import FORCE_MODE
from services.text.template import ChatTurn

TokenIds = npt.NDArray[np.int64] | npt.NDArray[np.uint32]  # as JSON has them, or the wire


@light_value
class TextInput:
    """Raw prompt text."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat, to be put through the model's template."""

    turns: tuple[ChatTurn, ...]


@light_value
class TokenInput:
    """A prompt of ids; not yet checked against the vocabulary."""

    token_ids: TokenIds


PromptInput = TextInput | ChatInput | TokenInput


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How this front door calls the fields that error messages name."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    top_logprobs: str = "top_logprobs"
    force_mode: str = FORCE_MODE.name
    timeout: str = "timeout_ms"
    slo_ttft: str = "slo_ttft_ms"
    slo_tpot: str = "slo_tpot_ms"


@light_value
class GenerateSpec:
    """A request with right types; ranges are checked by services.gateway.validate."""

    prompt: PromptInput
    names: FieldNames = FieldNames()
    model: str = ""  # empty = the only model
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    priority: int = 0
    timeout_ms: int = 0  # 0 = the default
    slo_ttft_ms: int = 0  # 0 = none
    slo_tpot_ms: int = 0
    force_mode: str | None = None
