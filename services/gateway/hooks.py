"""What the front doors tell telemetry; the router process plugs its own in."""

from __future__ import annotations

import re
from typing import Literal, Protocol

from services.common.light_value import light_value
from services.router.api import RequestEnd

_MAX_CLIENT_ID_CHARS = 128
_NOT_IN_CLIENT_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")

PROBE_ROUTES = frozenset({"/health", "/ready", "/metrics"})

Door = Literal["http", "grpc"]


@light_value
class RequestRecord:
    """One finished request of a front door. Labels are bounded; the id is for logs only."""

    door: Door
    route: str  # the route's template or the RPC's name, never the raw path
    code: str  # "ok" or a code of the error table
    duration_s: float
    request_id: str = ""
    ttft_s: float | None = None  # until the first frame was handed to the transport
    end: RequestEnd | None = None  # usage and where it ran; None = it did not end well
    client_request_id: str = ""  # the client's own name for it, cleaned; for logs only
    tenant: str = ""  # this and the rest are for the audit log only
    key_id: str = ""
    peer: str = ""  # address it came from

    @property
    def is_probe(self) -> bool:
        """Whether it is one of those that come every few seconds and went well."""
        return self.code == "ok" and self.route in PROBE_ROUTES


class GatewayHooks(Protocol):
    """Telemetry of the front doors."""

    def request_finished(self, record: RequestRecord) -> None:
        """A request is over, well or not."""
        ...

    def render_metrics(self) -> tuple[str, bytes]:
        """Give the content type and body of /metrics."""
        ...


def client_id_of(value: str) -> str:
    """Make a client's own request id fit for a log: short, and of harmless characters only."""
    return _NOT_IN_CLIENT_ID.sub("_", value[:_MAX_CLIENT_ID_CHARS])


class NoHooks:
    """Tells nobody."""

    def request_finished(self, record: RequestRecord) -> None:
        """Ignore."""

    def render_metrics(self) -> tuple[str, bytes]:
        """Give an empty exposition."""
        return "text/plain; version=0.0.4; charset=utf-8", b""
