"""API keys of a run: one for all, or one of each tenant. Never from a flag: others can see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadtest.scenario import Scenario
from services.common.bounded_file import read_secret
from services.common.errors import ConfigError

KEY_VARIABLE = "ISTHMUS_API_KEY"
KEY_ADVICE = f"set {KEY_VARIABLE} or give --api-key-file"
_MAX_KEY_BYTES = 4096


class ApiKeys:
    """The key of each tenant."""

    def __init__(self, default: str = "", of_tenants: Mapping[str, str] | None = None) -> None:
        self._default = default
        self._of_tenants = dict(of_tenants or {})

    def __repr__(self) -> str:
        return f"ApiKeys({sorted(self._of_tenants)})"

    def of(self, tenant: str) -> str:
        """Return a tenant's key; "" = none."""
        return self._of_tenants.get(tenant, self._default)


def read_keys(scenario: Scenario, environ: Mapping[str, str], key_file: Path | None) -> ApiKeys:
    """Read keys from a file and from variables that shares of the mix name; else ConfigError."""
    default = environ.get(KEY_VARIABLE, "")
    if key_file is not None:
        default = read_secret("--api-key-file", key_file, 1, _MAX_KEY_BYTES).reveal().decode()
    of_tenants: dict[str, str] = {}
    for share in scenario.mix:
        if not share.api_key_env:
            continue
        if not environ.get(share.api_key_env):
            raise ConfigError(f"mix: the variable {share.api_key_env} is not set")
        key = environ[share.api_key_env]
        if of_tenants.setdefault(share.tenant, key) != key:
            raise ConfigError(
                f"mix: two shares of tenant {share.tenant or 'without a name'} have different "
                f"keys, one of them by {share.api_key_env}"
            )
    return ApiKeys(default, of_tenants)
