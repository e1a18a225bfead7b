"""The one form every benchmark prints: figures, references, and bars that pass or fail."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

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


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    cores: int
    memory_gib: int
    python: str
    commit: str


def machine() -> Machine:
    """Describe this machine and the commit of the checkout."""
    return Machine(
        cpu=_cpu_name(),
        cores=psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        python=platform.python_version(),
        commit=_commit(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
