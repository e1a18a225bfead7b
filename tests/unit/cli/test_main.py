from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from loadtest.cli import app as loadtest_app
from services.cli import doctor_checks, exits
from services.cli.main import app, run
from services.cli.status_file import StatusFile


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No isthmus.yaml of the developer's, no settings of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)


def test_wrong_configuration_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "isthmus.yaml").write_text("worker:\n  rol: decode\n")
    assert run(["config", "check"]) == exits.USAGE
    shown = capsys.readouterr().err
    assert shown == (
        'isthmus: configuration: worker.rol: unknown key (isthmus.yaml); did you mean "role"?\n'
    )


def test_configuration_is_found_by_flag_variable_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("isthmus.yaml", "variable.yaml", "flag.yaml"), 1):
        (tmp_path / name).write_text(f"router: {{http_port: {number}}}\n")

    def port(*flags: str) -> int:
        assert run(["config", "show", "--json", *flags]) == exits.OK
        return int(json.loads(capsys.readouterr().out)["router.http_port"])

    assert port() == 1
    monkeypatch.setenv("ISTHMUS_CONFIG", "variable.yaml")
    assert port() == 2
    assert port("--config", "flag.yaml") == 3


def test_shown_configuration_hides_only_user_and_password_of_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RB-119: what may hold a secret is not shown."""
    monkeypatch.setenv("ISTHMUS_STORE__URL", "redis://:sentinel-pw@h/0")
    assert run(["config", "show"]) == exits.OK
    out = capsys.readouterr().out
    assert "sentinel-pw" not in out
    assert 'store.url = "redis://[redacted]@h/0"\n' in out


def test_up_with_a_store_nobody_runs_ends_with_4_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """RB-119: the place is named, user and password are not."""
    arguments = ["up", "--redis", "redis://me:sentinel-pw@127.0.0.1:1/0", "--model", "none.gguf"]
    assert run([*arguments, "--grpc-port", "0", "--http-port", "0"]) == exits.STORE
    shown = capsys.readouterr()
    assert "sentinel-pw" not in shown.out + shown.err
    assert "nobody answers at redis://[redacted]@127.0.0.1:1/0; leave out --redis" in shown.err


def test_up_with_an_address_that_is_none_is_a_usage_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["up", "--redis", "http://h:1", "--grpc-port", "0", "--http-port", "0"]
    assert run(arguments) == exits.USAGE
    assert "http://h:1 is not the address of a store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["config", "check"], ["up", "--grpc-port", "0", "--http-port", "0"]]
)
def test_missing_keys_file_is_told_with_its_path_and_the_way_out(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISTHMUS_AUTH__KEYS_FILE", "/nowhere/my keys.json")
    assert run(arguments) == exits.USAGE
    assert capsys.readouterr().err == (
        "isthmus: configuration: auth.keys_file: there is no /nowhere/my keys.json; "
        "make it with `isthmus key new --file '/nowhere/my keys.json'`\n"
    )


def test_damaged_keys_file_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{")
    monkeypatch.setenv("ISTHMUS_AUTH__KEYS_FILE", str(file))
    assert run(["config", "check"]) == exits.USAGE
    assert f"auth.keys_file: {file}: keys file: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "wrong"), [(None, "the key file cannot be read"), ("junk", "the key file")]
)
def test_key_ring_that_is_missing_or_damaged_fails_the_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    wrong: str,
) -> None:
    """The workers used to find out, one by one."""
    file = tmp_path / "cluster.keys"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("ISTHMUS_TRANSFER__CURVE_KEY_FILE", str(file))
    assert run(["config", "check"]) == exits.USAGE
    assert f"transfer.curve_key_file: {wrong}" in capsys.readouterr().err


def test_version_is_a_command_and_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == exits.OK
    line = capsys.readouterr().out
    assert line.startswith("isthmus ")
    assert run(["--version"]) == exits.OK
    assert capsys.readouterr().out == line
    assert run(["--help"]) == exits.OK
    assert "separate prefill and decode pools" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["router", "--grpc-port", "many"],
        ["worker", "--role", "both"],
        ["up", "--prefill", "0", "--decode", "0"],
        ["router", "--http-host", "0.0.0.0"],
    ],
)
def test_usage_faults_end_with_2(arguments: list[str]) -> None:
    assert run(arguments) == exits.USAGE


@pytest.mark.parametrize("arguments", [["status"], ["chat", "--prompt", "x"]])
def test_nobody_at_the_address_ends_with_5(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.cli.client.CONNECT_TIMEOUT_S", 0.2)
    assert run([*arguments, "--server", "127.0.0.1:1"]) == exits.UNREACHABLE
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().err


def test_key_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    assert run(["key", "new", "--file", str(file), "--tenant", "acme", "--label", "laptop"]) == 0
    key = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    assert run(["key", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert key not in listed
    key_id, tenant = listed.split()[:2]
    assert tenant == "acme"
    assert run(["key", "revoke", key_id, "--file", str(file)]) == exits.OK
    assert run(["key", "revoke", key_id, "--file", str(file)]) == exits.FAILED


def test_key_without_a_file_is_a_usage_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["key", "list"]) == exits.USAGE
    absent = str(tmp_path / "keys.json")
    for arguments in (["list"], ["revoke", "0123456789ab"]):
        assert run(["key", *arguments, "--file", absent]) == exits.USAGE
        assert f"there is no {absent}" in capsys.readouterr().err


@pytest.mark.parametrize("days", ["0", "-1", "inf", "nan"])
def test_key_that_could_never_be_used_is_not_made(days: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert run(["key", "new", "--file", str(file), "--expires-days", days]) == exits.USAGE
    assert not file.exists()


def test_usage_of_a_directory_that_is_not_there_is_a_usage_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["usage", "export", "--dir", str(tmp_path / "absent")]) == exits.USAGE
    assert "absent is no directory" in capsys.readouterr().err


def test_config_check_reads_the_traffic_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.yaml"
    monkeypatch.setenv("ISTHMUS_ROUTER__TRAFFIC_FILE", str(file))
    assert run(["config", "check"]) == exits.USAGE
    assert "router.traffic_file" in capsys.readouterr().err
    file.write_text("aliases: {chat: 3}")
    assert run(["config", "check"]) == exits.USAGE
    assert "aliases.chat: must be a list of {model, weight}" in capsys.readouterr().err
    file.write_text("aliases: {chat: [{model: smollm2}]}")
    assert run(["config", "check"]) == exits.OK


def test_routers_that_do_not_answer_are_no_empty_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.cli.client.CONNECT_TIMEOUT_S", 0.2)
    assert run(["admin", "--server", "127.0.0.1:1", "requests"]) == exits.FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--ca-file" in captured.err


def test_model_list_names_known_models_and_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "cache" / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "isthmus.json").write_text("{}")
    assert run(["model", "list", "--json", "--cache-dir", str(tmp_path / "cache")]) == exits.OK
    rows = {row["name"]: row["kind"] for row in json.loads(capsys.readouterr().out)}
    assert rows["broken"] == "damaged"
    assert "named" in rows.values()


def test_missing_model_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.gguf")
    assert run(["model", "get", missing, "--cache-dir", str(tmp_path)]) == exits.MODEL
    assert "none.gguf" in capsys.readouterr().err


def test_doctor_reports_a_check_that_fails_instead_of_falling_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_strange() -> doctor_checks.Finding:
        raise PermissionError("no such luck")

    def check_needed() -> doctor_checks.Finding:
        return doctor_checks.Finding("needed", "missing", "not there", "Install it.")

    monkeypatch.setattr(doctor_checks, "_CHECKS", (check_strange, check_needed))
    monkeypatch.setattr(doctor_checks, "_OPTIONAL_PACKAGES", {})
    assert run(["doctor"]) == exits.FAILED
    out = capsys.readouterr().out
    assert "strange: could not be checked (no such luck)" in out
    assert "MISSING  needed: not there\n          Install it." in out


def test_doctor_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == exits.OK
    found = {entry["name"]: entry["level"] for entry in json.loads(capsys.readouterr().out)}
    assert found["python"] == found["torch"] == found["valkey-server"] == "ok"


def test_status_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "status.json"
    file = StatusFile(path)
    file.write({"state": "starting"})
    inode = path.stat().st_ino
    file.write({"state": "starting"})
    assert path.stat().st_ino == inode  # nothing changed, nothing written
    file.write({"state": "ready"})
    assert json.loads(path.read_text()) == {"state": "ready"}
    assert [entry.name for entry in path.parent.iterdir()] == ["status.json"]


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, its in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {child}", its)


ROOTS = (("isthmus", app), ("loadtest", loadtest_app))


@pytest.mark.parametrize(("root", "its"), ROOTS)
def test_no_help_is_taken_for_markup(root: str, its: typer.Typer) -> None:
    """`[/PATH]` broke a page of help, and `[s]` would be left out of it."""
    for name, command in _commands(root, typer.main.get_command(its)):
        texts = [command.help, *(getattr(p, "help", "") for p in command.params)]
        assert not [text for text in texts if text and "[" in text], name


@pytest.mark.parametrize(("root", "its"), ROOTS)
def test_no_flag_of_a_command_means_two_things(root: str, its: typer.Typer) -> None:
    """The parser takes the first silently: `--table` was the other side of `--json` once."""
    for name, command in _commands(root, typer.main.get_command(its)):
        flags = [f for parameter in command.params for f in parameter.opts]
        flags += [f for parameter in command.params for f in parameter.secondary_opts]
        assert len(flags) == len(set(flags)), f"{name}: {sorted(flags)}"
