"""The one form every benchmark prints: figures, references, and bars that pass or fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from services.common.machine import machine

Figure = float | int | str | bool | None


class BenchFailed(Exception):
    """Nothing could be measured; the message says why in plain words."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One claim: a value against its bar."""

    name: str
    value: float
    bar: float
    sense: Literal[">=", "<=", "=="]

    @property
    def is_met(self) -> bool:
        """Whether the claim holds."""
        if self.sense == ">=":
            return self.value >= self.bar
        if self.sense == "<=":
            return self.value <= self.bar
        return self.value == self.bar


@dataclass(slots=True)
class BenchResult:
    """What one run measured. Units are in the names of the figures."""

    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    reference: dict[str, Figure] = field(default_factory=dict)  # measured in the same run
    bars: list[Bar] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 when every bar is met, else 1."""
        return 0 if all(bar.is_met for bar in self.bars) else 1

    def to_json(self) -> str:
        """One JSON object; NaN and infinities are refused."""
        bars = [
            {"name": b.name, "value": b.value, "bar": b.bar, "sense": b.sense, "pass": b.is_met}
            for b in self.bars
        ]
        body: Mapping[str, object] = {
            "bench": self.name,
            "machine": asdict(machine()),
            "figures": self.figures,
            "reference": self.reference,
            "bars": bars,
        }
        return json.dumps(body, indent=2, allow_nan=False)
