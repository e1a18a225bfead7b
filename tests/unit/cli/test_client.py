"""What the client commands say when a call fails."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from services.cli import exits
from services.cli.client import explain_rpc_error
from services.cli.main import run


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str, own_code: str = "") -> None:
        self._status = code
        self._text = details
        self._own_code = own_code

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Any:  # Any: grpc's own metadata type
        return (("isthmus-code", self._own_code),) if self._own_code else ()

    def initial_metadata(self) -> Any:  # Any: as above
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Any) -> bool:  # Any: as above
        return False


def test_a_code_of_ours_is_shown_once() -> None:
    error = FailedCall(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded: too many requests", "overloaded"
    )
    assert explain_rpc_error(error, 3.0, 0.1) == "overloaded: too many requests"


def test_a_status_of_grpc_itself_keeps_its_name() -> None:
    error = FailedCall(grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert explain_rpc_error(error, 3.0, 0.1) == "UNAVAILABLE: connection refused"


def test_a_missing_key_names_the_variable() -> None:
    error = FailedCall(
        grpc.StatusCode.UNAUTHENTICATED,
        "unauthenticated: an API key is needed",
        "unauthenticated",
    )
    shown = explain_rpc_error(error, 3.0, 0.1)
    assert shown == "unauthenticated: an API key is needed (set ISTHMUS_API_KEY)"


def test_our_own_deadline_is_told_in_seconds_and_a_servers_shorter_one_is_not() -> None:
    error = FailedCall(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "deadline_exceeded: the request's deadline passed",
        "deadline_exceeded",
    )
    assert explain_rpc_error(error, 30.0, 29.9) == "no full answer within 30 s"
    assert explain_rpc_error(error, 300.0, 60.0) == (
        "deadline_exceeded: the request's deadline passed"
    )


@pytest.mark.parametrize("arguments", [["status"], ["chat", "--prompt", "x"]])
def test_an_url_as_server_is_a_usage_fault(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--server", "http://127.0.0.1:8000"]) == exits.USAGE
    assert run([*arguments, "--server", "localhost"]) == exits.USAGE  # gRPC would take port 443
    assert "gRPC address HOST:PORT, without a scheme" in capsys.readouterr().err
