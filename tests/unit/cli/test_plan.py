"""`isthmus plan` from flags to answer; what cannot be planned is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli import exits
from services.cli.main import run

SMALL = ("plan", "--workload", "fixed:600,10,20", "--requests", "100", "--runs", "1")
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "num_hidden_layers": 3, "intermediate_size": 128,
    "max_position_embeddings": 512,
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert run([*SMALL, *more]) == exits.OK
    return capsys.readouterr().out


def test_the_verdict_comes_first_and_both_kinds_stand_beside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = planned(capsys)
    assert "disaggregate" in said.splitlines()[0] or "too close" in said.splitlines()[0]
    assert "\ntwo pools: 1 prefill + 1 decode, $5.00 an hour\n" in said
    assert "\none pool: 1 with chunks of 752 tokens, $2.50 an hour\n" in said
    assert "chosen, not measured" in said


def test_costs_of_other_prices_and_of_an_api_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "cost.yaml"
    prices.write_text("api: {per_m_input: 0.5, per_m_output: 2.0}\n")
    said = planned(capsys, "--prices", str(prices))
    assert said.count("  good $/M at   GPU price -20% $0.") == 2
    assert said.count("an API costs the same at") == 2
    assert said.count("% of the cost is idle") == 2


def test_what_is_not_enough_says_how_near_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    busy = ("--workload", "fixed:600,10,200", "--max-workers", "1")  # the last flag counts
    assert run([*SMALL, *busy]) == exits.FAILED
    said = capsys.readouterr().out
    assert said.startswith("neither two pools nor one pool")
    assert "two pools: nothing up to 1 a pool is enough for certain: at best 0." in said


def test_a_load_that_could_never_show_the_share_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*SMALL, "--attain", "0.999"]) == exits.USAGE
    assert "is too short: if all were good, that would not show" in capsys.readouterr().err


def test_json_holds_the_same_with_other_prices_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices, config = tmp_path / "cost.yaml", tmp_path / "config.json"
    prices.write_text("aggregated: {rent_per_gpu_h: 12.0}\n")
    config.write_text(json.dumps(CONFIG))
    flags = ("--prices", str(prices), "--model", str(config), "--memory-gib", "3", "--json")
    told = json.loads(planned(capsys, *flags))
    assert told["verdict"]["choice"] == "two pools"
    assert told["verdict"]["saving"] == pytest.approx(1 - 5 / 12)
    assert told["two_pools"]["check"]["outcome"] == "meets"
    assert told["one_pool"]["cost"]["usd_per_h"] == pytest.approx(12.0)
    memory = told["memory"]
    held = memory["weights_bytes"] + memory["activation_bytes"] + memory["overhead_bytes"]
    blocks = told["performance"]["kv_blocks"]
    assert 0 <= (3 << 30) - held - blocks * memory["block_bytes"] < memory["block_bytes"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --trace or --workload"),
        (("--workload", "fixed:1,2"), "fixed:IN,OUT,RATE"),
        (("--workload", "fixed:a,2,3"), "fixed:IN,OUT,RATE"),
        (("--workload", "uniform:1,2,3"), "fixed:IN,OUT,RATE"),
        (("--workload", "fixed:0,2,3"), "above 0"),
        (("--workload", "fixed:1,2,nan"), "above 0"),
        (("--workload", "lognormal:1,2,3,9"), "SIGMA"),
        (("--workload", "fixed:9,2,3", "--memory-gib", "3"), "go together"),
        (("--workload", "fixed:60000,2,3"), "(60000 tokens)"),
        (("--workload", "fixed:9,2,3", "--model-file", "none.json"), "none.json"),
        (("--workload", "fixed:9,2,3", "--prices", "none.yaml"), "none.yaml"),
        (("--trace", "bad.jsonl"), "line 1 of bad.jsonl"),
        (("--trace", "bad.csv.gz"), "bad.csv.gz"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bad.jsonl", "bad.csv.gz"):
        Path(name).write_text("{}\n")
    assert run(["plan", *flags]) == exits.USAGE
    # The terminal's box may break a message into lines.
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
