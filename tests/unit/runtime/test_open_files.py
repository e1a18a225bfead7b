"""The limit of open files: raised as far as it makes sense, refused below the floor."""

from __future__ import annotations

import resource

import pytest

from services.cli import doctor_checks
from services.common.errors import ConfigError
from services.runtime import open_files
from services.runtime.open_files import ENOUGH, FLOOR, ensure_open_files


class Limits:
    """Stands for the kernel's: what was asked for is kept."""

    def __init__(self, soft: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.held)
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: setattr(self, "held", pair))


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1_024, 4_096, (4_096, 4_096)),
        (1_024, 1 << 30, (ENOUGH, 1 << 30)),
        (1_024, resource.RLIM_INFINITY, (ENOUGH, resource.RLIM_INFINITY)),
        (1 << 20, 1 << 20, (1 << 20, 1 << 20)),  # never lowered
        (FLOOR, FLOOR, (FLOOR, FLOOR)),
    ],
)
def test_the_limit_is_raised_to_what_is_allowed_and_never_lowered(
    soft: int, hard: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Limits(soft, hard, monkeypatch)
    assert ensure_open_files() == expected[0]
    assert kernel.held == expected


def test_below_the_floor_it_says_what_is_needed_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Limits(20, FLOOR - 1, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        ensure_open_files()
    assert f"may have {FLOOR - 1} at most and needs {FLOOR}" in str(caught.value)
    assert "ulimit -n" in str(caught.value)


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [(20, FLOOR - 1, "missing"), (256, 1_024, "note"), (1_024, 65_536, "ok")],
)
def test_doctor_tells_it(soft: int, hard: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(soft, hard, monkeypatch)
    finding = doctor_checks.check_open_files()
    assert finding.level == level
    assert str(soft) in finding.found
    assert doctor_checks.check_open_files in doctor_checks._CHECKS
    assert (open_files.ADVICE in finding.advice) == (level != "ok")
