"""Admin.ClusterStatus: the router's own view, for `isthmus status` and tests."""

from __future__ import annotations

import grpc

from services.pb import admin_pb2, admin_pb2_grpc, common_pb2
from services.router.dispatch import Router
from services.router.view import DRAINING, WorkerView
from services.router.wire import load_message


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Read-only; shows addresses and states, no request and no tenant."""

    def __init__(self, router: Router, lease_ms: int) -> None:
        """`lease_ms`: life of a worker's lease, as this cluster is configured."""
        self._router = router
        self._lease_ms = lease_ms

    async def ClusterStatus(
        self,
        request: admin_pb2.ClusterStatusRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.ClusterStatusRequest, admin_pb2.ClusterStatusResponse
        ],
    ) -> admin_pb2.ClusterStatusResponse:
        """Return the workers as this router sees them now."""
        router = self._router
        is_degraded, reason = router.is_degraded
        return admin_pb2.ClusterStatusResponse(
            router_id=router.config.router_id,
            model=router.served_models()[0].name,
            workers=[_worker_message(worker, self._lease_ms) for worker in router.view().workers],
            requests_open=router.num_open,
            degraded=is_degraded,
            degraded_reason=reason,
        )


def _worker_message(worker: WorkerView, lease_ms: int) -> admin_pb2.WorkerView:
    load = load_message(worker.load)
    load.state = (
        common_pb2.WORKER_STATE_DRAINING
        if worker.state == DRAINING
        else common_pb2.WORKER_STATE_LIVE
    )
    lease_left_ms = worker.lease_left_ms if worker.lease_left_ms is not None else 0
    return admin_pb2.WorkerView(
        worker_id=worker.worker_id,
        address=worker.info.address,
        role=worker.role,
        state=worker.state,
        reason=worker.reason,
        incarnation=worker.incarnation,
        in_flight=worker.booked.in_flight,
        lease_age_ms=max(0, lease_ms - lease_left_ms),
        load=load,
    )
