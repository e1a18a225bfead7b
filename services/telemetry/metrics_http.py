"""/metrics and probes of processes that have no HTTP front door, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from services.common.address import family_of, join_host_port
from services.common.clock import Clock
from services.common.errors import ConfigError
from services.telemetry.metrics import CONTENT_TYPE, Metrics
from services.telemetry.vitals import Verdict, Vitals

_REQUEST_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Answers GET and HEAD of /metrics, and of the probes it is given.

    Probes carry no credentials and learn nothing but a reason. Everything else is 404.
    """

    def __init__(
        self,
        metrics: Metrics,
        host: str,
        port: int,
        may_read: Callable[[str], bool] = lambda _authorization: True,
        probes: Mapping[str, Callable[[], Verdict]] | None = None,
    ) -> None:
        """Bind; port 0 takes any free one. Raises ConfigError when the address is taken.

        `may_read` judges the `authorization` header of a request; a default server asks for none.
        `probes` are paths that anyone may ask for: 200 or 503, and the reason.
        """

        class Handler(_Handler):
            """Bound to this process's metrics."""

            source = metrics
            is_allowed = staticmethod(may_read)
            judges = probes or {}

        class Server(ThreadingHTTPServer):
            """On the address family of the host."""

            address_family = family_of(host)
            daemon_threads = True

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            address = join_host_port(host, port)
            raise ConfigError(f"cannot listen on {address} for /metrics") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics-http", daemon=True
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and end the thread."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(_REQUEST_TIMEOUT_S)
        self._server.server_close()


def probes_of(vitals: Vitals, clock: Clock) -> dict[str, Callable[[], Verdict]]:
    """Return the two probes that these vitals answer."""
    return {
        "/live": lambda: vitals.is_live(clock.now()),
        "/ready": lambda: vitals.is_ready(clock.now()),
    }


class _Handler(BaseHTTPRequestHandler):
    source: Metrics
    is_allowed: Callable[[str], bool]
    judges: Mapping[str, Callable[[], Verdict]]
    timeout = _REQUEST_TIMEOUT_S
    server_version = "isthmus"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if (judge := self.judges.get(path)) is not None:
            verdict = judge()
            status = 200 if verdict.is_good else 503
            self._send(status, _TEXT, f"{verdict.reason}\n".encode(), with_body=with_body)
        elif not self.is_allowed(self.headers.get("authorization", "")):
            self.send_error(401)
        elif path != "/metrics":
            self.send_error(404)
        else:
            self._send(200, CONTENT_TYPE, self.source.render(), with_body=with_body)

    def _send(self, status: int, content_type: str, body: bytes, *, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a log line each."""
