"""Idempotency keys: which request a repeated key means. Pure; takes `now`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from services.common.errors import RequestError

T = TypeVar("T")
Verdict = Literal["new", "join", "replay", "forgotten"]


@dataclass(slots=True)
class _Entry(Generic[T]):
    fingerprint: bytes
    run: T | None  # None once its outputs were given up for room
    size: int = 0  # outputs kept
    finished_at: float | None = None


@dataclass(frozen=True, slots=True)
class Claim(Generic[T]):
    """What to do with a request: `reason` says which of the four cases it is."""

    reason: Verdict
    run: T | None = None


class IdempotencyTable(Generic[T]):
    """Bounded map from (tenant, key) to a run. Finished runs are kept `ttl_s`.

    Room is made by forgetting outputs first (the status stays), then the oldest finished keys;
    running ones are never dropped, so a full table of running requests refuses new keys.
    """

    def __init__(self, max_keys: int, max_outputs: int, ttl_s: float) -> None:
        self._max_keys = max_keys
        self._max_outputs = max_outputs
        self._ttl_s = ttl_s
        self._running: dict[tuple[str, str], _Entry[T]] = {}
        self._finished: OrderedDict[tuple[str, str], _Entry[T]] = OrderedDict()  # oldest first
        self._num_outputs = 0

    def claim(self, tenant: str, key: str, fingerprint: bytes, now: float) -> Claim[T]:
        """Say whether the key is new, running, or finished; raise if its body differs."""
        self._expire(now)
        name = (tenant, key)
        entry = self._running.get(name) or self._finished.get(name)
        if entry is None:
            self._make_room()
            return Claim("new")
        if entry.fingerprint != fingerprint:
            raise RequestError(
                "duplicate_request", "the idempotency key was used with another request"
            )
        if entry.finished_at is None:
            return Claim("join", entry.run)
        return Claim("forgotten") if entry.run is None else Claim("replay", entry.run)

    def start(self, tenant: str, key: str, fingerprint: bytes, run: T) -> None:
        """Enter a run for a key that `claim` called new."""
        if (tenant, key) in self._running or (tenant, key) in self._finished:
            raise AssertionError("the key is not new")
        self._running[(tenant, key)] = _Entry(fingerprint, run)

    def finish(self, tenant: str, key: str, num_outputs: int, now: float) -> None:
        """Keep a finished run for repeats."""
        entry = self._running.pop((tenant, key))
        entry.finished_at = now
        entry.size = num_outputs
        self._num_outputs += num_outputs
        self._finished[(tenant, key)] = entry
        for oldest in self._finished.values():
            if self._num_outputs <= self._max_outputs:
                break
            self._forget_outputs(oldest)

    def drop(self, tenant: str, key: str) -> None:
        """Take out a running key whose request may be tried again."""
        del self._running[(tenant, key)]

    def check_integrity(self) -> None:
        """Check bounds and sums; tests call it after every step."""
        assert len(self._running) + len(self._finished) <= self._max_keys
        assert self._num_outputs == sum(entry.size for entry in self._finished.values())
        assert self._num_outputs <= self._max_outputs
        assert not self._running.keys() & self._finished.keys()
        assert all(entry.finished_at is None for entry in self._running.values())

    def _expire(self, now: float) -> None:
        while self._finished:
            name, entry = next(iter(self._finished.items()))
            if entry.finished_at is None or entry.finished_at + self._ttl_s > now:
                return
            self._remove(name)

    def _make_room(self) -> None:
        if len(self._running) + len(self._finished) < self._max_keys:
            return
        if not self._finished:
            raise RequestError(
                "overloaded", "too many requests with idempotency keys", retry_after_ms=1000
            )
        self._remove(next(iter(self._finished)))

    def _remove(self, name: tuple[str, str]) -> None:
        self._forget_outputs(self._finished[name])
        del self._finished[name]

    def _forget_outputs(self, entry: _Entry[T]) -> None:
        self._num_outputs -= entry.size
        entry.size = 0
        entry.run = None
