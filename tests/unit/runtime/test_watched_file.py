from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError
from services.common.log_record import FIELDS_ATTRIBUTE
from services.runtime.watched_file import WatchedFile


def read_upper(path: Path) -> str:
    text = path.read_text()
    if not text.isupper():
        raise ConfigError("it is not upper case")
    return text


def watch(path: Path, clock: ManualClock, absent: str | None = None) -> WatchedFile[str]:
    return WatchedFile("a.file", (path,), lambda: read_upper(path), clock, 1.0, absent)


def test_a_change_counts_after_the_poll_interval(tmp_path: Path) -> None:
    path, clock = tmp_path / "f", ManualClock()
    path.write_text("ONE")
    watched = watch(path, clock)
    path.write_text("THREE")
    assert (watched.get(), watched.version) == ("ONE", 0)
    clock.advance(1.0)
    assert (watched.get(), watched.version) == ("THREE", 1)
    clock.advance(1.0)
    assert (watched.get(), watched.version) == ("THREE", 1)


def test_a_damaged_file_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "f", ManualClock()
    path.write_text("ONE")
    watched = watch(path, clock)
    path.write_text("half")
    for _ in range(3):
        clock.advance(1.0)
        assert watched.get() == "ONE"
    told = [getattr(r, FIELDS_ATTRIBUTE) for r in caplog.records if r.levelno == logging.ERROR]
    assert told == [{"setting": "a.file", "reason": "it is not upper case"}]
    assert watched.refusal == "it is not upper case"
    path.write_text("WHOLE")
    clock.advance(1.0)
    assert (watched.get(), watched.refusal) == ("WHOLE", "")


@pytest.mark.parametrize(("absent", "then"), [(None, "ONE"), ("", "")])
def test_a_file_that_goes_keeps_its_content_or_leaves_none(
    tmp_path: Path, absent: str | None, then: str
) -> None:
    path, clock = tmp_path / "f", ManualClock()
    path.write_text("ONE")
    watched = watch(path, clock, absent)
    path.unlink()
    clock.advance(1.0)
    assert watched.get() == then
    assert watched.refusal == ("missing" if absent is None else "")
    path.write_text("BACK")
    clock.advance(1.0)
    assert (watched.get(), watched.refusal) == ("BACK", "")


def test_a_file_that_never_was_is_a_fault_unless_absence_is_meant(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        watch(tmp_path / "f", ManualClock())
    assert watch(tmp_path / "f", ManualClock(), "").get() == ""
