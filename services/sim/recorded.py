"""Which form a recorded trace has, by its name, and how that form is read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from services.sim.azure import read_azure
from services.sim.mooncake import read_trace
from services.sim.trace_file import BadTrace
from services.sim.workload import Workload

Form: TypeAlias = Literal["mooncake", "azure"]
_FORMS: dict[str, Form] = {".jsonl": "mooncake", ".csv": "azure"}


def form_of(path: Path) -> Form:
    """Return a trace's form; BadTrace where its name is of none."""
    form = _FORMS.get(Path(path.name.removesuffix(".gz")).suffix)
    if form is None:
        raise BadTrace(f"{path.name} is neither .jsonl (Mooncake) nor .csv (Azure), plain or .gz")
    return form


def read_recorded(path: Path, speedup: float = 1.0) -> Workload:
    """Read a trace of either form, to arrive `speedup` times as fast.

    Raises:
        BadTrace: its name is of no form, a line cannot be a request, or the file is damaged.
        OSError: the file cannot be read.
    """
    reader = read_trace if form_of(path) == "mooncake" else read_azure
    return reader(path, speedup)
