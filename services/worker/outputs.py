"""What a worker's events become on a Link: the repeated parts of a WorkerFrame. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.ids import WorkerId
from services.common.token_rows import TOKEN_ROW
from services.engine.api import Refused, RequestKey, TokensOut
from services.pb import common_pb2, worker_pb2
from services.worker import convert
from services.worker.session import DoneOut, Outgoing, TicketOut

_PLANES = {
    "attach": common_pb2.PLANE_ATTACH,
    "memfd": common_pb2.PLANE_MEMFD,
    "cuda_ipc": common_pb2.PLANE_CUDA_IPC,
    "nccl": common_pb2.PLANE_NCCL,
    "zmq": common_pb2.PLANE_ZMQ,
}


def add_outputs(
    frame: worker_pb2.WorkerFrame,
    items: Sequence[Outgoing],
    worker_id: WorkerId,
    *,
    with_rows: bool = False,
) -> None:
    """Add outputs to a frame; `worker_id` is the sender's own name.

    `with_rows`: the router reads rows, so tokens that fit one need no message.
    """
    rows: list[bytes] = []
    for item in items:
        request, attempt = _request_of(item.key)
        if isinstance(item, TokensOut):
            if with_rows and _fits_row(item):
                (token_id,) = item.token_ids
                rows.append(TOKEN_ROW.pack(request, attempt, item.first_index, token_id))
            else:
                frame.tokens.append(convert.wire_tokens(item, request, attempt))
        elif isinstance(item, TicketOut):
            frame.tickets.append(convert.wire_ticket(item.ticket, item.generated, request, attempt))
        elif isinstance(item, Refused):
            frame.refusals.append(convert.wire_refusal(item, request, attempt))
        else:
            timing = _timing(item, worker_id)
            frame.done.append(convert.wire_done(item.done, request, attempt, timing))
    if rows:
        frame.rows = b"".join(rows)


def _fits_row(item: TokensOut) -> bool:
    return len(item.token_ids) == 1 and item.choice == 0 and not item.logprobs


def _timing(item: DoneOut, worker_id: WorkerId) -> common_pb2.Timing:
    timing = common_pb2.Timing()
    if not item.is_receiver:
        timing.prefill_worker = worker_id
        return timing
    timing.decode_worker = worker_id
    timing.recomputed = item.was_recomputed
    if item.stats is not None:
        timing.plane = _PLANES.get(item.stats.plane, common_pb2.PLANE_UNSPECIFIED)
        timing.handoff_bytes = item.stats.size_bytes
        timing.handoff_blocks = item.stats.blocks_moved
        timing.handoff_blocks_deduped = item.stats.blocks_deduped
        timing.handoff_blocks_attached = item.stats.blocks_attached
    return timing


def _request_of(key: RequestKey) -> tuple[int, int]:
    """Router's request number and attempt, from a key that WorkerShell made."""
    _, request, attempt = key.split("/")
    return int(request), int(attempt)
