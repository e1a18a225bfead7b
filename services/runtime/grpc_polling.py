"""Which threads of a process wait for gRPC's sockets."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

_VARIABLE = "GRPC_EXPERIMENTS"


def poll_where_it_is_awaited(environ: MutableMapping[str, str]) -> None:
    """Have gRPC's core poll on the thread that takes its events; before grpc is imported.

    By default it polls on threads of its own, which wake that one, which wakes the event loop. A
    frame then costs a thread switch more on the way in, and nothing is gained where the loop is
    the only one to act on it. What an operator has set stays.
    """
    if "grpc" in sys.modules:
        raise RuntimeError("polling must be set before grpc is imported: its core reads it once")
    environ.setdefault(_VARIABLE, "-event_engine_client,-event_engine_listener")
