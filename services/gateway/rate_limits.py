"""Tenants' limits at the front doors: from a file, decided here, shared with the other routers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.bounded_file import read_bounded
from services.common.clock import Clock
from services.common.config_source import parse_yaml
from services.common.errors import ConfigError, RequestError, StoreUnavailable
from services.gateway.namespaces import Namespaces
from services.gateway.wire_names import (
    LIMIT_REQUESTS,
    LIMIT_TOKENS,
    REMAINING_REQUESTS,
    REMAINING_TOKENS,
    RESET_REQUESTS,
    RESET_TOKENS,
    WireName,
)
from services.resilience.tenant_limiter import (
    Claim,
    RateState,
    Shared,
    TenantLimiter,
    TenantLimits,
    Verdict,
)
from services.runtime.watched_file import WatchedFile
from services.telemetry.logs import get_logger

log = get_logger(__name__)

SHARE_EVERY_S = 0.2
_MAX_CLAIMS = 256  # tenants told of at a time
_MAX_FILE_BYTES = 4 << 20
_WARN_EVERY_S = 60.0
_WORDS = {
    "requests": "the tenant sends more requests a second than its limit allows",
    "tokens": "the tenant's tokens of this minute are used up",
    "streams": "the tenant has as many requests open as its limit allows",
}


class LimitsEntry(BaseModel):
    """Limits as the file has them; what is not given is as in `default`, 0 = none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requests_per_s: float = Field(default=0.0, ge=0, le=1e6)
    request_burst: float = Field(default=0.0, ge=0, le=1e6)
    tokens_per_min: float = Field(default=0.0, ge=0, le=1e12)
    max_streams: int = Field(default=0, ge=0, le=1_000_000)

    def limits(self) -> TenantLimits:
        """The same as the limiter takes them."""
        return TenantLimits(
            self.requests_per_s, self.request_burst, self.tokens_per_min, self.max_streams
        )


class TenantsFile(BaseModel):
    """Content of auth.tenants_file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: LimitsEntry = LimitsEntry()
    tenants: dict[str, LimitsEntry] = Field(default={}, max_length=10_000)

    def table(self) -> LimitsTable:
        """Lay every entry over the default."""
        base = self.default.model_dump()
        return LimitsTable(
            self.default.limits(),
            {
                tenant: LimitsEntry(**{**base, **entry.model_dump(exclude_unset=True)}).limits()
                for tenant, entry in self.tenants.items()
            },
        )


class LimitsTable:
    """Limits by tenant."""

    def __init__(self, default: TenantLimits, tenants: dict[str, TenantLimits]) -> None:
        self._default = default
        self._tenants = tenants

    def of(self, tenant: str) -> TenantLimits | None:
        """Give a tenant's; None = it has none at all."""
        limits = self._tenants.get(tenant, self._default)
        return None if limits == TenantLimits() else limits


def read_tenants(path: Path) -> LimitsTable:
    """Read the file; ConfigError says what is wrong with it."""
    data = read_bounded("auth.tenants_file", path, _MAX_FILE_BYTES)
    try:
        return TenantsFile.model_validate(
            parse_yaml(data.decode("utf-8"), "auth.tenants_file")
        ).table()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        known = TenantsFile.model_fields if len(first["loc"]) == 1 else LimitsEntry.model_fields
        unknown = f"unknown key; there are {', '.join(known)}"
        message = unknown if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"auth.tenants_file: {where}: {message}") from None
    except UnicodeDecodeError:
        raise ConfigError("auth.tenants_file: it is not UTF-8") from None


class RateLimited(RequestError):
    """A tenant is over one of its limits."""

    def __init__(self, verdict: Verdict) -> None:
        wait_ms = max(1, round(verdict.retry_after_s * 1000))
        super().__init__("rate_limited", _WORDS[verdict.reason], retry_after_ms=wait_ms)
        self.verdict = verdict


class LimitShare(Protocol):
    """The store, as the limits see it."""

    def share(self, claims: Sequence[tuple[str, Claim]]) -> Awaitable[tuple[Shared, ...]]:
        """Spend what is claimed and say what all have left; raises StoreUnavailable."""
        ...


class RateLimits:
    """Limits of one router process. Belongs to the event loop."""

    def __init__(
        self,
        tenants_file: Path | None,
        namespaces: Namespaces,
        clock: Clock,
        refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Read the file, None = nobody has limits; `refused` is told why. Raises ConfigError."""
        self._clock = clock
        self._namespaces = namespaces
        self._refused = refused
        self._table: WatchedFile[LimitsTable] | None = None
        if tenants_file is not None:
            self._table = WatchedFile(
                "auth.tenants_file", (tenants_file,), lambda: read_tenants(tenants_file), clock
            )
        self._limiter = TenantLimiter(self._limits_of)
        self._warned_at = float("-inf")

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[Verdict]:
        """Let a request in for as long as the context lasts; raise RateLimited."""
        verdict = self._limiter.admit(tenant, self._clock.now())
        if verdict.reason != "ok":
            self._refused(verdict.reason)
            raise RateLimited(verdict)
        try:
            yield verdict
        finally:
            self._limiter.release(tenant)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Spend tokens of a request that was let in; less than nothing gives back."""
        self._limiter.charge(tenant, num_tokens, self._clock.now())

    async def share_forever(self, store: LimitShare) -> None:
        """Keep in step with the other routers, for as long as the store answers."""
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            try:
                await self.share_once(store)
            except Exception:  # outermost loop: a fault here must not end the sharing for ever
                log.exception("gateway.limits_fault")

    async def share_once(self, store: LimitShare) -> None:
        """Tell the store what was spent here; without an answer the next call says so again."""
        claims = self._limiter.claims(_MAX_CLAIMS, self._clock.now())
        if not claims:
            return
        named = [(self._namespaces.budget(claim.tenant), claim) for claim in claims]
        try:
            answers = await store.share(named)
        except StoreUnavailable as error:
            now = self._clock.now()
            if now - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = now
                log.warning("gateway.limits_not_shared", reason=str(error))
            return
        self._limiter.settle(claims, answers, self._clock.now())

    def _limits_of(self, tenant: str) -> TenantLimits | None:
        return None if self._table is None else self._table.get().of(tenant)


def rate_headers(verdict: Verdict) -> dict[str, str]:
    """Write a verdict's budgets as its tenant may see them."""
    requests = (LIMIT_REQUESTS, REMAINING_REQUESTS, RESET_REQUESTS)
    tokens = (LIMIT_TOKENS, REMAINING_TOKENS, RESET_TOKENS)
    return {**_headers(requests, verdict.requests), **_headers(tokens, verdict.tokens)}


def _headers(names: Sequence[WireName], state: RateState | None) -> dict[str, str]:
    if state is None:
        return {}
    values = (f"{state.limit:g}", f"{int(state.remaining)}", f"{state.reset_s:.2f}s")
    return {name.name: value for name, value in zip(names, values, strict=True)}
