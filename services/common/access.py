"""Who may call what: one table over every HTTP route and RPC of every server, default deny."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from services.common.errors import ConfigError, RequestError


class Access(Enum):
    """What a route or an RPC asks of its caller."""

    OPEN = "open"  # answers anyone: says only whether the process lives and is ready
    KEY = "key"  # any known key or token
    INFERENCE = "inference"  # one with this scope: prompts and answers
    MONITOR = "monitor"  # figures and states of the whole cluster
    ADMIN = "admin"  # changes how the cluster runs
    PEER = "peer"  # worker: a certificate the cluster's authority has signed
    ROUTER = "router"  # worker: one in the name of a router


Scope = Literal["inference", "monitor", "admin"]
SCOPES: tuple[Scope, ...] = ("inference", "monitor", "admin")

HTTP_POLICY: Mapping[str, Access] = {
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    "/metrics": Access.MONITOR,
    "/v1/models": Access.KEY,
    "/v1/models/{model_id:path}": Access.KEY,
    "/v1/chat/completions": Access.INFERENCE,
    "/v1/completions": Access.INFERENCE,
    "/tokenize": Access.INFERENCE,
    "/detokenize": Access.INFERENCE,
}

GRPC_POLICY: Mapping[str, Access] = {
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Access.KEY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.KEY,
    "/isthmus.v1.Inference/Generate": Access.INFERENCE,
    "/isthmus.v1.Inference/ListModels": Access.KEY,
    "/isthmus.v1.Inference/Tokenize": Access.INFERENCE,
    "/isthmus.v1.Inference/Detokenize": Access.INFERENCE,
    "/isthmus.v1.Admin/ClusterStatus": Access.MONITOR,
    "/isthmus.v1.Admin/ListRequests": Access.ADMIN,
    "/isthmus.v1.Admin/ExplainRequest": Access.ADMIN,
    "/isthmus.v1.Admin/KillRequest": Access.ADMIN,
    "/isthmus.v1.Admin/DrainWorker": Access.ADMIN,
    "/isthmus.v1.Admin/UndrainWorker": Access.ADMIN,
    "/isthmus.v1.Admin/SetWorkerRole": Access.ADMIN,
    "/isthmus.v1.Admin/FlushCache": Access.ADMIN,
    "/isthmus.v1.Admin/SetLogLevel": Access.ADMIN,
    "/isthmus.v1.Admin/Diagnostics": Access.ADMIN,
    "/isthmus.v1.Admin/GetTraffic": Access.ADMIN,
    "/isthmus.v1.Admin/SetTraffic": Access.ADMIN,
    "/isthmus.v1.Worker/Link": Access.ROUTER,
    "/isthmus.v1.Worker/Status": Access.PEER,
    "/isthmus.v1.Worker/Drain": Access.ROUTER,
    "/isthmus.v1.Worker/SetRole": Access.ROUTER,
    "/isthmus.v1.Worker/Migrate": Access.ROUTER,
    "/isthmus.v1.Worker/Reload": Access.ROUTER,
    "/isthmus.v1.Worker/Undrain": Access.ROUTER,
    "/isthmus.v1.Worker/DropCache": Access.ROUTER,
    "/isthmus.v1.Worker/LogLevel": Access.ROUTER,
    "/isthmus.v1.Worker/Diagnose": Access.ROUTER,
}


def is_open(policy: Mapping[str, Access], exact_name: str) -> bool:
    """Whether a route may be called without a key: only those listed so, spelled exactly so."""
    return policy.get(exact_name) is Access.OPEN


def check_policy(policy: Mapping[str, Access], names: Iterable[str]) -> None:
    """Refuse to start with a route nobody decided about."""
    missing = sorted(set(names) - policy.keys())
    if missing:
        raise ConfigError(f"no access policy for {', '.join(missing)}")


def check_scopes(access: Access, scopes: frozenset[Scope]) -> None:
    """Raise `permission_denied` unless a caller with these scopes may do what asks for `access`."""
    if access in (Access.OPEN, Access.KEY) or access.value in scopes:
        return
    if access.value in SCOPES:
        raise RequestError("permission_denied", f"the key lacks the scope {access.value}")
    raise RequestError("permission_denied", "no key may do this")
