"""Makers of registry values."""

from __future__ import annotations

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.registry.base import WorkerInfo


def make_worker_info(
    worker_id: str = "w0",
    *,
    incarnation: int = 1,
    role: str = "decode",
    address: str = "127.0.0.1:1",
    **identity: str,
) -> WorkerInfo:
    """Build a worker's facts; keyword arguments change identity fields."""
    fields = {"model": "toy", "weights_digest": "d" * 64, **identity}
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        address=address,
        role=role,
        model=fields["model"],
        kv_identity_fp="fp-" + "-".join(f"{k}={v}" for k, v in sorted(fields.items())),
        identity_fields=fields,
        weights_digest=fields["weights_digest"],
        block_size=16,
        max_model_len=2048,
        started_unix_ms=1,
    )


def make_chain(name: int, length: int) -> list[BlockHash]:
    """Build block hashes that differ per chain and depth."""
    return [BlockHash(bytes([name, depth % 256]) * 8) for depth in range(length)]
