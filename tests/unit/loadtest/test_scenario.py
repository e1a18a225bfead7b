"""A scenario is validated as a whole; faults name the key and what it could have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.records import Phase
from loadtest.scenario import Phases, load_scenario, parse_scenario
from services.common.errors import ConfigError

SMALL: dict[str, Any] = {
    "name": "small",
    "arrivals": {"kind": "poisson", "rate_rps": 5.0},
    "workload": {"kind": "fixed", "isl": 8, "osl": 2},
    "phases": {"measure_s": 10},
}


def fault(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(SMALL | changes, "x.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivls": {}}, 'x.yaml: arrivls: unknown key; did you mean "arrivals"?'),
        (
            {"arrivals": {"kind": "poison", "rate_rps": 1}},
            'x.yaml: arrivals: no such kind; did you mean "poisson"?',
        ),
        (
            {"arrivals": {"kind": "poisson", "rate_rps": 1, "cv": 1}},
            "x.yaml: arrivals.cv: unknown key; known: kind, rate_rps",
        ),
        (
            {"workload": {"kind": "fixed", "isl": "8", "osl": 2}},
            "x.yaml: workload.isl: Input should be a valid integer",
        ),
        ({"mix": [{"tenat": "a"}]}, 'x.yaml: mix.0.tenat: unknown key; did you mean "tenant"?'),
        (
            {"phases": {}},
            "x.yaml: phases.measure_s is missing: arrivals of kind poisson have no end",
        ),
    ],
)
def test_faults_name_the_key(changes: dict[str, Any], message: str) -> None:
    assert fault(changes) == message


def test_a_budget_that_cuts_the_phases_is_refused() -> None:
    message = "x.yaml: budget_s (9) is shorter than the phases (10 s)"

    assert fault({"budget_s": 9}) == message


def test_names_keys_inside_parts_of_a_mixed_workload() -> None:
    part = {"name": "a", "weigh": 1, "workload": {"kind": "fixed", "isl": 8, "osl": 2}}

    message = fault({"workload": {"kind": "mixed", "parts": [part]}})

    assert message.splitlines() == [
        "x.yaml: workload.parts.0.weight: Field required",
        'x.yaml: workload.parts.0.weigh: unknown key; did you mean "weight"?',
    ]


def test_quick_changes_lie_over_sections_of_one_kind_and_replace_others() -> None:
    quick = {"arrivals": {"rate_rps": 1}, "workload": {"kind": "lognormal", "isl": {"median": 4,
             "sigma": 0}, "osl": {"median": 2, "sigma": 0}}}  # fmt: skip

    plain = parse_scenario(SMALL | {"quick": quick}, "x.yaml")
    changed = parse_scenario(SMALL | {"quick": quick}, "x.yaml", quick=True)

    assert plain.workload.kind == "fixed"
    assert changed.workload.kind == "lognormal"
    assert changed.arrivals.model_dump() == {"kind": "poisson", "rate_rps": 1.0}


def test_digest_follows_the_load_and_not_its_description() -> None:
    base = parse_scenario(SMALL, "x.yaml")

    assert parse_scenario(SMALL | {"description": "other"}, "x.yaml").digest == base.digest
    assert parse_scenario(SMALL | {"seed": 1}, "x.yaml").digest != base.digest


def test_phase_follows_from_when_a_request_is_due() -> None:
    phases = Phases(warmup_s=2, measure_s=3, cooldown_s=1)

    assert [phases.at(s) for s in (0, 1.9, 2, 4.9, 5, 9)] == [
        Phase.WARMUP, Phase.WARMUP, Phase.MEASURE, Phase.MEASURE, Phase.COOLDOWN, Phase.COOLDOWN,
    ]  # fmt: skip
    assert phases.end_s == 6


def test_another_rate_changes_nothing_else() -> None:
    scenario = parse_scenario(SMALL, "x.yaml").at_rate(20)

    assert scenario.arrivals.model_dump() == {"kind": "poisson", "rate_rps": 20.0}
    with pytest.raises(ConfigError, match="kind concurrency have no rate"):
        parse_scenario(
            SMALL | {"arrivals": {"kind": "concurrency", "sessions": 2}}, "x.yaml"
        ).at_rate(1)


def test_reads_files_and_refuses_keys_given_twice(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: a\nname: b\n")

    with pytest.raises(ConfigError, match="line 2: the key 'name' is given twice"):
        load_scenario(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.yaml")
