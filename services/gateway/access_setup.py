"""From the configuration to who may call: the files it names, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.access import SCOPES
from services.common.clock import Clock
from services.common.config import AuthSettings, IsthmusConfig, is_loopback
from services.gateway.accounting import Accounting
from services.gateway.auth import AuthConfig
from services.gateway.jwt_auth import JwtSettings, read_jwks
from services.gateway.keys import check_keys_file
from services.gateway.namespaces import Namespaces, random_secret, read_secret, secret_path
from services.gateway.rate_limits import LimitShare, RateLimits, read_tenants
from services.gateway.usage import UsageBook
from services.telemetry import catalog
from services.telemetry.audit import AuditConfig, AuditLog
from services.telemetry.metrics import Metrics


def auth_config(config: IsthmusConfig) -> AuthConfig:
    """Say where credentials come from."""
    auth, router = config.auth, config.router
    is_exposed = not (is_loopback(router.grpc_host) and is_loopback(router.http_host))
    # Who may ask without a key on a network may not also change how the cluster runs.
    anonymous = [scope for scope in SCOPES if scope != "admin" or not is_exposed]
    return AuthConfig(
        keys_file=Path(auth.keys_file) if auth.keys_file else None,
        jwt=_jwt(auth),
        anonymous=frozenset(anonymous),
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What accounts need of the process they are kept in."""

    router_id: str
    store: LimitShare | None
    metrics: Metrics
    clock: Clock


def accounting(config: IsthmusConfig, names: Namespaces, around: Surroundings) -> Accounting:
    """Open what the configuration says is to be kept; raises ConfigError."""
    settings, auth, metrics = config.accounting, config.auth, around.metrics
    rates = RateLimits(
        Path(auth.tenants_file) if auth.tenants_file else None,
        names,
        around.clock,
        lambda reason: metrics.add(catalog.RATE_LIMITED, limit=reason),
    )
    audit = None
    if settings.audit_dir:
        audit = AuditLog(
            AuditConfig(Path(settings.audit_dir), around.router_id, settings.audit_max_file_bytes),
            around.clock,
        )
        metrics.watch(catalog.AUDIT_DROPPED, lambda: audit.num_dropped)
        metrics.watch(catalog.AUDIT_BLOCKED, lambda: int(audit.is_blocked))
    return Accounting(
        rates,
        UsageBook(Path(settings.usage_dir) if settings.usage_dir else None, around.router_id),
        audit,
        must_audit=settings.audit_on_full == "refuse",
        store=around.store if auth.tenants_file else None,
    )


def namespaces(auth: AuthSettings) -> Namespaces:
    """Read the secret that keeps tenants' caches apart; raises ConfigError."""
    shared = frozenset(auth.shared_prefix_tenants)
    if not (auth.keys_file or auth.jwks_file):
        return Namespaces(random_secret(), shared)  # there is only the nameless tenant
    return Namespaces(read_secret(_secret_path(auth)), shared)


def check_access_files(auth: AuthSettings) -> None:
    """Look at the files the section names; raises ConfigError for what no router can run with."""
    if auth.keys_file:
        check_keys_file(Path(auth.keys_file))
    if auth.tenants_file:
        read_tenants(Path(auth.tenants_file))
    if auth.jwks_file:
        read_jwks(Path(auth.jwks_file))
    if auth.keys_file or auth.jwks_file:
        read_secret(_secret_path(auth))


def _secret_path(auth: AuthSettings) -> Path:
    return secret_path(auth.tenant_secret_file, auth.keys_file or auth.jwks_file)


def _jwt(auth: AuthSettings) -> JwtSettings | None:
    if not auth.jwks_file:
        return None
    return JwtSettings(
        jwks_file=Path(auth.jwks_file),
        issuer=auth.jwt_issuer,
        audience=auth.jwt_audience,
        algorithms=auth.jwt_algorithms,
        tenant_claim=auth.jwt_tenant_claim,
    )
