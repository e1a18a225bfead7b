"""Bench and chaos commands refuse what cannot work in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from services.bench import smoke
from services.bench.local_cluster import ClusterFailed
from services.bench.result import Bar, BenchResult
from services.chaos import handoff
from services.chaos.rig import RigPlan, planes_of
from services.chaos.scripted_model import CONTEXT, make_scripted_model
from services.cli import exits, measured_model
from services.cli.main import run
from services.runtime import threads


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No isthmus.yaml of the developer's, no settings of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model whose files can be read; its context is CONTEXT tokens."""
    return str(make_scripted_model(tmp_path / "model"))


WITH_MODEL = ("smoke", "engine", "second-token", "wire", "cancel")


@pytest.mark.parametrize("words", [*(("bench", name) for name in WITH_MODEL), ("chaos", "handoff")])
def test_an_unknown_model_ends_with_3(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--model", "nosuch"]) == exits.MODEL
    shown = capsys.readouterr()
    assert "'nosuch' is neither a known model" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "smoke", "--prompt-tokens", str(CONTEXT)),
        ("bench", "second-token", "--prompt-tokens", f"512,{CONTEXT}"),
        ("bench", "cancel", "--prompt-tokens", str(CONTEXT)),
        ("bench", "wire", "--prompt-tokens", str(CONTEXT)),
    ],
)
def test_requests_longer_than_the_model_takes_are_refused(
    words: tuple[str, ...], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--model", model]) == exits.USAGE
    assert f"do not fit the {CONTEXT} tokens that scripted takes" in capsys.readouterr().err


def test_the_configured_length_counts_where_it_is_less_than_the_context(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISTHMUS_MODEL__NAME", model)
    monkeypatch.setenv("ISTHMUS_MODEL__MAX_MODEL_LEN", "300")
    assert run(["bench", "smoke", "--prompt-tokens", "300"]) == exits.USAGE
    assert "do not fit the 300 tokens that scripted takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "smoke", "--pairs", "0"),
        ("bench", "smoke", "--pairs", "1000000000"),
        ("bench", "smoke", "--prompt-tokens", "-1"),
        ("bench", "engine", "--rounds", "0"),
        ("bench", "engine", "--threads", "1000000"),
        ("bench", "handoff", "--blocks", "4097"),
        ("bench", "handoff", "--blocks", ""),
        ("bench", "handoff", "--blocks", "1,,2"),
        ("bench", "handoff", "--blocks", "²"),
        ("bench", "handoff", "--blocks", "9" * 5000),
        ("bench", "attach", "--rounds", "-3"),
        ("bench", "second-token", "--prompt-tokens", "0"),
        ("bench", "second-token", "--dtype", "int8"),
        ("bench", "wire", "--prompts", "65"),
        ("bench", "wire", "--answer-tokens", "1"),
        ("bench", "cancel", "--cancels", "1"),
        ("bench", "cancel", "--seed", "-1"),
        ("chaos", "handoff", "--faults", "0"),
        ("chaos", "handoff", "--planes", "carrier-pigeon"),
        ("chaos", "handoff", "--planes", "cuda_ipc"),
        ("chaos", "transfers", "--num", "0"),
        ("chaos", "transfers", "--num", "1000000000000"),
        ("chaos", "transfers", "--jobs", "-1"),
    ],
)
def test_impossible_numbers_end_with_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(words)) == exits.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["handoff", "attach", "wire"])
def test_more_memory_than_is_free_is_refused(
    command: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured_model, "free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(threads, "apply_threads", lambda *_: None)  # torch is loaded by now
    words = ["--model", model] if command == "wire" else []
    assert run(["bench", command, *words]) == exits.USAGE
    assert "of memory and 0.0 GiB are" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClusterFailed("`isthmus up` ended with 1"), "nothing measured: `isthmus up` ended with 1"),
        (grpc.RpcError("gone"), "the cluster refused: UNKNOWN: gone"),
    ],
)
def test_a_cluster_that_fails_is_told_in_one_line(
    error: Exception,
    said: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(smoke, "run", fail)
    assert run(["bench", "smoke", "--model", model]) == exits.FAILED
    shown = capsys.readouterr()
    assert shown.err.endswith(f"isthmus: {said}\n")
    assert shown.out == ""


# -- planes of `isthmus chaos handoff` ------------------------------------------------------------


def _planes_used(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[str, ...]:
    seen: list[tuple[str, ...]] = []

    def note(campaign: handoff.Campaign, _progress: object) -> BenchResult:
        seen.append(campaign.planes)
        return BenchResult("chaos handoff", bars=[Bar("none", 0, 0, "==")])

    monkeypatch.setattr(handoff, "run", note)
    assert run(["chaos", "handoff", *flags]) == exits.OK
    return seen[0]


def test_configured_planes_are_used_and_the_option_is_stronger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _planes_used(monkeypatch) == ()  # a mix
    (tmp_path / "isthmus.yaml").write_text("transfer: {planes: [zmq]}\n")
    assert _planes_used(monkeypatch) == ("zmq",)
    assert _planes_used(monkeypatch, "--planes", "attach,memfd") == ("attach", "memfd")
    monkeypatch.setenv("ISTHMUS_TRANSFER__PLANES", "memfd")
    assert _planes_used(monkeypatch) == ("memfd",)


def test_every_worker_is_given_the_planes_or_its_part_of_the_mix() -> None:
    plan = RigPlan(Path())
    assert planes_of(plan, "prefill", 0) == "attach,memfd,zmq"
    assert planes_of(plan, "prefill", 1) == "zmq"
    only = RigPlan(Path(), planes=("memfd", "zmq"))
    assert {planes_of(only, role, at) for role in ("prefill", "decode") for at in (0, 1)} == {
        "memfd,zmq"
    }


def test_an_unknown_case_of_the_router_benchmark_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "router", "--cases", "idle,tea"]) == exits.USAGE
    assert "'tea' is none of idle, requests" in " ".join(capsys.readouterr().err.split())
