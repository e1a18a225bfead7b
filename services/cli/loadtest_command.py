"""`isthmus loadtest`: the load test is a program of its own, above everything here."""

from __future__ import annotations

import os
import sys

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def loadtest(context: typer.Context) -> None:
    """Send a load to a cluster, or to any OpenAI-compatible server, and judge what it does."""
    os.execv(sys.executable, [sys.executable, "-m", "loadtest", *context.args])
