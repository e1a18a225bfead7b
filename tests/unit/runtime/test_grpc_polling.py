"""Where gRPC's sockets are polled is set in time, and an operator's choice stays."""

from __future__ import annotations

import sys

import pytest

from services.runtime.grpc_polling import poll_where_it_is_awaited


def test_is_set_once_and_only_before_grpc_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", sys)
    environ: dict[str, str] = {}
    with pytest.raises(RuntimeError, match="before grpc is imported"):
        poll_where_it_is_awaited(environ)
    assert environ == {}

    monkeypatch.delitem(sys.modules, "grpc")
    poll_where_it_is_awaited(environ)
    assert environ == {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
    own = {"GRPC_EXPERIMENTS": "event_engine_client"}
    poll_where_it_is_awaited(own)
    assert own == {"GRPC_EXPERIMENTS": "event_engine_client"}
