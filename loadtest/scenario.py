"""A scenario: what is sent, when, and what counts as good. One YAML file, validated as a whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from loadtest.arrivals import Arrivals
from loadtest.faults import Fault
from loadtest.records import Phase
from loadtest.slo import Slo
from loadtest.workloads import Workload
from services.common.bounded_file import read_bounded
from services.common.config_source import did_you_mean, parse_yaml
from services.common.errors import ConfigError
from services.common.settings import Section, setting

_MAX_FILE_BYTES = 1 << 20


class Phases(Section):
    """Parts of a run, by the time a request is due; only `measure` counts in figures."""

    warmup_s: float = setting(0.0, "before anything is measured", unit="s", ge=0)
    measure_s: float | None = setting(
        None, "what is measured; absent = to the end of arrivals that have one", unit="s", gt=0
    )
    cooldown_s: float = setting(
        0.0, "load that goes on while what was measured ends", unit="s", ge=0
    )

    @property
    def end_s(self) -> float | None:
        """When the last request may be due; None = arrivals say."""
        if self.measure_s is None:
            return None
        return self.warmup_s + self.measure_s + self.cooldown_s

    def at(self, due_s: float) -> Phase:
        """Return the phase of a request that is due then."""
        if due_s < self.warmup_s:
            return Phase.WARMUP
        if self.measure_s is not None and due_s >= self.warmup_s + self.measure_s:
            return Phase.COOLDOWN
        return Phase.MEASURE


class Share(Section):
    """Some of the sessions: who sends them, and how."""

    weight: float = setting(1.0, "part of the sessions, relative to the other shares", gt=0)
    tenant: str = setting("", "name in the figures", public=True)
    api_key_env: str = setting(
        "", "variable that holds the tenant's key; empty = the key of the run", public=True
    )
    model: str = setting("", "model or adapter to ask for; empty = the only one", public=True)
    priority: int = setting(0, "priority of the requests (gRPC)", ge=0, le=9)
    temperature: float = setting(0.0, "0 = greedy", ge=0, le=2)
    ignore_eos: bool = setting(True, "answers have exactly the planned length")


class Client(Section):
    """Bounds of the client itself."""

    max_in_flight: int = setting(
        2_048,
        "requests open at once; what an open loop has due beyond is not sent and counts against "
        "the client, other loads wait for room",
        unit="requests",
        gt=0,
        le=65_536,
    )
    timeout_s: float = setting(120.0, "longest wait for one answer", unit="s", gt=0)
    drain_s: float = setting(
        30.0, "wait for open requests after the last is due; then they are censored", unit="s", ge=0
    )


class Scenario(Section):
    """What one load test does."""

    name: str = setting(..., "in results and file names", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    description: str = setting("", "one sentence for people", public=True)
    arrivals: Annotated[Arrivals, Field(discriminator="kind", description="when sessions begin")]
    workload: Annotated[Workload, Field(discriminator="kind", description="what they send")]
    mix: tuple[Share, ...] = setting((Share(),), "shares of the sessions", min_length=1)
    slo: Slo = setting(Slo(), "limits of a good request")
    cache: Literal["natural", "cold", "warm"] = setting(
        "natural",
        "natural = prompts follow from the seed; cold = no run shares a prefix with an earlier "
        "one; warm = every shared prefix is sent once before the run",
    )
    phases: Phases = setting(Phases(), "warm-up, measurement, cool-down")
    client: Client = setting(Client(), "bounds of the client")
    faults: tuple[Fault, ...] = setting(
        (), "what `run --cluster FILE` does to the target meanwhile, at most 100", max_length=100
    )
    seed: int = setting(0, "all chance follows from it", ge=0, lt=1 << 32)
    budget_s: float = setting(
        600.0, "longest time of a run; what is open then is censored", unit="s", gt=0
    )
    quick: dict[str, Any] = setting(
        {}, "what `--quick` changes: keys of this file, laid over it section by section"
    )

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.phases.measure_s is None and not self.arrivals.has_end:
            raise ValueError(
                f"phases.measure_s is missing: arrivals of kind {self.arrivals.kind} have no end"
            )
        if self.phases.end_s is not None and self.budget_s < self.phases.end_s:
            raise ValueError(
                f"budget_s ({self.budget_s:g}) is shorter than the phases ({self.phases.end_s:g} s)"
            )
        if any(fault.at_s >= (self.phases.end_s or self.budget_s) for fault in self.faults):
            raise ValueError("faults: every at_s must be before the end of the phases")
        return self

    @property
    def digest(self) -> str:
        """Name of everything that shapes the load; equal digests may be compared."""
        shape = self.model_dump(mode="json", exclude={"description", "quick", "budget_s"})
        if not self.faults:
            del shape["faults"]  # younger than results that are to be compared
        text = json.dumps(shape, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def at_rate(self, rate_rps: float) -> Scenario:
        """Return the same load at another mean rate; ConfigError where arrivals have none."""
        arrivals = self.arrivals.at_rate(rate_rps, self.phases.end_s or 0.0)
        return self.model_copy(update={"arrivals": arrivals})


def load_scenario(path: Path, *, quick: bool = False) -> Scenario:
    """Read a scenario; ConfigError names the key and what it could have been."""
    raw = read_bounded("scenario", path, _MAX_FILE_BYTES)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return parse_scenario(parse_yaml(text, str(path)), str(path), quick=quick)


def parse_scenario(values: dict[str, Any], where: str, *, quick: bool = False) -> Scenario:
    """Validate what a file holds; types must be right as written."""
    changes = values.get("quick", {})
    if quick and isinstance(changes, dict):
        values = _laid_over(values, changes)
    try:
        return Scenario.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None


def _laid_over(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replace keys; sections are entered as long as both sides mean the same `kind`."""
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        merged[key] = change
        if isinstance(change, dict) and isinstance(old, dict):
            kind = old.get("kind")
            merged[key] = _laid_over(old, change) if change.get("kind", kind) == kind else change
    return merged


def _explain(error: ValidationError, where: str) -> str:
    lines: dict[str, str] = {}
    items = error.errors(include_url=False, include_input=False)
    for item in items:
        loc = item["loc"]
        if item["type"] == "too_short" and any(i["loc"][:-1][: len(loc)] == loc for i in items):
            continue  # a list that lacks only what is wrong in it
        key, known = _place(loc)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key{did_you_mean(str(loc[-1]), known)}"
        elif item["type"] == "union_tag_invalid":
            given, kinds = item["ctx"]["tag"], item["ctx"]["expected_tags"].replace("'", "")
            message = f"no such kind{did_you_mean(given, kinds.split(', '))}"
        lines.setdefault(key, f"{where}: {key}: {message}" if key else f"{where}: {message}")
    return "\n".join(lines.values())


def _place(loc: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """Return a location as people write it, and the keys its section knows.

    The library puts the kind of a section between its key and the keys inside.
    """
    names: list[str] = []
    found: list[type[BaseModel]] = [Scenario]
    for part in loc:
        chosen = [m for m in found if _kind(m) == part] if len(found) > 1 else []
        if chosen:
            found = chosen
            continue
        names.append(str(part))
        if isinstance(part, str) and part != loc[-1]:
            field = found[0].model_fields.get(part) if len(found) == 1 else None
            found = _sections(field.annotation) if field is not None else found
    return ".".join(names), list(found[0].model_fields) if len(found) == 1 else []


def _kind(section: type[BaseModel]) -> object:
    field = section.model_fields.get("kind")
    return None if field is None else field.default


def _sections(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]
