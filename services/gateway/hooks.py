"""What the front doors tell telemetry; the router process plugs its own in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Door = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request of a front door. Labels are bounded; the id is for logs only."""

    door: Door
    route: str  # the route's template or the RPC's name, never the raw path
    code: str  # "ok" or a code of the error table
    duration_s: float
    request_id: str = ""
    num_output_tokens: int = 0
    ttft_s: float | None = None  # until the first frame was handed to the transport


class GatewayHooks(Protocol):
    """Telemetry of the front doors."""

    def request_finished(self, record: RequestRecord) -> None:
        """A request is over, well or not."""
        ...

    def render_metrics(self) -> tuple[str, bytes]:
        """Give the content type and body of /metrics."""
        ...


class NoHooks:
    """Tells nobody."""

    def request_finished(self, record: RequestRecord) -> None:
        """Ignore."""

    def render_metrics(self) -> tuple[str, bytes]:
        """Give an empty exposition."""
        return "text/plain; version=0.0.4; charset=utf-8", b""
