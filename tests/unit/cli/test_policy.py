"""`isthmus policy` from a file to its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from services.autoscaler.policy_file import EXAMPLE
from services.cli import exits
from services.cli.main import run

PROFILED = {"source": "Profile", "profileRef": {"name": "measured"}}
MONDAY = ("--at", "2026-11-30T09:00+01:00")


def written(path: Path, **changes: object) -> Path:
    values = yaml.safe_load(EXAMPLE.read_text())
    values["spec"].update(changes)
    path.write_text(yaml.safe_dump(values))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["policy", *arguments]) == exits.OK
    return capsys.readouterr().out


def test_the_example_lints_clean_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(said(capsys, "example"))
    assert said(capsys, "lint", str(path)) == f"ok: {path}\n"
    assert json.loads(said(capsys, "lint", str(path), "--json")) == {
        "ok": True,
        "faults": [],
        "notes": [],
    }


def test_lint_tells_every_fault_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "policy.yaml", mode="auto", tickSecond=5)
    assert run(["policy", "lint", str(path)]) == exits.USAGE
    assert capsys.readouterr().err == (
        f'isthmus: configuration: {path}: spec.mode: no such value; did you mean "Auto"?\n'
        f'{path}: spec.tickSecond: unknown key; did you mean "tickSeconds"?\n'
    )
    assert run(["policy", "lint", str(path), "--json"]) == exits.USAGE
    told = json.loads(capsys.readouterr().out)
    assert [fault["path"] for fault in told["faults"]] == ["spec.mode", "spec.tickSecond"]


def test_lint_notes_what_is_right_and_probably_not_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(EXAMPLE.read_text())["spec"]
    values["pools"][0]["metrics"][0]["target"]["value"] = "500m"
    values["pools"][1]["scaleToZero"] = {"enabled": True}
    night = {"start": "0 17 * * *", "durationSeconds": 3600}
    peak = {"prefill": {"minReplicas": 8}, "decode": {"minReplicas": 12}}
    schedules = [
        values["schedules"][0] | {"pools": {"decode": {"minReplicas": 14}}},
        night | {"name": "peak", "timeZone": "Europe/Berlin", "pools": peak},
    ]
    path = written(
        tmp_path / "p.yaml",
        pools=values["pools"],
        schedules=schedules,
        slo={"ttft": values["slo"]["ttft"]},
        predictive={"mode": "Forecast", "capacityModel": PROFILED},
    )
    notes = said(capsys, "lint", str(path)).splitlines()
    assert notes[0] == (
        f"{path}: spec.pools[0].metrics[0].target.value: note: 500 ms is not below the SLO, "
        "500 ms: the pool grows only when it is missed"
    )
    assert notes[1] == (
        f"{path}: spec.pools[1].scaleToZero.enabled: note: comes to nothing: "
        "minReplicas is never below 2"
    )
    assert notes[2] == (
        f"{path}: spec.predictive.capacityModel.source: note: without slo.itl a profile "
        "says nothing of decode, and nothing is forecast for it"
    )
    assert notes[3].startswith(f"{path}: spec.schedules[1]: note: at ")
    assert notes[3].endswith(
        "business-hours, peak hold together: minReplicas take 22 accelerators, the budget allows 20"
    )
    assert notes[4:] == [f"ok: {path}"]


def test_explain_says_what_holds_at_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "explain", str(EXAMPLE), *MONDAY).splitlines()
    assert lines[0] == (
        "chat: sizes the pools of chat every 5 s; "
        "records what it decides and changes nothing (mode DryRun)"
    )
    assert lines[2] == (
        "prefill (Prefill): 2 to 8 replicas now, by business-hours; "
        "1 at first, each with 1 accelerator"
    )
    for line in (
        "  grows       by one, or in panic by a multiple, where TTFT p95 is above 420 ms "
        "(target 400 ms)",
        "              in proportion where QueuedTokens is above 8,601.6 a replica (target 8,192)",
        "              in proportion where KVUtilization is above 78.75 % (target 75 %)",
        "              at most 100 % in 15 s or 2 replicas in 15 s, whichever is more",
        "  shrinks     where all metrics are more than 10 % below target for 600 s; "
        "at most 1 replica in 120 s",
        "  SLO         TTFT p95 500 ms, ITL p95 40 ms",
        "  ratio       0.25 to 2 prefill replicas for each of decode; "
        "else the pool that has too few gets more",
        "  budget      at most 20 accelerators together, 50 an hour; "
        "the least sizes take 3, the largest 24",
        "  schedules   business-hours: prefill 2 to 8, decode 4 to 16 for 10 h from "
        "'0 8 * * 1-5' Europe/Berlin, since Mon 2026-11-30 08:00",
        "  forecast    Kalman, every 60 s, 240 s ahead; shown, not applied",
    ):
        assert line in lines
    sunday = said(capsys, "explain", str(EXAMPLE), "--at", "2026-11-29T09:00Z")
    assert "\nprefill (Prefill): 1 to 8 replicas now; 1 at first" in sunday
    assert "Europe/Berlin, next Mon 2026-11-30 08:00\n" in sunday


def test_explain_in_json_has_all_defaults_and_what_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = json.loads(said(capsys, "explain", str(EXAMPLE), "--json", *MONDAY))
    assert told["at"] == "2026-11-30T08:00:00+00:00"
    assert told["limits"]["decode"] == {"minReplicas": 4, "maxReplicas": 16}
    assert told["activeSchedules"] == ["business-hours"]
    assert told["acceleratorCap"] == 20
    assert told["policy"]["spec"]["pools"][0]["drain"]["onDeadline"] == "Migrate"
    assert told["policy"]["spec"]["metrics"]["staleAfterSeconds"] == 15


def test_other_ways_to_hold_pools_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(EXAMPLE.read_text())["spec"]
    for pool in values["pools"]:
        pool |= {"minReplicas": 0, "scaleToZero": {"enabled": True}}
        pool["behavior"] = {"scaleDown": {"selectPolicy": "Disabled"}}
    path = written(
        tmp_path / "p.yaml",
        pools=values["pools"],
        schedules=[],
        budget={},
        ratio={"mode": "Fixed", "prefillPerDecode": "500m", "onViolation": "CapHigher"},
        predictive={},
        slo={},
    )
    lines = said(capsys, "explain", str(path)).splitlines()
    for line in (
        "  shrinks     never: selectPolicy is Disabled",
        "  zero        both pools, after 900 s without a request; then up to 256 wait at the "
        "router, 600 s at most",
        "  SLO         none",
        "  ratio       0.5 prefill replicas for each of decode; "
        "else the pool that has too many gets fewer",
        "  budget      none; the least sizes take 0, the largest 24",
        "  forecast    off",
    ):
        assert line in lines


@pytest.mark.parametrize("text", ["tomorrow", "2026-11-30T09:00"])
def test_a_moment_has_a_date_and_a_zone(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "explain", str(EXAMPLE), "--at", text]) == exits.USAGE
    assert "--at" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "lint", "/nowhere/policy.yaml"]) == exits.USAGE
    assert "policy: /nowhere/policy.yaml cannot be read" in capsys.readouterr().err


def test_simulate_sizes_pools_by_the_policy_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(EXAMPLE.read_text())["spec"]
    for pool in values["pools"]:
        pool["startup"] = {"expectedSeconds": 10}
    path = written(tmp_path / "p.yaml", pools=values["pools"])
    load = ("--workload", "fixed:3000,20,25", "--requests", "900")
    told = json.loads(said(capsys, "simulate", str(path), *load, "--json", *MONDAY))
    assert told["num_requests"] == 900
    assert told["pools"]["prefill"]["first"] == 2  # what the schedule has on a Monday
    assert told["pools"]["decode"]["first"] == 4
    grown = [change for change in told["changes"] if change["pool"] == "prefill"]
    assert grown
    assert grown[0]["after"] > grown[0]["before"]
    assert grown[0]["reason"]
    assert told["pools"]["prefill"]["most"] <= 8
    sunday = ("--at", "2026-11-29T09:00Z")
    lines = said(capsys, "simulate", str(path), *load, *sunday).splitlines()
    assert lines[0].endswith("pools sized by chat, " + told["performance"]["name"])
    assert any(line.startswith("prefill: 1 replica at first") for line in lines)


def test_simulate_wants_one_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "simulate", str(EXAMPLE)]) == exits.USAGE
    assert "--workload" in capsys.readouterr().err
