"""Who calls: API keys from a file, tokens of an identity provider, or everyone where neither is."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.access import SCOPES, Scope
from services.common.clock import Clock
from services.common.errors import RequestError
from services.gateway.jwt_auth import MAX_TOKEN_CHARS, JwtSettings, JwtVerifier, looks_like_jwt
from services.gateway.keys import KeyRecord, hash_key, key_id_of, read_keys
from services.gateway.namespaces import Namespaces
from services.gateway.wire_names import API_KEY, AUTHORIZATION
from services.runtime.watched_file import WatchedFile

_MAX_KEY_CHARS = 256

_Callers = Mapping[str, tuple[KeyRecord, "Caller"]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. Where nobody is told apart everyone is the nameless tenant."""

    tenant: str = ""
    key_id: str = ""  # of the key, or `jwt:` and the token's subject; for the audit log
    scopes: frozenset[Scope] = frozenset()
    namespace: str = ""  # the tenant's name in block hashes


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Where credentials come from; all None = everyone who reaches the port may call."""

    keys_file: Path | None = None  # or a directory of such files
    jwt: JwtSettings | None = None
    poll_s: float = 1.0  # how soon a changed file counts
    anonymous: frozenset[Scope] = frozenset(SCOPES)  # what everyone may do then


class Authenticator:
    """Finds out who calls.

    An absent keys file means no keys, so all is refused; a damaged one keeps the last good keys.
    """

    def __init__(self, config: AuthConfig, namespaces: Namespaces, clock: Clock) -> None:
        self._clock = clock
        self._namespaces = namespaces
        self._anonymous = Caller(scopes=config.anonymous)
        self._jwt = JwtVerifier(config.jwt, clock, config.poll_s) if config.jwt else None
        self._callers: WatchedFile[_Callers] | None = None
        path = config.keys_file
        if path is not None:
            self._callers = WatchedFile(
                "auth.keys_file", (path,), lambda: self._read(path), clock, config.poll_s, {}
            )

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Give the caller of a request, from lower-case header names; raise `unauthenticated`."""
        if self._callers is None and self._jwt is None:
            return self._anonymous
        credential = _presented(headers)
        if not credential:
            raise RequestError(
                "unauthenticated", "an API key is needed: authorization: Bearer <key>"
            )
        if self._jwt is not None and looks_like_jwt(credential):
            claims = self._jwt.verify(credential)
            return Caller(
                claims.tenant,
                f"jwt:{claims.subject}",
                claims.scopes,
                self._namespaces.of(claims.tenant),
            )
        return self._by_key(credential)

    def may_monitor(self, authorization: str) -> bool:
        """Whether the bearer of this header may read figures, for a server beside the doors."""
        try:
            caller = self.authenticate({AUTHORIZATION.name: authorization})
        except RequestError:
            return False
        return "monitor" in caller.scopes

    def _by_key(self, key: str) -> Caller:
        callers = self._callers.get() if self._callers is not None else {}
        found = callers.get(key_id_of(key))
        # Compared in constant time, also when there is no such id.
        expected = found[0].sha256 if found is not None else "0" * 64
        if not hmac.compare_digest(hash_key(key), expected) or found is None:
            raise RequestError("unauthenticated", "the API key is not known")
        record, caller = found
        if record.is_expired(self._clock.unix_ms()):
            raise RequestError("unauthenticated", "the API key has expired")
        return caller

    def _read(self, path: Path) -> _Callers:
        return {record.key_id: (record, self._caller(record)) for record in read_keys(path).keys}

    def _caller(self, record: KeyRecord) -> Caller:
        return Caller(
            record.tenant,
            record.key_id,
            frozenset(record.scopes),
            self._namespaces.of(record.tenant),
        )


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, credential = headers.get(AUTHORIZATION.name, "").partition(" ")
    if scheme.lower() != "bearer":
        credential = headers.get(API_KEY.name, "")
    credential = credential.strip()
    longest = MAX_TOKEN_CHARS if looks_like_jwt(credential) else _MAX_KEY_CHARS
    return credential if len(credential) <= longest else ""
