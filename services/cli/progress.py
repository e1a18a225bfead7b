"""Progress of long steps: a line that rewrites itself on a terminal, now and then one elsewhere."""

from __future__ import annotations

import sys

import typer

from services.common.clock import Clock, SystemClock

_MIN_STEP = 0.01
_SILENCE_S = 10.0  # a step that takes longer is told again where lines cannot be rewritten


class Progress:
    """Called with what is being done and the share of it that is done; never on stdout."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._clock = clock or SystemClock()
        self._step = ""
        self._share = -1.0
        self._told_at = 0.0

    def __call__(self, step: str, share: float) -> None:
        """Show the step, and how far it is."""
        is_new = step != self._step
        if self._is_terminal:
            self._rewrite(step, share, is_new=is_new)
        else:
            self._tell(step, share, is_new=is_new)
        self._step = step

    def _rewrite(self, step: str, share: float, *, is_new: bool) -> None:
        if is_new:
            # What came before stays on its line, whether or not it was said to be over.
            begin = "\n" if self._step and self._share < 1.0 else ""
            typer.echo(begin, err=True, nl=False)
            self._share = -1.0
        if share - self._share >= _MIN_STEP or share >= 1.0:
            self._share = share
            end = "\n" if share >= 1.0 else ""
            typer.echo(f"\r\033[K{step} {share:4.0%}{end}", err=True, nl=False)

    def _tell(self, step: str, share: float, *, is_new: bool) -> None:
        now = self._clock.now()
        if is_new or now - self._told_at >= _SILENCE_S:
            self._told_at = now
            typer.echo(step if is_new else f"{step} {share:.0%}", err=True)

    def done(self) -> None:
        """End the last line, so that what is printed next has one of its own."""
        if self._is_terminal and self._step and self._share < 1.0:
            typer.echo("", err=True)
        self._step, self._share = "", -1.0
