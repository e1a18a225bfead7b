"""The planes by how KV crosses: some are read out of the peer's memory, some are sent to us."""

from __future__ import annotations

PLANES_BEST_FIRST = ("attach", "memfd", "cuda_ipc", "nccl", "zmq")
# Allowed unless said otherwise; a plane that has never run on a GPU has to be asked for.
DEFAULT_PLANES = ("memfd", "zmq")
# Decode reads the peer's memory under the blocks' generations: it copies, or, on attach, does not.
MAPPED_PLANES = frozenset({"attach", "memfd", "cuda_ipc"})
POOL_FD_PLANES = frozenset({"attach", "memfd"})  # the pool's descriptor is handed over
HANDED_PLANES = POOL_FD_PLANES | {"cuda_ipc"}  # over the pool's socket, which then is a doorbell
# Blocks are used where they are, or copied by a device: they have to be whole in the pool.
WHOLE_BLOCK_PLANES = frozenset({"attach", "cuda_ipc"})
SENT_PLANES = frozenset({"nccl", "zmq"})  # prefill sends frames as far as credit allows
FAULT_PLANE = "fault"  # of tests: wraps whichever of the others is agreed; never negotiated


def is_for_device(plane: str, device: str) -> bool:
    """Say whether KV can come to or from a pool on that device ("cpu" or "cuda") on a plane."""
    return plane != "cuda_ipc" or device == "cuda"
