from __future__ import annotations

import pytest

from services.common.access import GRPC_POLICY, Access
from services.worker.peer_auth import may_call

ROUTERS = frozenset({"isthmus-router", "router.example"})
WORKER = "/isthmus.v1.Worker/"


@pytest.mark.parametrize("method", [name for name in GRPC_POLICY if name.startswith(WORKER)])
def test_only_routers_change_what_a_worker_does(method: str) -> None:
    is_status = GRPC_POLICY[method] is Access.PEER
    assert may_call(method, frozenset({"router.example", "x"}), ROUTERS)
    assert may_call(method, frozenset({"isthmus-worker"}), ROUTERS) is is_status
    assert not may_call(method, frozenset(), ROUTERS)


@pytest.mark.parametrize(
    "method", ["/isthmus.v1.Worker/link", "/made/up", "", "/isthmus.v1.Inference/Generate"]
)
def test_what_is_no_method_of_a_worker_is_denied(method: str) -> None:
    assert not may_call(method, ROUTERS, ROUTERS)


def test_only_the_status_is_for_every_peer() -> None:
    peers = [name for name, access in GRPC_POLICY.items() if access is Access.PEER]
    assert peers == [WORKER + "Status"]
