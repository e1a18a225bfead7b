"""Named places in the code where a fault campaign may kill or freeze this very process.

Off unless the environment says otherwise, which nothing but `isthmus chaos` does. A point is the
only way to hit a moment that no timer outside the process would ever hit on purpose.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.common.errors import ConfigError

VARIABLE = "ISTHMUS_FAULT_POINT"

# Of a handoff: on the side that prefills, then on the side that decodes.
SOURCE_POINTS = ("after_ticket", "after_open", "after_ready", "mid_data", "before_final",
                 "after_final")  # fmt: skip
SINK_POINTS = ("before_pull", "mid_pull", "before_done", "after_done")
POINTS = frozenset((*SOURCE_POINTS, *SINK_POINTS))
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(slots=True)
class FaultPoints:
    """At most one armed point: its n-th pass ends or freezes the process.

    Passed only by the thread that owns the code around the point.
    """

    name: str = ""
    passes_left: int = 0
    action: Literal["kill", "stop"] = "kill"
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> FaultPoints:
        """Read `name:n` or `name:n:stop`; ConfigError for anything else."""
        value = environ.get(VARIABLE, "")
        if not value:
            return cls()
        name, _, rest = value.partition(":")
        count, _, action = rest.partition(":")
        if name not in POINTS or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{VARIABLE}: {value!r} is not POINT:N[:stop]")
        if action not in ("", "stop"):
            raise ConfigError(f"{VARIABLE}: the action is `stop` or nothing, not {action!r}")
        return cls(name, int(count), "stop" if action else "kill")

    def hit(self, name: str) -> None:
        """Pass a point; does not return from the armed one when its action is to kill."""
        if name != self.name:
            return
        self.passes_left -= 1
        if self.passes_left == 0:
            os.kill(self.pid, _ACTIONS[self.action])
