"""RB-120: the policy table has every RPC there is, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from services import pb
from services.common.access import (
    GRPC_POLICY,
    HTTP_POLICY,
    SCOPES,
    Access,
    check_policy,
    check_scopes,
    is_open,
)
from services.common.errors import ConfigError, RequestError


def described_methods() -> set[str]:
    """Every RPC of every generated descriptor."""
    found = set()
    for module in pkgutil.iter_modules(pb.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"services.pb.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def test_every_rpc_of_our_protos_has_a_policy_and_every_policy_an_rpc() -> None:
    ours = {name for name in GRPC_POLICY if name.startswith("/isthmus.")}
    assert len(ours) > 8
    assert described_methods() == ours


def test_only_health_and_ready_are_open() -> None:
    table = {**HTTP_POLICY, **GRPC_POLICY}
    assert {name for name, access in table.items() if access is Access.OPEN} == {
        "/health", "/ready", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["/HEALTH", "/health/", "//health", "health", "/made/up", ""])
def test_what_is_not_listed_is_not_open(name: str) -> None:
    assert not is_open(HTTP_POLICY, name)
    with pytest.raises(ConfigError):
        check_policy(HTTP_POLICY, [name])


@pytest.mark.parametrize("access", Access)
def test_scopes_allow_what_they_name(access: Access) -> None:
    for scope in SCOPES:
        may = access in (Access.OPEN, Access.KEY) or access.value == scope
        if may:
            check_scopes(access, frozenset({scope}))
        else:
            with pytest.raises(RequestError) as caught:
                check_scopes(access, frozenset({scope}))
            assert caught.value.spec.code == "permission_denied"


def test_no_key_opens_what_belongs_to_routers() -> None:
    for access in (Access.PEER, Access.ROUTER):
        with pytest.raises(RequestError, match="no key may do this"):
            check_scopes(access, frozenset(SCOPES))
