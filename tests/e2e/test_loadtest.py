"""A shipped scenario against a whole cluster, by both doors: counts equal the server's own."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.options import SHIPPED, find_scenario
from loadtest.raw_file import read_records
from loadtest.records import Status
from loadtest.results import RAW_FILE, load_result
from services.bench.local_cluster import LocalCluster
from services.chaos.scripted_model import make_scripted_model
from services.common.model_manifest import read_manifest

pytestmark = pytest.mark.e2e

DATA = SHIPPED.parent / "data"


def short_chats(directory: Path) -> Path:
    """Write the quick form of chat_rt, cut to seconds, with limits nobody is late for."""
    values: dict[str, Any] = yaml.safe_load(find_scenario("chat_rt").read_text())
    values["workload"]["file"] = str(DATA / "sharegpt_lengths_400conv.csv.gz")
    values["quick"]["arrivals"] = {"rate_rps": 4}
    values["quick"]["workload"] |= {"max_osl": 12, "think_s": 0.1}
    values["quick"]["phases"] = {"warmup_s": 0.5, "measure_s": 2, "cooldown_s": 0.5}
    values["slo"] = {"ttft_s": 60, "tpot_s": 60}
    path = directory / "short.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def hurt_chats(directory: Path) -> Path:
    """Write chaos cut to seconds, on a cluster whose workers are all hurt."""
    values: dict[str, Any] = yaml.safe_load(find_scenario("chaos").read_text())
    values["arrivals"] = {"kind": "poisson", "rate_rps": 4}
    values["workload"] |= {"osl": 24, "think_s": 0.1}
    values["phases"] = {"warmup_s": 0, "measure_s": 8, "cooldown_s": 0}
    values["slo"] = {"ttft_s": 60, "tpot_s": 60}
    values["faults"] = [
        {"at_s": 1, "action": "kill", "process": "decode-0"},
        {"at_s": 3, "action": "freeze", "process": "prefill", "for_s": 0.5},
        {"at_s": 5, "action": "restart", "process": "decode-1"},
    ]
    path = directory / "hurt.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def counters(cluster: LocalCluster) -> dict[str, float]:
    with urllib.request.urlopen(f"{cluster.http}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def test_token_counts_of_both_doors_are_the_server_s(tmp_path: Path) -> None:
    model_dir = make_scripted_model(tmp_path / "model")
    scenario = short_chats(tmp_path)
    with LocalCluster(model_dir, prefill=1, decode=1, flags=("--engine", "scripted")) as cluster:
        vocab_size = read_manifest(model_dir).vocab_size
        ways = {
            "grpc": [f"grpc://{cluster.grpc}"],
            "words": [cluster.http, "--api", "completions"],
            "ids": [cluster.http, "--api", "completions",
                    "--vocab-size", str(vocab_size)],
        }  # fmt: skip
        for name, flags in ways.items():
            before = counters(cluster)
            command = (
                *(sys.executable, "-m", "services.cli.main", "loadtest", "run", str(scenario)),
                *("--quick", "--out", str(tmp_path / name), "--target", *flags),
            )
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
            after = counters(cluster)

            (directory,) = (tmp_path / name).iterdir()
            result = load_result(directory)
            records = read_records(directory / RAW_FILE)
            assert result.kind == "run", done.stderr
            # A busy machine may be late, which is no error of either side.
            assert result.verdict not in ("FAILED", "SATURATED"), (name, result.errors)
            assert result.attainment is not None
            assert result.attainment.value == 1.0
            assert {record.status for record in records} == {Status.OK}
            assert {"prefill": 1, "decode": 1} in [p.replicas for p in result.timeline], name
            assert [r.num_heard for r in records] == [r.osl for r in records]
            assert {record.prefill_worker for record in records} <= {"prefill-0", ""}
            for counter, total in (
                ("isthmus_prompt_tokens_total", sum(r.isl for r in records)),
                ("isthmus_completion_tokens_total", sum(r.osl for r in records)),
                ("isthmus_cached_tokens_total", sum(r.cached_tokens or 0 for r in records)),
            ):
                assert after[counter] - before.get(counter, 0.0) == total, (name, counter)
        cluster.assert_no_blocks_in_use()


def test_a_scenario_brings_its_faults_and_no_token_is_lost(tmp_path: Path) -> None:
    model_dir = make_scripted_model(tmp_path / "model")
    scenario = hurt_chats(tmp_path)
    with LocalCluster(model_dir, prefill=1, decode=2, flags=("--engine", "scripted")) as cluster:
        command = (
            *(sys.executable, "-m", "services.cli.main", "loadtest", "run", str(scenario)),
            *("--out", str(tmp_path / "out"), "--target", f"grpc://{cluster.grpc}"),
            *("--cluster", str(cluster.status_file)),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert cluster.status()["state"] in ("ready", "degraded")

    (directory,) = (tmp_path / "out").iterdir()
    result = load_result(directory)
    assert result.kind == "run", done.stderr
    hit = [(fault.action, fault.process, fault.failure) for fault in result.faults]
    assert hit == [
        ("kill", "decode-0", ""), ("freeze", "prefill-0", ""), ("restart", "decode-1", ""),
    ]  # fmt: skip
    assert result.counts["error"] == result.counts["rejected"] == 0, result.errors
    assert {check.name: check.value for check in result.checks if check.name == "tokens"} == {
        "tokens": 0.0
    }
    assert result.verdict != "FAILED", result.verdict_reason
