"""Bearer tokens of an identity provider: JWTs checked against keys in a file, nothing fetched."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from services.common.access import SCOPES, Scope
from services.common.bounded_file import read_bounded
from services.common.clock import Clock
from services.common.errors import ConfigError, RequestError
from services.runtime.watched_file import WatchedFile

MAX_TOKEN_CHARS = 8192
_MAX_FILE_BYTES = 1 << 20
_MAX_KEYS = 64
_MAX_REMEMBERED = 4096
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Families whose public keys verify and cannot sign: a shared secret would let whoever verifies
# also sign, and "none" would let everyone.
_KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """Which tokens are believed."""

    jwks_file: Path
    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    tenant_claim: str = "tenant"
    leeway_s: int = 30  # of the provider's clock


@dataclass(frozen=True, slots=True)
class JwtClaims:
    """What a good token says of its bearer."""

    tenant: str
    subject: str
    scopes: frozenset[Scope]
    expires_unix_s: float


class JwtVerifier:
    """Verifies tokens; remembers good ones, because a signature costs far more than a look."""

    def __init__(self, settings: JwtSettings, clock: Clock, poll_s: float = 1.0) -> None:
        """Read the keys; raises ConfigError."""
        self._settings = settings
        self._clock = clock
        path = settings.jwks_file
        self._keys = WatchedFile("auth.jwks_file", (path,), lambda: read_jwks(path), clock, poll_s)
        self._good: OrderedDict[bytes, JwtClaims] = OrderedDict()
        self._good_version = self._keys.version

    def verify(self, token: str) -> JwtClaims:
        """Give a token's claims; raise `unauthenticated`, saying no more than its bearer needs."""
        keys = self._keys.get()
        if self._keys.version != self._good_version:
            self._good.clear()  # a key may have been taken out
            self._good_version = self._keys.version
        name = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        claims = self._good.get(name)
        if claims is None:
            claims = self._check(token, keys)
            self._good[name] = claims
            if len(self._good) > _MAX_REMEMBERED:
                self._good.popitem(last=False)
        if self._clock.unix_ms() / 1000 >= claims.expires_unix_s + self._settings.leeway_s:
            raise RequestError("unauthenticated", "the token has expired")
        return claims

    def _check(self, token: str, keys: Mapping[str, jwt.PyJWK]) -> JwtClaims:
        settings = self._settings
        try:
            head = jwt.get_unverified_header(token)
            key, algorithm = keys.get(str(head.get("kid", ""))), head.get("alg")
            if key is None or algorithm not in settings.algorithms:
                raise RequestError("unauthenticated", "the token is of an unknown key or algorithm")
            if _KEY_TYPES[algorithm[:2]] != key.key_type:
                raise RequestError("unauthenticated", "the token's algorithm is not of its key")
            # Times are judged by our clock below: the library would ask the machine's.
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False, "verify_nbf": False, "verify_iat": False,
                },
            )  # fmt: skip
        except (jwt.PyJWTError, ValueError, TypeError):
            raise RequestError("unauthenticated", "the token is not valid") from None
        return self._claims(claims)

    # Any: claims are whatever the provider wrote.
    def _claims(self, claims: Mapping[str, Any]) -> JwtClaims:
        tenant, expires = claims.get(self._settings.tenant_claim), claims["exp"]
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise RequestError("unauthenticated", "the token names no tenant")
        starts = claims.get("nbf", 0)
        if not _is_time(expires) or not _is_time(starts):
            raise RequestError("unauthenticated", "the token is not valid")
        if self._clock.unix_ms() / 1000 < starts - self._settings.leeway_s:
            raise RequestError("unauthenticated", "the token is not valid yet")
        named = claims.get("scope", "")
        words = frozenset(named.split()) if isinstance(named, str) else frozenset()
        return JwtClaims(
            tenant=tenant,
            subject=str(claims.get("sub", ""))[:128],
            scopes=frozenset(scope for scope in SCOPES if scope in words),
            expires_unix_s=float(expires),
        )


def looks_like_jwt(credential: str) -> bool:
    """Whether a credential has the shape of a token rather than of a key of ours."""
    return credential.startswith("eyJ") and credential.count(".") == 2


def read_jwks(path: Path) -> Mapping[str, jwt.PyJWK]:
    """Read public keys by their id; ConfigError says what is wrong with the file."""
    data = read_bounded("auth.jwks_file", path, _MAX_FILE_BYTES)
    try:
        entries = json.loads(data)["keys"]
        if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_KEYS:
            raise ConfigError(f"auth.jwks_file: it must hold 1 to {_MAX_KEYS} keys")
        keys = [_read_key(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError, jwt.PyJWTError):
        raise ConfigError("auth.jwks_file: it is not a set of public keys (RFC 7517)") from None
    found = {key.key_id or "": key for key in keys}
    if len(found) != len(keys):
        raise ConfigError("auth.jwks_file: keys need different `kid`s")
    return found


def _read_key(entry: dict[str, Any]) -> jwt.PyJWK:
    if entry.get("kty") not in set(_KEY_TYPES.values()):
        raise ConfigError("auth.jwks_file: only RSA, EC and OKP keys are taken")
    if "d" in entry:
        raise ConfigError("auth.jwks_file: it holds a private key; put in the public part only")
    return jwt.PyJWK(entry)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
