from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.main import run
from services.common.clock import ManualClock
from services.common.errors import ConfigError
from services.telemetry import audit as audit_module
from services.telemetry.audit import (
    FIRST,
    AuditConfig,
    AuditHead,
    AuditLog,
    make_line,
    verify_lines,
)


def chain(count: int) -> list[bytes]:
    head, lines = AuditHead(), []
    for i in range(count):
        line, head = make_line(head, "request", 1_700_000_000_000 + i, {"tenant": "a", "n": i})
        lines.append(line)
    return lines


def opened(tmp_path: Path, max_file_bytes: int = 1 << 20, **options: object) -> AuditLog:
    log = AuditLog(
        AuditConfig(tmp_path, "r0", max_file_bytes),
        ManualClock(),
        **options,  # type: ignore[arg-type]
    )
    log.start()
    return log


def written(tmp_path: Path) -> list[bytes]:
    files = sorted(tmp_path.glob("r0.*.jsonl"))
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


def test_a_whole_chain_is_found_whole() -> None:
    lines = chain(10)
    found = verify_lines(lines, AuditHead())
    assert (found.fault, found.num_lines, found.head.seq) == ("", 10, 10)
    record = json.loads(lines[0])
    assert record["prev"] == FIRST
    assert record["time"] == "2023-11-14T22:13:20.000+00:00"
    assert found.head.hash == json.loads(lines[-1])["hash"]


TAMPER: dict[str, tuple[Callable[[list[bytes]], object], str]] = {
    "changed": (lambda lines: lines.__setitem__(4, lines[4].replace(b'"n":4', b'"n":5')), "line 5"),
    "taken out": (lambda lines: lines.pop(4), "line 5"),
    "begin taken off": (lambda lines: lines.pop(0), "line 1"),
    "moved": (lambda lines: lines.insert(2, lines.pop(6)), "line 3"),
    "put in": (lambda lines: lines.insert(3, lines[3]), "line 5"),
    "cut": (lambda lines: lines.__setitem__(9, lines[9][:-1]), "line 10"),
    "junk": (lambda lines: lines.__setitem__(3, b"{}\n"), "line 4"),
    "hash made up": (
        lambda lines: lines.__setitem__(4, make_line(AuditHead(4, "f" * 64), "x", 0, {})[0]),
        "line 5",
    ),
}


@pytest.mark.parametrize("name", TAMPER)
def test_every_change_is_found_at_its_line(name: str) -> None:
    tamper, where = TAMPER[name]
    lines = chain(10)
    tamper(lines)
    assert verify_lines(lines, AuditHead()).fault.startswith(f"{where}:")


def test_events_are_on_the_disk_and_the_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    for life in range(3):
        log = opened(tmp_path)
        for i in range(5):
            log.write("request", tenant="acme", n=i, odd="\udcff \n x", nan=float("nan"))
        assert log.close(10)
        found = verify_lines(written(tmp_path), AuditHead())
        assert (found.fault, found.head.seq) == ("", 5 * (life + 1))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_file_is_followed_by_the_next_in_one_chain(tmp_path: Path) -> None:
    for _ in range(2):
        log = opened(tmp_path, max_file_bytes=4096)
        for i in range(300):
            log.write("request", n=i)
            if i % 50 == 0:
                assert wait(lambda log=log: not log._queue and not log._pending)  # type: ignore[misc]
        assert log.close(10)
    files = sorted(tmp_path.glob("r0.*.jsonl"))
    assert len(files) > 2
    found = verify_lines(written(tmp_path), AuditHead())
    assert (found.fault, found.head.seq) == ("", 600)
    assert run(["audit", "verify", *map(str, files)]) == 0
    assert run(["audit", "verify", *map(str, files[1:])]) == 0  # the oldest may be archived
    assert run(["audit", "verify", str(files[0]), str(files[2])]) == 1


def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Poll for what another thread does."""
    tick = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return True
        tick.wait(0.005)
    return False


def test_half_a_line_of_a_crash_is_cut_off_and_told(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.write("request", n=1)
    assert log.close(10)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"seq":2,"time":"20')
    log = opened(tmp_path)
    assert log.close(10)
    assert file.read_bytes().startswith(whole)
    found = verify_lines(written(tmp_path), AuditHead())
    assert (found.fault, found.num_lines) == ("", 2)
    told = json.loads(written(tmp_path)[1])
    assert (told["event"], told["num_bytes"]) == ("audit.tail_cut", 19)


def test_a_damaged_end_is_not_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "r0.000001.jsonl").write_bytes(chain(2)[0] + b'{"seq":2}\n')
    with pytest.raises(ConfigError, match="damaged"):
        AuditLog(AuditConfig(tmp_path, "r0"), ManualClock())


def test_one_chain_has_one_writer(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with pytest.raises(ConfigError, match=r"router\.router_id"):
        AuditLog(AuditConfig(tmp_path, "r0"), ManualClock())
    assert log.close(10)


class FullDisk:
    """os.write on a disk with so many bytes left: the last write is cut short, then none works."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, handle: int, data: bytes) -> int:
        if not self.left:
            raise OSError(28, "No space left on device")
        part = data[: self.left]
        self.left -= len(part)
        return os.write(handle, part)


def test_a_full_disk_blocks_and_loses_nothing_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy for a full disk: lines wait in memory, and none is ever there by half."""
    monkeypatch.setattr(audit_module, "RETRY_S", 0.01)
    disk = FullDisk(700)
    log = opened(tmp_path, write=disk)
    for i in range(40):
        log.write("request", n=i)
    assert wait(lambda: log.is_blocked)
    found = verify_lines(written(tmp_path), AuditHead())
    assert found.fault == ""  # never half a line
    disk.left = 1 << 20
    assert wait(lambda: not log.is_blocked)
    assert log.close(10)
    found = verify_lines(written(tmp_path), AuditHead())
    assert (found.fault, found.head.seq, log.num_dropped) == ("", 40, 0)


def test_what_finds_no_room_in_memory_is_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "RETRY_S", 0.01)
    monkeypatch.setattr(audit_module, "_MAX_QUEUED", 10)
    disk = FullDisk(0)
    log = opened(tmp_path, write=disk)
    log.write("request", n=0)
    assert wait(lambda: log.is_blocked)
    for i in range(25):
        log.write("request", n=i)
    assert log.num_dropped == 15
    disk.left = 1 << 20
    assert log.close(10)
    told = [json.loads(line) for line in written(tmp_path)]
    assert [r["num_events"] for r in told if r["event"] == "audit.missing"] == [15]
    assert len(told) == 12


def test_a_disk_that_stays_full_is_said_at_the_end(tmp_path: Path) -> None:
    log = opened(tmp_path, write=FullDisk(0))
    log.write("request", n=0)
    assert not log.close(10)


def test_a_directory_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(AuditConfig(tmp_path / "file", "r0"), ManualClock())


def test_verify_says_where_and_knows_a_lost_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, path = chain(5), tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines))
    head = json.loads(lines[-1])["hash"]
    assert run(["audit", "verify", str(path), "--head", head]) == 0
    assert f"5 lines, the last is number 5, head {head}" in capsys.readouterr().out
    path.write_bytes(b"".join(lines[:4]))
    assert run(["audit", "verify", str(path)]) == 0
    assert run(["audit", "verify", str(path), "--head", head]) == 1
    path.write_bytes(b"".join(lines).replace(b'"n":2', b'"n":7'))
    capsys.readouterr()
    assert run(["audit", "verify", str(path)]) == 1
    assert f"{path}: line 3: it was changed" in capsys.readouterr().err
    assert run(["audit", "verify", str(tmp_path / "none")]) == 2
