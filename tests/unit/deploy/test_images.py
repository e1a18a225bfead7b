"""What image recipes must keep, read from the files: no engine is at hand to build them."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))
IMAGES = [pytest.param(path, id=path.suffix[1:]) for path in FILES]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a recipe."""

    word: str
    rest: str


def stages_of(path: Path) -> list[list[Step]]:
    """Return the instructions stage by stage, lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    stages: list[list[Step]] = [[]]
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append(Step(word, rest.strip()))
    return stages


def all_of(stage: list[Step], word: str) -> list[str]:
    return [step.rest for step in stage if step.word == word]


def test_there_are_three_images() -> None:
    assert [path.suffix for path in FILES] == [".control", ".cpu", ".cuda"]


@pytest.mark.parametrize("path", IMAGES)
def test_the_last_stage_is_another_one_and_takes_only_what_was_built(path: Path) -> None:
    _, build, last = stages_of(path)
    assert all_of(build, "FROM") == ["${PYTHON_IMAGE} AS build"]
    assert all_of(last, "FROM") == ["${PYTHON_IMAGE}"]
    assert all_of(last, "COPY") == ["--from=build /opt/isthmus /opt/isthmus"]
    assert not any("pip" in run for run in all_of(last, "RUN"))


@pytest.mark.parametrize("path", IMAGES)
def test_it_runs_as_10001_on_a_read_only_root(path: Path) -> None:
    last = stages_of(path)[-1]
    assert all_of(last, "USER") == ["10001:10001"]
    words = [step.word for step in last]
    assert "RUN" not in words[words.index("USER") :]
    variables = dict(pair.split("=", 1) for env in all_of(last, "ENV") for pair in shlex.split(env))
    # What is written at run time goes where the chart and compose mount something.
    assert variables["HOME"] == "/tmp"
    assert variables["XDG_RUNTIME_DIR"] == "/run/isthmus"
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert variables["ISTHMUS_CACHE"] in ("/opt/isthmus/cache", "/models")
    assert variables.get("TRITON_CACHE_DIR", "/tmp/x").startswith("/tmp/")


@pytest.mark.parametrize("path", IMAGES)
def test_versions_are_locked_and_nothing_is_kept_of_the_way_there(path: Path) -> None:
    text = path.read_text()
    _, build, last = stages_of(path)
    installs = [run for run in all_of(build, "RUN") if "pip install" in run]
    assert installs
    for run in installs:
        assert run.count("pip install") == run.count("-c requirements.lock")
    assert any("PIP_NO_CACHE_DIR=1" in env for env in all_of(build, "ENV"))
    for run in all_of(last, "RUN"):
        assert ("apt-get install" in run) <= ("rm -rf /var/lib/apt/lists/*" in run)
        assert ("apt-get install" in run) <= ("--no-install-recommends" in run)
    assert not re.search(r"https?://(?!127\.0\.0\.1|\$\{)", text)
    assert ":latest" not in text
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+-slim-\w+$", text, re.MULTILINE)


@pytest.mark.parametrize("path", IMAGES)
def test_it_starts_a_command_of_ours_and_asks_it_how_it_is(path: Path) -> None:
    last = stages_of(path)[-1]
    assert all_of(last, "ENTRYPOINT") == ['["isthmus"]']
    (health,) = all_of(last, "HEALTHCHECK")
    assert "services.runtime.http_probe" in health
    (command,) = all_of(last, "CMD")
    assert "/etc/isthmus/isthmus.yaml" in command


def test_the_control_plane_has_neither_torch_nor_a_compiler() -> None:
    text = (ROOT / "deploy/docker/Dockerfile.control").read_text()
    stages = stages_of(ROOT / "deploy/docker/Dockerfile.control")
    runs = " ".join(run for stage in stages for run in all_of(stage, "RUN"))
    assert "'.[kubernetes,otlp]'" in runs
    assert not re.search(r"\btorch\b|\bgcc\b|\bworker\b", runs)
    assert "truncate --size 0" in text  # weights are for workers


def test_the_package_alone_needs_no_torch() -> None:
    """Else no image without it could be made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^A-Za-z0-9-]", need)[0].lower() for need in project["dependencies"]}
    assert names.isdisjoint({"torch", "triton", "safetensors", "transformers"})
    workers = project["optional-dependencies"]["worker"]
    assert any(need.startswith("torch") for need in workers)
    extras = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras is not None
    assert "worker" in extras[1].split(",")


@pytest.mark.parametrize("path", IMAGES)
def test_what_is_copied_goes_to_the_engine_and_nothing_else_does(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {source for copy in all_of(stages_of(path)[1], "COPY") for source in copy.split()[:-1]}
    assert copied <= sent
    for source in sent:
        assert (ROOT / source).exists(), source
