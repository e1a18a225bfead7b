"""Exit statuses of the load test's commands; equal numbers mean the same in `isthmus`."""

from __future__ import annotations

OK = 0
FAILED = 1  # what was asked for did not hold
USAGE = 2  # wrong flags or files; trying again changes nothing
UNREACHABLE = 5  # nothing can be measured at the target
INTERRUPTED = 130
