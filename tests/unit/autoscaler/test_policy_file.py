from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.autoscaler.policy import FAULTS, PoolAutoscalingPolicy, Role, TargetType
from services.autoscaler.policy_file import (
    EXAMPLE,
    MAX_FILE_BYTES,
    PolicyFaults,
    load_policy,
    parse_policy,
)
from services.common.errors import ConfigError

GONE = object()


@functools.cache
def example() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return values


def made(changes: Mapping[str, object]) -> dict[str, Any]:
    """The example with values set, or taken away, at places like spec.pools.1.minReplicas."""
    values: dict[str, Any] = copy.deepcopy(example())
    for place, value in changes.items():
        *way, last = (int(part) if part.isdigit() else part for part in place.split("."))
        at: Any = values
        for part in way:
            at = at[part] if isinstance(part, int) else at.setdefault(part, {})
        if value is GONE:
            del at[last]
        else:
            at[last] = value
    return values


def faults_of(changes: Mapping[str, object]) -> dict[str, str]:
    with pytest.raises(PolicyFaults) as raised:
        parse_policy(made(changes), "policy.yaml")
    return {fault.path: fault.message for fault in raised.value.faults}


def test_the_example_is_right_and_reads_as_written() -> None:
    spec = load_policy(EXAMPLE).spec
    assert [(pool.name, pool.role) for pool in spec.pools] == [
        ("prefill", Role.PREFILL),
        ("decode", Role.DECODE),
    ]
    ttft, queued = spec.pools[0].metrics
    assert (ttft.target.type, str(ttft.target.number)) == (TargetType.VALUE, "0.400")
    assert queued.target.average_value == "8192"  # written without quotes
    assert str(spec.pools[1].metrics[1].target.number) == "0.75"
    assert spec.budget.accelerator_cap == 20


Z = {"enabled": True}
SHORT = {"seasonSeconds": 100}
WEEK = {"seasonSeconds": 7 * 86_400}
POOLS = "spec.pools"
NEVER: dict[str, object] = {"spec.schedules": []}
AVERAGE = {"type": "AverageValue", "averageValue": 8}
METRIC = {"type": "External", "target": AVERAGE, "external": {"metric": {"name": "backlog"}}}

EMPTY = made({})["spec"]["pools"][1] | {"minReplicas": 0, "scaleToZero": Z}

CASES: list[tuple[dict[str, object], str, str]] = [
    # Fields by themselves.
    ({"kind": "Policy"}, "kind", "no such value"),
    ({"apiVersion": "v1"}, "apiVersion", "no such value"),
    ({"spec.mode": "auto"}, "spec.mode", 'did you mean "Auto"'),
    ({"spec.clusterRef": GONE}, "spec.clusterRef", "is missing"),
    ({"spec.tickSecond": 5}, "spec.tickSecond", 'unknown key; did you mean "tickSeconds"'),
    ({"spec.tick_seconds": 5}, "spec.tick_seconds", 'did you mean "tickSeconds"'),
    ({"spec.tickSeconds": "5"}, "spec.tickSeconds", "must be a whole number"),
    ({"spec.tickSeconds": 0}, "spec.tickSeconds", "must be at least 1"),
    ({"spec.pools": {}}, "spec.pools", "must be a list"),
    ({"spec.slo": 5}, "spec.slo", "must hold keys and values"),
    ({"spec.pools.0.name": "Pre fill"}, "spec.pools[0].name", "must match"),
    (
        {"spec.pools.1.metrics.0.target.value": "35ms"},
        "spec.pools[1].metrics[0].target.value",
        "'35ms' is no quantity",
    ),
    (
        {"spec.pools.1.metrics.0.target.value": 0.035},
        "spec.pools[1].metrics[0].target.value",
        'write it in quotes, "0.035"',
    ),
    (
        {"spec.pools.1.metrics.0.target.value": "0"},
        "spec.pools[1].metrics[0].target.value",
        "must be above 0",
    ),
    (
        {"spec.pools.1.behavior.scaleDown.policies.0.periodSeconds": 1801},
        "spec.pools[1].behavior.scaleDown.policies[0].periodSeconds",
        "must be at most 1800",
    ),
    (
        {"spec.pools.1.behavior.scaleDown.stabilizationWindowSeconds": 3601},
        "spec.pools[1].behavior.scaleDown.stabilizationWindowSeconds",
        "must be at most 3600",
    ),
    ({"spec.schedules.0.timeZone": "Berlin"}, "spec.schedules[0].timeZone", '"Europe/Berlin"'),
    ({"spec.schedules.0.start": "0 8 * *"}, "spec.schedules[0].start", "4 fields, not five"),
    ({"spec.pools.0.metrics": [METRIC] * 17}, "spec.pools[0].metrics", "must have at most 16"),
    # Metrics and their targets.
    (
        {"spec.pools.0.metrics.0.target.value": GONE},
        "spec.pools[0].metrics[0].target.value",
        "type Value needs it",
    ),
    (
        {"spec.pools.0.metrics.0.target.averageUtilization": 5},
        "spec.pools[0].metrics[0].target.averageUtilization",
        "belongs to type Utilization, not to Value",
    ),
    (
        {"spec.pools.0.metrics.0.target": AVERAGE},
        "spec.pools[0].metrics[0].target.type",
        "TTFT is held at a target of type Value",
    ),
    (
        {"spec.pools.0.metrics.0.type": "ITL"},
        "spec.pools[0].metrics[0].type",
        "ITL tells of role Decode only",
    ),
    (
        {"spec.pools.1.metrics.0.type": "TTFT"},
        "spec.pools[1].metrics[0].type",
        "TTFT tells of role Prefill only",
    ),
    (
        {"spec.pools.0.metrics.1": {"type": "TTFT", "target": {"type": "Value", "value": "1"}}},
        "spec.pools[0].metrics[1]",
        "TTFT is there twice",
    ),
    (
        {"spec.pools.1.metrics.0": {"type": "External", "target": AVERAGE}},
        "spec.pools[1].metrics[0].external",
        "type External needs it",
    ),
    (
        {"spec.pools.1.metrics.0.external": METRIC["external"]},
        "spec.pools[1].metrics[0].external",
        "belongs to type External, not to ITL",
    ),
    (
        {"spec.pools.1.metrics.0": METRIC | {"external": {"metric": {"name": "a) or vector(1"}}}},
        "spec.pools[1].metrics[0].external.metric.name",
        "must match",
    ),
    # Sizes.
    ({"spec.pools.1.minReplicas": 17}, "spec.pools[1].minReplicas", "17 is more than maxReplicas"),
    (
        {"spec.pools.1.initialReplicas": 1},
        "spec.pools[1].initialReplicas",
        "1 is not within minReplicas to maxReplicas, 2 to 16",
    ),
    (
        {"spec.pools.0.minReplicas": 0, "spec.pools.1": EMPTY},
        "spec.pools[0].minReplicas",
        "0 needs scaleToZero.enabled",
    ),
    (
        {"spec.pools.0.minReplicas": 0, "spec.pools.0.scaleToZero": Z},
        "spec.pools",
        "0 for both pools or for none",
    ),
    (
        {"spec.pools.0.scaleToZero": {"enabled": True, "activationTimeoutSeconds": 100}},
        "spec.pools[0].scaleToZero.activationTimeoutSeconds",
        "held requests would never see a replica",
    ),
    ({"spec.pools.1.name": "prefill"} | NEVER, "spec.pools[1].name", "is there already"),
    ({"spec.pools.1": GONE}, "spec.pools", "1 of Prefill, 0 of Decode"),
    ({"spec.pools": []}, "spec.pools", "0 of Prefill, 0 of Decode"),
    # How fast, how sure.
    (
        {"spec.pools.0.startup.failureDeadlineSeconds": 100},
        "spec.pools[0].startup.failureDeadlineSeconds",
        "every start would be given up",
    ),
    (
        {"spec.pools.1.behavior.scaleDown.policies": []},
        "spec.pools[1].behavior.scaleDown.policies",
        "must not be empty where selectPolicy is Min",
    ),
    (
        {"spec.pools.1.behavior.scaleUp.policies": []},
        "spec.pools[1].behavior.scaleUp.policies",
        "must not be empty where selectPolicy is Max",
    ),
    ({"spec.pools.1.tolerance.scaleDown": "1"}, "spec.pools[1].tolerance.scaleDown", "below 1"),
    ({"spec.pools.1.tolerance.scaleUp": "11"}, "spec.pools[1].tolerance.scaleUp", "at most 10"),
    (
        {"spec.metrics.staleAfterSeconds": 4},
        "spec.metrics.staleAfterSeconds",
        "4 is less than tickSeconds, 5",
    ),
    # Both pools together.
    (
        {"spec.ratio.minPrefillPerDecode": "3"},
        "spec.ratio.minPrefillPerDecode",
        "3 is more than maxPrefillPerDecode, 2",
    ),
    ({"spec.ratio.mode": "Fixed"}, "spec.ratio.prefillPerDecode", "mode Fixed needs it"),
    (
        {"spec.ratio.prefillPerDecode": "1"},
        "spec.ratio.prefillPerDecode",
        "mode Range does not read it",
    ),
    (
        {"spec.ratio.mode": "Fixed", "spec.ratio.prefillPerDecode": "3"} | NEVER,
        "spec.ratio.prefillPerDecode",
        "3 is outside the range, 0.25 to 2",
    ),
    (NEVER | {"spec.pools.0.maxReplicas": 1, "spec.pools.1.minReplicas": 5}, POOLS, "no sizes"),
    (NEVER | {"spec.pools.0.minReplicas": 8, "spec.pools.1.maxReplicas": 3}, POOLS, "no sizes"),
    (
        {"spec.budget.costPerAcceleratorHour": GONE},
        "spec.budget.costPerAcceleratorHour",
        "maxCostPerHour needs it",
    ),
    ({"spec.budget.minAccelerators": 21}, "spec.budget.minAccelerators", "the most allowed, 20"),
    (
        {"spec.pools.1.acceleratorsPerReplica": 8, "spec.budget.maxAccelerators": 16} | NEVER,
        "spec.pools",
        "minReplicas take 17 accelerators together, the budget allows 16",
    ),
    (
        {"spec.pools.1.initialReplicas": 16, "spec.pools.0.initialReplicas": 8},
        "spec.pools",
        "initialReplicas take 24 accelerators together",
    ),
    (
        {"spec.budget.maxCostPerHour": "7"} | NEVER,
        "spec.pools",
        "minReplicas take 3 accelerators together, the budget allows 2",
    ),
    (
        {"spec.budget": {"minAccelerators": 25}},
        "spec.pools",
        "maxReplicas take 24 accelerators together, budget.minAccelerators is 25",
    ),
    # Schedules.
    (
        {"spec.schedules.0.pools": {"prefil": {"minReplicas": 2}}},
        "spec.schedules[0].pools.prefil",
        'no such pool; did you mean "prefill"',
    ),
    (
        {"spec.schedules.0.pools.prefill": {}},
        "spec.schedules[0].pools.prefill.minReplicas",
        "neither it nor maxReplicas is given",
    ),
    (
        {"spec.schedules.0.pools.prefill": {"minReplicas": 9}},
        "spec.schedules[0].pools.prefill",
        "minReplicas, 9, is more than maxReplicas, 8",
    ),
    (
        {"spec.schedules.0.pools.decode": {"maxReplicas": 1}},
        "spec.schedules[0].pools.decode",
        "minReplicas, 2, is more than maxReplicas, 1",
    ),
    (
        {
            "spec.schedules.0.pools": {"decode": {"minReplicas": 0}, "prefill": {"minReplicas": 0}},
            "spec.pools.0.scaleToZero": Z,
        },
        "spec.schedules[0].pools.decode.minReplicas",
        "0 needs scaleToZero.enabled of the pool",
    ),
    (
        {"spec.schedules.0.pools": {"prefill": {"minReplicas": 8}, "decode": {"minReplicas": 16}}},
        "spec.schedules[0].pools",
        "minReplicas take 24 accelerators together",
    ),
    (
        {"spec.schedules.0.pools": {"prefill": {"maxReplicas": 1}, "decode": {"minReplicas": 5}}},
        "spec.schedules[0].pools",
        "no sizes within",
    ),
    # The forecast.
    (
        {"spec.predictive.lookAheadSeconds": 179},
        "spec.predictive.lookAheadSeconds",
        "179 is less than a replica of prefill takes to start, 180 s",
    ),
    (
        {"spec.predictive.intervalSeconds": 4},
        "spec.predictive.intervalSeconds",
        "4 is less than tickSeconds, 5",
    ),
    (
        {"spec.predictive.capacityModel.source": "Profile"},
        "spec.predictive.capacityModel.profileRef",
        "source Profile needs it",
    ),
    (
        {"spec.predictive.capacityModel.correction": {"min": "3"}},
        "spec.predictive.capacityModel.correction.min",
        "3 is more than max, 2",
    ),
    (
        {"spec.predictive.predictor": {"type": "HoltWinters", "holtWinters": SHORT}},
        "spec.predictive.predictor.holtWinters.seasonSeconds",
        "100 is less than two intervals of 60 s",
    ),
    (
        {"spec.predictive.predictor": {"type": "HoltWinters", "holtWinters": WEEK}},
        "spec.predictive.intervalSeconds",
        "a season of 604800 s has more than 2880 intervals of 60 s: 210 or more",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "message"), CASES)
def test_a_fault_is_told_at_its_place_and_alone(
    changes: dict[str, object], path: str, message: str
) -> None:
    faults = faults_of(changes)
    assert list(faults) == [path]
    assert message in faults[path]


def test_a_shrinking_pool_waits_as_long_as_figures_live() -> None:
    """RB-106: figures must not outlive the delay before shrinking."""
    place = "spec.pools[1].behavior.scaleDown.stabilizationWindowSeconds"
    changes: dict[str, object] = {place.replace("[1]", ".1"): 14}
    assert "could shrink twice for the same figure" in faults_of(changes)[place]
    parse_policy(made({**changes, "spec.metrics.staleAfterSeconds": 14}), "policy.yaml")
    parse_policy(made({**changes, "spec.pools.1.behavior.scaleDown.selectPolicy": "Disabled"}), "f")


def test_all_faults_of_a_file_are_told_at_once_whatever_sections_they_are_in() -> None:
    """What is wrong in one section hides nothing that can be judged without it."""
    faults = faults_of(
        {
            "spec.mode": "auto",
            "spec.pools.0.drain.deadlineSeconds": 0,
            "spec.pools.1.minReplicas": 20,
            "spec.pools.1.metrics": [],
            "spec.budget.minAccelerators": 99,
            "spec.schedules.0.pools.decoder": {"minReplicas": 1},
            "spec.schedules.0.pools.prefill": GONE,
            "spec.predictive.lookAheadSeconds": 20,
        }
    )
    assert sorted(faults) == [
        "spec.budget.minAccelerators",
        "spec.mode",
        "spec.pools[0].drain.deadlineSeconds",
        "spec.pools[1].metrics",
        "spec.pools[1].minReplicas",
        "spec.predictive.lookAheadSeconds",
        "spec.schedules[0].pools",
        "spec.schedules[0].pools.decoder",
    ]


def test_zero_is_allowed_for_both_pools_together() -> None:
    changes: dict[str, object] = {"spec.schedules": []}
    for i in (0, 1):
        changes |= {f"spec.pools.{i}.minReplicas": 0, f"spec.pools.{i}.scaleToZero": Z}
    policy = parse_policy(made(changes), "policy.yaml")
    assert [pool.min_replicas for pool in policy.spec.pools] == [0, 0]


def test_a_forecast_that_is_off_asks_for_no_look_ahead() -> None:
    changes = {"spec.predictive.mode": "Off", "spec.predictive.lookAheadSeconds": 1}
    assert parse_policy(made(changes), "f").spec.predictive.look_ahead_seconds == 1


def test_a_model_built_in_code_is_held_to_the_same_rules() -> None:
    spec = load_policy(EXAMPLE).spec
    values = spec.pools[0].model_dump() | {"min_replicas": 9}
    with pytest.raises(ValueError, match="9 is more than maxReplicas") as raised:
        type(spec.pools[0]).model_validate(values)
    assert raised.value.errors()[0]["type"] == FAULTS  # type: ignore[attr-defined]


def test_a_fixed_ratio_needs_no_range() -> None:
    changes = NEVER | {"spec.ratio": {"mode": "Fixed", "prefillPerDecode": "4"}}
    ratio = parse_policy(made(changes), "f").spec.ratio
    assert ratio.bounds == (Decimal(4), Decimal(4))


@pytest.mark.parametrize("values", [{}, {"spec": []}, {"spec": {"pools": [1, None]}}, {1: {2: 3}}])
def test_what_is_no_policy_at_all_is_told(values: dict[Any, Any]) -> None:
    with pytest.raises(PolicyFaults, match="apiVersion: is missing"):
        parse_policy(values, "policy.yaml")


def test_many_faults_are_counted_and_not_all_told() -> None:
    with pytest.raises(PolicyFaults) as raised:
        parse_policy({f"key{i}": 1 for i in range(200)}, "f")
    assert len(raised.value.faults) == 204
    assert str(raised.value).splitlines()[-1] == "f: and 154 more"


def test_a_fault_is_one_line_whatever_the_file_calls_itself() -> None:
    with pytest.raises(PolicyFaults) as raised:
        parse_policy(made({"spec.wrong\x1b[2J\nok: p": 1, "spec.mode": "Au\nto"}), "p.yaml")
    lines = str(raised.value).split("\n")
    assert len(lines) == len(raised.value.faults) == 2
    assert all(line.isprintable() and line.startswith("p.yaml: spec.") for line in lines)


@pytest.mark.parametrize("name", ["a b", "a\nb", "\x1b[2J", "Chat", "-a", "a.", "a..b", ""])
def test_a_name_is_one_that_kubernetes_takes(name: str) -> None:
    assert list(faults_of({"metadata.name": name})) == ["metadata.name"]


def test_files_are_bounded_and_keys_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for content, fault in (
        (b"#" * (MAX_FILE_BYTES + 1), "larger than"),
        (b"\xff", "not UTF-8"),
        (b"spec: {mode: Auto, mode: Paused}", "'mode' is given twice"),
        (b"[1, 2", "not valid YAML"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=fault):
            load_policy(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "none.yaml")


def test_reading_changes_nothing_it_is_given() -> None:
    values = made({})
    before = copy.deepcopy(values)
    assert isinstance(parse_policy(values, "f"), PoolAutoscalingPolicy)
    assert values == before


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "policy.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(ConfigError, match="is no regular file"):
            load_policy(path)
