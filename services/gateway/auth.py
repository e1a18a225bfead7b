"""Who may call what: API keys, and one policy table over every route and RPC, default deny."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import ConfigError, RequestError
from services.gateway.keys import KeyRecord, hash_key, key_id_of, read_keys
from services.gateway.wire_names import (
    API_KEY,
    AUTHORIZATION,
    CHAT_ROUTE,
    COMPLETION_ROUTE,
    DETOKENIZE_ROUTE,
    HEALTH_ROUTE,
    METRICS_ROUTE,
    MODEL_ROUTE,
    MODELS_ROUTE,
    READY_ROUTE,
    TOKENIZE_ROUTE,
)
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_MAX_KEY_CHARS = 256


class Access(Enum):
    """What a route asks of its caller."""

    OPEN = "open"  # answers anyone: says only whether the process lives and is ready
    KEY = "key"  # needs a key when a keys file is configured


HTTP_POLICY: Mapping[str, Access] = {
    HEALTH_ROUTE.path: Access.OPEN,
    READY_ROUTE.path: Access.OPEN,
    METRICS_ROUTE.path: Access.KEY,
    MODELS_ROUTE.path: Access.KEY,
    MODEL_ROUTE.path: Access.KEY,
    CHAT_ROUTE.path: Access.KEY,
    COMPLETION_ROUTE.path: Access.KEY,
    TOKENIZE_ROUTE.path: Access.KEY,
    DETOKENIZE_ROUTE.path: Access.KEY,
}

GRPC_POLICY: Mapping[str, Access] = {
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Access.KEY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.KEY,
    "/isthmus.v1.Inference/Generate": Access.KEY,
    "/isthmus.v1.Inference/ListModels": Access.KEY,
    "/isthmus.v1.Inference/Tokenize": Access.KEY,
    "/isthmus.v1.Inference/Detokenize": Access.KEY,
    "/isthmus.v1.Admin/ClusterStatus": Access.KEY,
}


def is_open(policy: Mapping[str, Access], exact_name: str) -> bool:
    """Whether a route may be called without a key: only those listed so, spelled exactly so."""
    return policy.get(exact_name) is Access.OPEN


def check_policy(policy: Mapping[str, Access], names: Iterable[str]) -> None:
    """Refuse to start with a route nobody decided about."""
    missing = sorted(set(names) - policy.keys())
    if missing:
        raise ConfigError(f"no access policy for {', '.join(missing)}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. Without a keys file everyone is the nameless tenant."""

    tenant: str = ""
    key_id: str = ""


class Authenticator:
    """Checks keys against the file, which it reads again soon after it has changed.

    An absent file means no keys, so all is refused; a damaged one keeps the last good keys,
    because a half-written edit must not lock everyone out.
    """

    def __init__(self, keys_file: Path | None, clock: Clock, poll_s: float = 1.0) -> None:
        self._path = keys_file
        self._clock = clock
        self._poll_s = poll_s
        self._records: dict[str, KeyRecord] = {}
        self._seen: tuple[int, int, int] | None = None  # inode, size, mtime of what was read
        self._next_look = float("-inf")
        if keys_file is not None:
            self._look()

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Give the caller of a request, from lower-case header names; raise `unauthenticated`."""
        if self._path is None:
            return Caller()
        if self._clock.now() >= self._next_look:
            self._look()
        key = _presented_key(headers)
        if not key:
            raise RequestError(
                "unauthenticated", "an API key is needed: authorization: Bearer <key>"
            )
        record = self._records.get(key_id_of(key))
        digest = hash_key(key)
        # Compared in constant time, also when there is no such id.
        expected = record.sha256 if record is not None else "0" * 64
        if not hmac.compare_digest(digest, expected) or record is None:
            raise RequestError("unauthenticated", "the API key is not known")
        return Caller(record.tenant, record.key_id)

    def _look(self) -> None:
        assert self._path is not None
        self._next_look = self._clock.now() + self._poll_s
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._seen:
                return
            content = read_keys(self._path)
        except FileNotFoundError:
            if self._seen is not None or not self._records:
                log.error("gateway.keys_file_missing", path=str(self._path))
            self._records, self._seen = {}, None
            return
        except (ConfigError, OSError) as error:
            log.error(
                "gateway.keys_file_unreadable",
                path=str(self._path),
                reason=type(error).__name__,
            )
            return
        self._records = {record.key_id: record for record in content.keys}
        self._seen = seen
        log.info("gateway.keys_loaded", num_keys=len(self._records))


def _presented_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get(AUTHORIZATION.name, "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get(API_KEY.name, "")
    key = key.strip()
    return key if len(key) <= _MAX_KEY_CHARS else ""
