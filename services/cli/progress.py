"""Progress of long steps: a line that rewrites itself on a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys

import typer

_MIN_STEP = 0.01


class Progress:
    """Called with what is being done and the share of it that is done."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._step = ""
        self._share = -1.0

    def __call__(self, step: str, share: float) -> None:
        """Show the step; on a terminal also how far it is."""
        if step != self._step:
            self._step, self._share = step, -1.0
            if not self._is_terminal:
                typer.echo(step, err=True)
        if self._is_terminal and (share - self._share >= _MIN_STEP or share >= 1.0):
            self._share = share
            end = "\n" if share >= 1.0 else ""
            typer.echo(f"\r\033[K{step} {share:4.0%}{end}", err=True, nl=False)
