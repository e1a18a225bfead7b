"""`isthmus key cluster`: each step of a rotation, and refusals that change nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from services.cli import exits
from services.cli.main import run
from services.transfer.key_ring import read_ring


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)


def step(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run(["key", "cluster", name, "--file", "ring"]) == exits.OK
    return capsys.readouterr().out.splitlines()


def test_a_rotation_leaves_a_new_key_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    (old,) = step("new", capsys)
    assert stat.S_IMODE(Path("ring").stat().st_mode) == 0o600
    assert step("add", capsys)[0] == old
    in_use, accepted = step("promote", capsys)
    assert (in_use.split()[1:], accepted.split()[0]) == (["in", "use"], old.split()[0])
    assert step("retire", capsys) == step("list", capsys) == [in_use]
    assert stat.S_IMODE(Path("ring").stat().st_mode) == 0o600


def test_no_secret_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """RB-118."""
    shown = "".join(step("new", capsys) + step("add", capsys))
    assert all(key.secret.decode() not in shown for key in read_ring(Path("ring")).keys)


@pytest.mark.parametrize("name", ["promote", "retire", "new"])
def test_a_step_that_makes_no_sense_changes_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step("new", capsys)
    before = Path("ring").read_bytes()
    assert run(["key", "cluster", name, "--file", "ring"]) == exits.USAGE
    assert capsys.readouterr().err.startswith("isthmus: ")
    assert Path("ring").read_bytes() == before


def test_the_file_may_come_from_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "cluster", "list"]) == exits.USAGE
    assert "transfer.curve_key_file" in capsys.readouterr().err
    Path("isthmus.yaml").write_text("transfer: {curve_key_file: ring}\n")
    assert run(["key", "cluster", "new"]) == exits.OK
    assert len(read_ring(Path("ring")).keys) == 1


@pytest.mark.parametrize("content", ["", "{", "-----BEGIN"])
def test_a_bad_file_is_one_line(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ring").write_text(content)
    assert run(["key", "cluster", "add", "--file", "ring"]) == exits.USAGE
    assert "the key file" in capsys.readouterr().err
