"""Names under which tenants' KV blocks are kept apart: a keyed hash of who they are."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import shlex
from pathlib import Path

from services.common import bounded_file
from services.common.errors import ConfigError
from services.common.private_file import replace_private
from services.common.secret import Secret

SECRET_NAME = "tenant.secret"  # beside the keys
_MIN_BYTES = 32
_MAX_BYTES = 4096
_TAG = b"isthmus-tenant/1\0"
_SHARED = b"isthmus-shared/1\0"
_BUDGET = b"isthmus-budget/1\0"


class Namespaces:
    """Turns a tenant into the name that goes into its block hashes.

    The name tells nobody who the tenant is, and without the secret nobody can compute which hash a
    prompt of another tenant has. Tenants of the opt-in list share one name, and so their prefixes.
    """

    def __init__(self, secret: Secret, shared: frozenset[str] = frozenset()) -> None:
        self._secret = secret
        self._shared = shared

    def of(self, tenant: str) -> str:
        """Give a tenant's name; the nameless tenant, when nobody is told apart, has none."""
        if not tenant:
            return ""
        return self._keyed(_SHARED if tenant in self._shared else _TAG + tenant.encode())

    def budget(self, tenant: str) -> str:
        """Give the name of a tenant's own budget, whoever it shares prefixes with."""
        return self._keyed(_BUDGET + tenant.encode()) if tenant else "-"

    def _keyed(self, message: bytes) -> str:
        return hmac.new(self._secret.reveal(), message, hashlib.sha256).hexdigest()[:32]


def random_secret() -> Secret:
    """Make a secret of this process alone: caches are then of no use to another router."""
    return Secret(secrets.token_bytes(_MIN_BYTES))


def secret_path(configured: str, keys_file: str) -> Path:
    """Give where the secret lies: as configured, else beside the keys."""
    if configured:
        return Path(configured)
    keys = Path(keys_file)
    return (keys if keys.is_dir() else keys.parent) / SECRET_NAME


def read_secret(path: Path) -> Secret:
    """Read the secret; ConfigError says what is wrong with the file."""
    try:
        return bounded_file.read_secret("auth.tenant_secret_file", path, _MIN_BYTES, _MAX_BYTES)
    except ConfigError as error:
        if not isinstance(error.__context__, FileNotFoundError):
            raise
        raise ConfigError(
            f"auth.tenant_secret_file: there is no {path}; make it with "
            f"`isthmus key tenant-secret --file {shlex.quote(str(path))}`"
        ) from None


def make_secret(path: Path) -> bool:
    """Make the file unless it is there; a new secret voids what all caches hold."""
    if path.exists():
        return False
    replace_private(path, secrets.token_hex(_MIN_BYTES) + "\n")
    return True
