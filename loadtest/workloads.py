"""What is sent: how long prompts and answers are, what they share, what waits for what.

A workload is a section of a scenario; `loadtest.sources` makes sessions of it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from services.common.settings import Section, setting

_MAX_TOKENS = 1 << 20
_MAX_TURNS = 256
_MAX_FANOUT = 16


class Spread(Section):
    """A lognormal number of tokens between two bounds."""

    median: int = setting(..., "median", unit="tokens", gt=0, le=_MAX_TOKENS)
    sigma: float = setting(..., "standard deviation of the logarithm", ge=0, le=4)
    min: int = setting(1, "no fewer", unit="tokens", gt=0, le=_MAX_TOKENS)
    max: int = setting(_MAX_TOKENS, "no more", unit="tokens", gt=0, le=_MAX_TOKENS)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.min <= self.median <= self.max:
            raise ValueError("min, median and max must be in this order")
        return self


_Tokens = Annotated[int, Field(gt=0, le=_MAX_TOKENS)]
Length: TypeAlias = _Tokens | Spread


def _length(description: str) -> Length:
    length: Length = setting(..., description, unit="tokens")
    return length


class Fixed(Section):
    """Every request alike, no two with a prefix in common."""

    kind: Literal["fixed"] = "fixed"
    isl: _Tokens = setting(..., "prompt", unit="tokens")
    osl: _Tokens = setting(..., "answer", unit="tokens")


class Lognormal(Section):
    """Lengths drawn one by one, no two prompts with a prefix in common."""

    kind: Literal["lognormal"] = "lognormal"
    isl: Spread = setting(..., "prompt", unit="tokens")
    osl: Spread = setting(..., "answer", unit="tokens")


class ShareGptLengths(Section):
    """Conversations with the lengths of recorded ones; a turn sends all that was said before."""

    kind: Literal["sharegpt_lengths"] = "sharegpt_lengths"
    file: str = setting(
        ..., "CSV with conv, turn, user_tokens, assistant_tokens, beside the scenario", public=True
    )
    turns: int = setting(1, "turns of a conversation at most", gt=0, le=_MAX_TURNS)
    system: int = setting(
        0, "tokens every conversation begins with", unit="tokens", ge=0, le=_MAX_TOKENS
    )
    max_isl: int = setting(
        _MAX_TOKENS, "a conversation ends before a longer prompt", unit="tokens", gt=0
    )
    max_osl: int = setting(_MAX_TOKENS, "answers are cut to it", unit="tokens", gt=0)
    think_s: float = setting(0.0, "mean time between turns, exponential", unit="s", ge=0)


class PrefixGroups(Section):
    """Documents that many ask about: a shared prefix, then a suffix of one's own."""

    kind: Literal["prefix_groups"] = "prefix_groups"
    groups: int = setting(..., "different prefixes", gt=0, le=1_000_000)
    prefix: _Tokens = setting(..., "shared part of a prompt", unit="tokens")
    suffix: Length = _length("own part of a prompt")
    osl: Length = _length("answer")
    zipf: float = setting(0.0, "exponent of how often a prefix is asked; 0 = all alike", ge=0, le=8)


class MultiTurn(Section):
    """Conversations of drawn lengths; a turn sends all that was said before."""

    kind: Literal["multi_turn"] = "multi_turn"
    turns: int = setting(..., "turns of every conversation", gt=0, le=_MAX_TURNS)
    user: Length = _length("what is said in a turn")
    osl: Length = _length("answer")
    system: int = setting(
        0, "tokens every conversation begins with", unit="tokens", ge=0, le=_MAX_TOKENS
    )
    think_s: float = setting(0.0, "mean time between turns, exponential", unit="s", ge=0)


class Agent(Section):
    """Trees of calls: each call follows its parent's answer and the result of a tool."""

    kind: Literal["agent"] = "agent"
    tree: tuple[Annotated[int, Field(gt=0, le=_MAX_FANOUT)], ...] = setting(
        ...,
        "calls that follow each call, level by level: [1, 2, 1] is five calls after the first",
        min_length=1,
        max_length=16,
    )
    roles: int = setting(1, "different agents, each with a system prompt", gt=0, le=10_000)
    zipf: float = setting(0.0, "exponent of how often an agent is asked", ge=0, le=8)
    system: _Tokens = setting(..., "system prompt", unit="tokens")
    task: Length = _length("what the first call adds to it")
    tool: Length = _length("result of a tool, as the next call reads it")
    osl: Length = _length("answer of a call")
    tool_wait_s: float = setting(..., "mean time of a tool, exponential", unit="s", ge=0)

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        level = total = 1
        for fanout in self.tree:
            level *= fanout
            total += level
        if total > _MAX_TURNS:
            raise ValueError(f"a tree of {total} calls is larger than {_MAX_TURNS}")
        return self


class _Recorded(Section):
    file: str = setting(..., "the trace, beside the scenario", public=True)
    scale: float = setting(
        1.0, "lengths times this: sharing stays, prompts fit a small model", gt=0, le=1
    )
    max_isl: int = setting(_MAX_TOKENS, "longer prompts are left out", unit="tokens", gt=0)
    max_osl: int = setting(_MAX_TOKENS, "answers are cut to it", unit="tokens", gt=0)


class Mooncake(_Recorded):
    """Prompts of a trace that says which blocks of 512 tokens they share."""

    kind: Literal["mooncake"] = "mooncake"


class Azure(_Recorded):
    """Prompts with the lengths of a trace, no two with a prefix in common."""

    kind: Literal["azure"] = "azure"


class Part(Section):
    """One of the workloads of a mixed one."""

    name: str = setting(..., "name in the figures", pattern=r"^[a-z0-9_-]{1,32}$")
    weight: float = setting(..., "part of the sessions, relative to the others", gt=0)
    from_s: float = setting(
        0.0, "none before this time, to see the others without it", unit="s", ge=0
    )
    workload: Annotated[Workload, Field(discriminator="kind", description="what it sends")]


class Mixed(Section):
    """Several workloads at once."""

    kind: Literal["mixed"] = "mixed"
    parts: tuple[Part, ...] = setting(..., "the workloads", min_length=2, max_length=16)

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError("two parts have one name")
        if all(part.from_s for part in self.parts):
            raise ValueError("one part must begin at 0")
        return self


Workload: TypeAlias = (
    Fixed
    | Lognormal
    | ShareGptLengths
    | PrefixGroups
    | MultiTurn
    | Agent
    | Mooncake
    | Azure
    | Mixed
)
Part.model_rebuild()
Mixed.model_rebuild()
