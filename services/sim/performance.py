"""How long a worker takes, as a JSON file: measured by `isthmus profile`, or written by hand.

All times are in seconds. A prompt of which `n` tokens are not cached, whose tokens see `k` others
on average, takes `fixed + token x n + context x n x k`; a step that makes a token for each of `r`
answers, which hold `m` tokens of KV together, takes `fixed + request x r + token x m`. What the
figures come from stands in `source`. `prototype.json`, beside this module, rebuilds the published
table of policies.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from services.common.bounded_file import read_bounded
from services.common.errors import ConfigError
from services.common.settings import Section, setting
from services.kv.layout import BLOCK_TOKENS

MAX_FILE_BYTES = 1 << 16
_DAY_S = 86_400.0


class PrefillPace(Section):
    """Time of a prompt."""

    fixed_s: float = setting(0.0, "of any prompt", unit="s", ge=0, le=_DAY_S)
    token_s: float = setting(..., "for each token that is not cached", unit="s", gt=0, le=_DAY_S)
    context_s: float = setting(
        0.0, "for each such token and each token before it", unit="s", ge=0, le=_DAY_S
    )


class DecodePace(Section):
    """Time of a step that makes one token for each answer."""

    fixed_s: float = setting(..., "of any step", unit="s", gt=0, le=_DAY_S)
    request_s: float = setting(0.0, "for each answer", unit="s", ge=0, le=_DAY_S)
    token_s: float = setting(0.0, "for each token of KV they hold", unit="s", ge=0, le=_DAY_S)
    max_batch: int = setting(256, "answers at once; more wait", ge=1, le=1 << 20)


class Network(Section):
    """What carries KV from one worker to another; each worker has one such line of its own."""

    token_bytes: int = setting(..., "of KV, a token", unit="bytes", ge=0, le=1 << 30)
    bytes_s: float = setting(..., "of one worker's line", unit="bytes/s", gt=0, le=1e15)
    latency_s: float = setting(0.0, "of a handoff, whatever its size", unit="s", ge=0, le=_DAY_S)


class FitQuality(Section):
    """How far the formulas are from what was measured: |predicted / measured - 1|."""

    prefill_p50: float = setting(..., "median over the prompts measured", ge=0)
    prefill_max: float = setting(..., "worst of the prompts measured", ge=0)
    decode_p50: float = setting(..., "median over the steps measured", ge=0)
    decode_max: float = setting(..., "worst of the steps measured", ge=0)


class PerformanceModel(Section):
    """One kind of worker."""

    format: Literal[1] = setting(..., "version of this file's form")
    name: str = setting(..., "what these workers are called", min_length=1, max_length=100)
    source: str = setting(..., "where the figures come from", min_length=1, max_length=1000)
    prefill: PrefillPace
    decode: DecodePace
    chunk_tokens: int = setting(..., "of a prompt, in one step", unit="tokens", ge=1, le=1 << 24)
    kv_blocks: int = setting(
        ...,
        f"KV a worker holds, in blocks of {BLOCK_TOKENS} tokens",
        unit="blocks",
        ge=1,
        le=1 << 30,
    )
    startup_s: float = setting(
        60.0, "from asking for a worker to its first work", unit="s", ge=0, le=_DAY_S
    )
    network: Network
    fit: FitQuality | None = setting(None, "of a measured model")

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV a worker holds."""
        return self.kv_blocks * BLOCK_TOKENS

    @property
    def prefill_tok_s(self) -> float:
        """Rate at whole chunks without context: what a worker says of itself at first."""
        return self.chunk_tokens / self.prefill_s(self.chunk_tokens, 0)

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Seconds of one prompt alone; each of its tokens sees those before it."""
        mean_context = cached_tokens + uncached_tokens / 2
        pace = self.prefill
        return pace.fixed_s + uncached_tokens * (pace.token_s + pace.context_s * mean_context)

    def decode_s(self, num_answers: int, resident_tokens: float) -> float:
        """Seconds of a step that makes a token for each answer."""
        pace = self.decode
        return pace.fixed_s + pace.request_s * num_answers + pace.token_s * resident_tokens


def parse_model(text: str, where: str) -> PerformanceModel:
    """Read a model from JSON; `where` it came from is for errors.

    Raises:
        ConfigError: it is no such file; the message names the key.
    """
    try:
        return PerformanceModel.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {key or 'the file'}: {first['msg']}") from None


def read_model(path: Path) -> PerformanceModel:
    """Read a model file.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    content = read_bounded("performance model", path, MAX_FILE_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return parse_model(text, str(path))


@lru_cache(maxsize=8)
def shipped_model(name: str) -> PerformanceModel:
    """Return a model that comes with isthmus, by the name of its file."""
    found = files("services.sim") / "models" / name
    return parse_model(found.read_text(encoding="utf-8"), name)


def shipped_names() -> list[str]:
    """Return the names of the models that come with isthmus."""
    found = (entry.name for entry in (files("services.sim") / "models").iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def default_model() -> PerformanceModel:
    """Return the model that is meant where none is named."""
    return shipped_model("prototype.json")
