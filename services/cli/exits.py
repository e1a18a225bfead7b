"""Exit statuses of the `isthmus` command."""

from __future__ import annotations

OK = 0
FAILED = 1  # the thing asked for did not work
USAGE = 2  # wrong flags or configuration; trying again changes nothing
MODEL = 3  # the model cannot be found, read or downloaded
STORE = 4  # the store does not answer
UNREACHABLE = 5  # no router or worker at the given address
INTERRUPTED = 130
