"""API keys at rest: only SHA-256 digests of keys, in one file or in a mounted directory of them."""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.access import Scope
from services.common.errors import ConfigError
from services.common.private_file import replace_private

_PREFIX = "isk"
_MAX_FILE_BYTES = 4 << 20
_MAX_KEYS = 10_000


class KeyRecord(BaseModel):
    """One key as the file knows it; the key itself is shown once and kept nowhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_id: str = Field(pattern=r"^[0-9a-f]{12}$", description="public part of the key")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of the whole key, hex")
    tenant: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    label: str = Field(default="", max_length=128, description="what the key is for")
    created_unix_ms: int = Field(ge=0)
    expires_unix_ms: int | None = Field(default=None, ge=0, description="None = never")
    # Files from before there were scopes hold keys that could do just this.
    scopes: tuple[Scope, ...] = Field(default=("inference", "monitor"), min_length=1)

    def is_expired(self, unix_ms: int) -> bool:
        """Whether the key's time is over."""
        return self.expires_unix_ms is not None and unix_ms >= self.expires_unix_ms


class KeysFile(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(default=1, ge=1, le=1)
    keys: tuple[KeyRecord, ...] = Field(default=(), max_length=_MAX_KEYS)


def read_keys(path: Path) -> KeysFile:
    """Read a file, or every *.json of a directory (a mounted Secret).

    Raises ConfigError for a damaged one, FileNotFoundError if it is absent.
    """
    if not path.is_dir():
        return _read_file(path)
    found = [_read_file(file).keys for file in sorted(path.glob("*.json"))]
    if not found:
        raise ConfigError("keys directory: it holds no *.json file")
    keys = tuple(record for keys in found for record in keys)
    if len({record.key_id for record in keys}) != len(keys):
        raise ConfigError("keys directory: two files hold the same key_id")
    return KeysFile(keys=keys)


def _read_file(path: Path) -> KeysFile:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"keys file: larger than {_MAX_FILE_BYTES} bytes")
    try:
        return KeysFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"keys file: {where}: {first['msg']}") from None


def check_keys_file(path: Path) -> None:
    """Raise ConfigError unless the file is there and whole.

    A router that runs bears a missing file (it refuses everyone until the file is back), but one
    that starts without it has most likely been given a wrong path.
    """
    try:
        read_keys(path)
    except FileNotFoundError:
        raise ConfigError(
            f"auth.keys_file: there is no {path}; make it with "
            f"`isthmus key new --file {shlex.quote(str(path))}`"
        ) from None
    except OSError as error:
        raise ConfigError(f"auth.keys_file: {path} cannot be read ({error.strerror})") from None
    except ConfigError as error:
        raise ConfigError(f"auth.keys_file: {path}: {error}") from None


def create_key(
    path: Path,
    tenant: str,
    label: str,
    unix_ms: int,
    scopes: tuple[Scope, ...] = ("inference",),
    expires_unix_ms: int | None = None,
) -> tuple[str, KeyRecord]:
    """Add a new key; give its text, which cannot be had again, and its record."""
    key_id = secrets.token_hex(6)
    key = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
    try:
        record = KeyRecord(
            key_id=key_id,
            sha256=hash_key(key),
            tenant=tenant,
            label=label,
            created_unix_ms=unix_ms,
            expires_unix_ms=expires_unix_ms,
            scopes=scopes,
        )
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None
    current = _read_or_empty(path)
    _write(path, KeysFile(keys=(*current.keys, record)))
    return key, record


def list_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Give the records in the file, none if there is no file."""
    return _read_or_empty(path).keys


def revoke_key(path: Path, key_id: str) -> bool:
    """Take a key out; give False if the file has none of that id."""
    current = _read_or_empty(path)
    kept = tuple(record for record in current.keys if record.key_id != key_id)
    if len(kept) == len(current.keys):
        return False
    _write(path, KeysFile(keys=kept))
    return True


def hash_key(key: str) -> str:
    """Digest a key. A plain hash is enough: keys are 256 random bits, not passwords."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_id_of(key: str) -> str:
    """Give the public part of a key, "" if it is not shaped like one of ours."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _read_or_empty(path: Path) -> KeysFile:
    try:
        return read_keys(path)
    except FileNotFoundError:
        return KeysFile()


def _write(path: Path, content: KeysFile) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name the file in it that is to change")
    replace_private(path, json.dumps(content.model_dump(mode="json"), indent=2) + "\n")
