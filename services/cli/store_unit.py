"""The store of `isthmus up`: its own, started again when it dies, or the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.cli.store_address import shown_url
from services.common.errors import ConfigError, StoreUnavailable
from services.registry.embedded import EmbeddedStore
from services.runtime.process import GiveUp, RestartPolicy
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_PING_TIMEOUT_S = 2.0


def ping_store(url: str) -> None:
    """Ask a store of the user's own for a sign of life; raises ConfigError, StoreUnavailable."""
    place = shown_url(url)
    try:
        client = redis.Redis.from_url(
            url,
            socket_connect_timeout=_PING_TIMEOUT_S,
            socket_timeout=_PING_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        raise ConfigError(
            f"store.url: {place} is not the address of a store: "
            "redis://HOST:PORT, rediss://HOST:PORT or unix://PATH"
        ) from None
    try:
        client.ping()
    # No cause is kept: the library's message may quote what the address holds.
    except redis.AuthenticationError:
        raise StoreUnavailable(f"the store at {place} refuses user or password") from None
    except (redis.ConnectionError, redis.TimeoutError):
        raise StoreUnavailable(
            f"nobody answers at {place}; leave out --redis (store.url) to have one started"
        ) from None
    except redis.RedisError as error:
        raise StoreUnavailable(
            f"the store at {place} answers with {type(error).__name__}"
        ) from None
    finally:
        client.close()


class StoreUnit:
    """An embedded store at a fixed address, or a name for somebody else's."""

    def __init__(self, embedded: EmbeddedStore | None, runtime_dir: Path, url: str) -> None:
        self.url = url
        self._embedded = embedded
        self._runtime_dir = runtime_dir
        self._policy = RestartPolicy()
        self._restart_at = 0.0
        self._state = "ready"
        self._reason = ""
        self._ready_at = 0.0
        self._num_restarts = 0

    @classmethod
    def start(cls, runtime_dir: Path) -> StoreUnit:
        """Start an embedded store; raises StoreUnavailable."""
        embedded = EmbeddedStore.start(runtime_dir)
        return cls(embedded, runtime_dir, embedded.url)

    @classmethod
    def external(cls, url: str, runtime_dir: Path) -> StoreUnit:
        """Use a store that runs anyway."""
        return cls(None, runtime_dir, url)

    def tick(self, now: float) -> bool:
        """Start a dead store again (empty: workers publish anew); True = something changed."""
        if self._embedded is None:
            return False
        if self._state == "ready" and not self._embedded.is_running():
            self._died(now, was_ready=True)
            return True
        if self._state == "waiting" and now >= self._restart_at:
            self._restart(now)
            return True
        return False

    def _died(self, now: float, *, was_ready: bool) -> None:
        if was_ready:
            self._policy.ready(self._ready_at)
        decision = self._policy.ended(now, 1)
        if isinstance(decision, GiveUp):
            self._state, self._reason = "failed", decision.reason
        else:
            self._state, self._restart_at = "waiting", now + decision.delay_s

    def _restart(self, now: float) -> None:
        assert self._embedded is not None
        self._embedded.stop()  # removes the dead one's socket
        parts = urlsplit(self.url)
        try:
            # The address stays: routers and workers know no other.
            self._embedded = EmbeddedStore.start(
                self._runtime_dir, use_tcp=parts.scheme == "redis", port=parts.port or 0
            )
        except StoreUnavailable as error:
            log.error("up.store_failed", error=str(error))
            self._died(now, was_ready=False)
            return
        self._num_restarts += 1
        self._state, self._ready_at = "ready", now

    def describe(self) -> Iterator[dict[str, object]]:
        """The store's entry in the status file; none for somebody else's."""
        if self._embedded is not None:
            yield {
                "name": "store",
                "role": "store",
                "pid": self._embedded.pid,
                "grpc": "",
                "http": "",
                "state": self._state,
                "reason": self._reason,
                "restarts": self._num_restarts,
                "url": self.url,
            }

    def stop(self) -> None:
        """End the embedded store; somebody else's goes on."""
        if self._embedded is not None:
            self._embedded.stop()
            self._state = "stopped"
