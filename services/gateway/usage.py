"""How much every tenant has used: counters in a file that outlives the router."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from services.common.errors import ConfigError
from services.common.private_file import replace_private
from services.runtime.held_file import HeldFile
from services.telemetry.logs import get_logger

log = get_logger(__name__)

FLUSH_S = 1.0
OTHERS = "(others)"  # tenants beyond the bound
_MAX_TENANTS = 20_000
_MAX_FILE_BYTES = 16 << 20
_SUFFIX = ".usage.json"


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's, those that were not computed again
    completion_tokens: int = 0

    def plus(self, other: Usage) -> Usage:
        """Add up."""
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


COLUMNS = tuple(field.name for field in fields(Usage))


class UsageBook:
    """Counters of one router. They only grow; a crash loses the last second's."""

    def __init__(self, directory: Path | None, router_id: str) -> None:
        """Go on from the file, None = keep none. Raises ConfigError if it is damaged or in use."""
        self._path = None if directory is None else directory / f"{router_id}{_SUFFIX}"
        self._held = None if self._path is None else HeldFile(self._path)
        self._counters: dict[str, Usage] = {}
        self._is_dirty = False
        self._writing: asyncio.Future[None] | None = None
        self._is_told = False
        if self._path is not None and self._path.exists():
            self._counters = dict(read_usage(self._path))

    def add(self, tenant: str, usage: Usage) -> None:
        """Count."""
        if self._path is None:
            return
        if tenant not in self._counters and len(self._counters) >= _MAX_TENANTS:
            tenant = OTHERS
        self._counters[tenant] = self._counters.get(tenant, Usage()).plus(usage)
        self._is_dirty = True

    async def flush_forever(self) -> None:
        """Write what has changed, now and then, off the event loop."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> bool:
        """Write if something has changed; False = the disk took it not, it is kept for later."""
        if self._writing is not None:
            # Left behind by a flush that was cancelled: an older file must not come last.
            await asyncio.wait([self._writing])
        if self._path is None or not self._is_dirty:
            return True
        self._is_dirty = False
        write = asyncio.to_thread(replace_private, self._path, _dump(self._counters))
        self._writing = asyncio.ensure_future(write)
        try:
            await asyncio.shield(self._writing)
        except OSError as error:
            self._is_dirty = True
            if not self._is_told:
                log.error("gateway.usage_not_written", reason=error.strerror)
            self._is_told = True
            return False
        self._is_told = False
        return True

    async def close(self) -> None:
        """Write the rest and let the file go."""
        self._is_dirty = True  # whatever became of the last flush
        await self.flush()
        if self._held is not None:
            self._held.release()


def read_usage(path: Path) -> Mapping[str, Usage]:
    """Read one router's counters; ConfigError says that they are damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        content = json.loads(data)
        if len(data) > _MAX_FILE_BYTES or content["format"] != 1:
            raise ValueError
        return {str(tenant): _usage(entry) for tenant, entry in content["tenants"].items()}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} is damaged; put it aside to begin anew: counters are not reset unasked"
        ) from None


def read_all(directory: Path) -> Mapping[str, Usage]:
    """Add up the counters of every router that writes there."""
    total: dict[str, Usage] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        for tenant, usage in read_usage(path).items():
            total[tenant] = total.get(tenant, Usage()).plus(usage)
    return dict(sorted(total.items()))


def to_json(total: Mapping[str, Usage]) -> str:
    """Write one object a tenant."""
    return json.dumps([{"tenant": t, **asdict(u)} for t, u in total.items()], indent=2)


def to_csv(total: Mapping[str, Usage]) -> str:
    """Write one row a tenant, with a head."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("tenant", *COLUMNS))
    writer.writerows((tenant, *astuple(usage)) for tenant, usage in total.items())
    return out.getvalue()


def _dump(counters: Mapping[str, Usage]) -> str:
    tenants = {tenant: asdict(usage) for tenant, usage in counters.items()}
    return json.dumps({"format": 1, "tenants": tenants}) + "\n"


def _usage(entry: Mapping[str, object]) -> Usage:
    if entry.keys() != set(COLUMNS):
        raise ValueError
    return Usage(*_counts(entry[name] for name in COLUMNS))


def _counts(values: Iterable[object]) -> Iterable[int]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError
        yield value
