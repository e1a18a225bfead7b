"""What the autoscaler tells routers: sizes of the pools, and whether to hold requests. Values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_SIZES = ("ready", "pending", "draining", "desired")


@dataclass(frozen=True, slots=True)
class Hold:
    """Requests that nobody can serve wait for workers: so many, so long."""

    limit: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PoolBrief:
    """One pool after a tick."""

    pool: str
    ready: int
    pending: int
    draining: int
    desired: int
    limited_by: str = ""  # what kept it from the size that metrics ask for
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AutoscalerBrief:
    """After a tick."""

    policy: str
    mode: str
    at_unix_ms: int
    pools: tuple[PoolBrief, ...] = ()
    conditions: tuple[str, ...] = ()  # those that hold
    hold: Hold | None = None


def encode_brief(brief: AutoscalerBrief) -> str:
    """Write it as JSON."""
    return json.dumps(asdict(brief), separators=(",", ":"))


def decode_brief(text: str) -> AutoscalerBrief | None:
    """Read it; None when it is none, since the store is not to be trusted."""
    try:
        raw = json.loads(text)
        hold = raw["hold"]
        return AutoscalerBrief(
            policy=str(raw["policy"]),
            mode=str(raw["mode"]),
            at_unix_ms=int(raw["at_unix_ms"]),
            pools=tuple(map(_pool, raw["pools"])),
            conditions=tuple(map(str, raw["conditions"])),
            hold=None if hold is None else Hold(int(hold["limit"]), float(hold["timeout_s"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _pool(raw: Mapping[str, Any]) -> PoolBrief:  # Any: JSON
    ready, pending, draining, desired = (_size(raw[name]) for name in _SIZES)
    words = str(raw["limited_by"]), str(raw["reason"])
    return PoolBrief(str(raw["pool"]), ready, pending, draining, desired, *words)


def _size(raw: object) -> int:
    if not isinstance(raw, int) or not 0 <= raw <= 0xFFFFFFFF:
        raise ValueError("not a size")
    return raw
