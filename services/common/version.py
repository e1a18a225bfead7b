"""The version of the code that runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version() -> str:
    """Return the version of the installed package; "unknown" in a checkout never installed."""
    try:
        return version("isthmus")
    except PackageNotFoundError:
        return "unknown"
