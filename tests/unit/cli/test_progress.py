"""What long steps print on stderr."""

from __future__ import annotations

import sys

import pytest

from services.cli.main import run
from services.cli.progress import Progress
from services.common.clock import ManualClock


def test_without_a_terminal_a_step_is_told_at_its_start_and_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = ManualClock()
    progress = Progress(clock)
    progress("sending", 0.0)
    progress("sending", 0.25)
    clock.advance(10.0)
    progress("sending", 0.5)
    progress("sending", 0.75)
    progress("freezing", 0.0)
    progress.done()
    shown = capsys.readouterr()
    assert shown.err == "sending\nsending 50%\nfreezing\n"
    assert shown.out == ""


def test_on_a_terminal_a_line_rewrites_itself_and_ends_before_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress()
    progress("sending", 0.0)
    progress("sending", 0.001)  # too little to be seen
    progress("sending", 0.5)
    progress("freezing", 1.0)
    progress("thawing", 0.0)
    progress.done()
    lines = capsys.readouterr().err.replace("\r\033[K", "|").split("\n")
    assert lines == ["|sending   0%|sending  50%", "|freezing 100%", "|thawing   0%", ""]


def test_a_long_campaign_tells_how_far_it_is_and_prints_json_only_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["chaos", "transfers", "--num", "20"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "playing transfers\n"
    assert shown.out.startswith("{")
    assert run(["chaos", "transfers", "--num", "20", "--json"]) == 0
    assert capsys.readouterr().err == ""
