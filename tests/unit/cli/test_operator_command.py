from __future__ import annotations

import sys

import pytest

from services.cli import exits
from services.cli.main import run


def test_without_the_extra_the_operator_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kopf", None)
    assert run(["operator"]) == exits.USAGE
    assert "the operator needs isthmus[kubernetes] (no kopf)" in capsys.readouterr().err


def test_outside_a_pod_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run(["operator"]) == exits.USAGE
    assert "not in a pod" in capsys.readouterr().err


def test_a_proxy_needs_a_name_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["operator", "--kubernetes", "http://127.0.0.1:1"]) == exits.USAGE
    assert "--namespace" in capsys.readouterr().err
