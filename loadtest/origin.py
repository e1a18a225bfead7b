"""Where a result was made."""

from __future__ import annotations

from dataclasses import asdict

from loadtest.analysis import Origin
from services.common.machine import machine


def origin() -> Origin:
    """Describe this machine and the commit of the checkout."""
    here = asdict(machine())
    return Origin(here, here.pop("commit"))
