"""The planes by how KV crosses: some are read out of the peer's memory, some are sent to us."""

from __future__ import annotations

PLANES_BEST_FIRST = ("memfd", "cuda_ipc", "nccl", "zmq")
# Allowed unless said otherwise; a plane that has never run on a GPU has to be asked for.
DEFAULT_PLANES = ("memfd", "zmq")
MAPPED_PLANES = frozenset({"memfd", "cuda_ipc"})  # decode copies under the blocks' generations
SENT_PLANES = frozenset({"nccl", "zmq"})  # prefill sends frames as far as credit allows
