"""What a mock server does with requests: how long, how many at once, and how it fails."""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal, Self, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, TypeAdapter, ValidationError, model_validator

from services.common.errors import ConfigError
from services.common.settings import Section, setting

SCHEME = "mock"
Door: TypeAlias = Literal["http", "grpc"]
_FORMS = "MEAN, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA"


def _check_spread(text: str) -> str:
    draw(text, random.Random(0))
    return text


Spread = Annotated[str, AfterValidator(_check_spread)]
"""A duration in milliseconds that is drawn anew each time."""


def draw(spread: str, rng: random.Random) -> float:
    """Draw from a spread; ValueError when it is none."""
    kind, *numbers = spread.split(":") if ":" in spread else ("fixed", spread)
    try:
        given = [float(number) for number in numbers]
    except ValueError:
        raise ValueError(f"{spread!r} is no duration: give {_FORMS}") from None
    if not all(math.isfinite(number) and number >= 0 for number in given):
        raise ValueError(f"{spread!r}: numbers must be finite and not negative")
    match kind, given:
        case "fixed", [mean]:
            return mean
        case "uniform", [low, high]:
            return rng.uniform(low, high)
        case "exponential", [mean]:
            return rng.expovariate(1 / mean) if mean else 0.0
        case "lognormal", [median, sigma]:
            return median * math.exp(rng.gauss(0.0, sigma))
    raise ValueError(f"{spread!r} is no duration: give {_FORMS}")


class MockSettings(Section):
    """One mock server."""

    service_ms: Spread = setting("50", f"until the first token, once served: {_FORMS}", unit="ms")
    servers: int = setting(
        0, "requests served at once, first come first served; 0 = all of them", ge=0, le=65_536
    )
    itl_ms: Spread = setting("10", f"between tokens: {_FORMS}", unit="ms")
    tokens_per_chunk: int = setting(1, "of every chunk but the first", unit="tokens", ge=1, le=64)
    freeze_at_s: float = setting(
        0.0, "when everything stands still, from the first request on", unit="s", ge=0
    )
    freeze_s: float = setting(0.0, "for how long; 0 = never", unit="s", ge=0)
    freeze_every_s: float = setting(
        0.0, "from one standstill's start to the next's; 0 = once", unit="s", ge=0
    )
    error_share: float = setting(0.0, "part of the requests that fail as internal", ge=0, le=1)
    reject_share: float = setting(0.0, "part that is refused as overloaded", ge=0, le=1)
    slow_start_s: float = setting(
        0.0, "time in which service falls from slow_start_factor times to once", unit="s", ge=0
    )
    slow_start_factor: float = setting(1.0, "service at the start, in times", ge=1, le=1_000)
    cached_share: float = setting(0.0, "part of every prompt told as cached", ge=0, le=1)
    tells_counts: bool = setting(True, "say how many tokens an HTTP event brings")
    context_length: int = setting(1 << 20, "as told", unit="tokens", gt=0)
    vocab_size: int = setting(32_000, "as told", unit="tokens", gt=1)
    seed: int = setting(0, "all chance follows from it", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.freeze_every_s and self.freeze_every_s <= self.freeze_s:
            raise ValueError("freeze_every_s must be longer than freeze_s")
        if self.error_share + self.reject_share > 1:
            raise ValueError("error_share and reject_share must not be more than 1 together")
        return self


_SETTINGS = TypeAdapter(MockSettings)


def parse_url(url: str) -> tuple[Door, MockSettings]:
    """Read `mock://http?service_ms=50&...`; ConfigError names what is wrong."""
    parts = urlsplit(url)
    doors: dict[str, Door] = {"http": "http", "grpc": "grpc"}
    door = doors.get(parts.netloc)
    if parts.scheme != SCHEME or door is None or parts.path not in ("", "/"):
        raise ConfigError(f"{url} is no mock: give mock://http or mock://grpc, and ?KEY=VALUE&...")
    try:
        return door, _SETTINGS.validate_strings(dict(parse_qsl(parts.query, True, True)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "mock"
        raise ConfigError(f"{url}: {key}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
