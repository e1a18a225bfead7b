"""Reading files that a setting names: never more than a bound, and faults that name the setting."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import ConfigError
from services.common.secret import Secret


def read_bounded(setting: str, path: Path, max_bytes: int) -> bytes:
    """Read a file; ConfigError when it cannot be read or is larger than `max_bytes`."""
    data = _head(setting, path, max_bytes)
    if len(data) > max_bytes:
        raise ConfigError(f"{setting}: {path} is larger than {max_bytes} bytes")
    return data


def read_secret(setting: str, path: Path, min_bytes: int, max_bytes: int) -> Secret:
    """Read a file that holds one secret, blanks around it left out; ConfigError if it does not."""
    value = _head(setting, path, max_bytes).strip()
    if not min_bytes <= len(value) <= max_bytes:
        raise ConfigError(f"{setting}: {path} must hold {min_bytes} to {max_bytes} bytes")
    return Secret(value)


def _head(setting: str, path: Path, max_bytes: int) -> bytes:
    """Read one byte more than may be there: enough to see that there are too many."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror})") from None
