"""How many files and sockets a process may have open: raised at start, refused when too few.

Short of descriptors libzmq ends the whole process and gRPC stops accepting, so a limit that is
too low must be told at the start, not met under load.
"""

from __future__ import annotations

import resource

from services.common.errors import ConfigError

# A worker alone has about 60 open, and each peer, router and connection adds a few.
FLOOR = 256
ENOUGH = 65_536  # more is never asked for: some libraries walk over all there could be
ADVICE = "raise it (`ulimit -n`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"


def limits() -> tuple[int, int | None]:
    """Return the limit that holds and the highest it may be set to; None = any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        ENOUGH if soft == resource.RLIM_INFINITY else soft,
        None if hard == resource.RLIM_INFINITY else hard,
    )


def reachable(soft: int, hard: int | None) -> int:
    """Return the limit a process sets for itself; it never lowers one."""
    return max(soft, ENOUGH if hard is None else min(hard, ENOUGH))


def ensure_open_files(floor: int = FLOOR) -> int:
    """Raise the limit as far as it makes sense; ConfigError when it stays below the floor."""
    soft, hard = limits()
    limit = reachable(soft, hard)
    if limit > soft:
        ceiling = resource.RLIM_INFINITY if hard is None else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, ceiling))
    if limit < floor:
        raise ConfigError(
            f"open files: this process may have {limit} at most and needs {floor}: {ADVICE}"
        )
    return limit
