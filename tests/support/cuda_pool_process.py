"""A process that owns a CUDA pool of a known pattern and exports it; for tests on a GPU."""

from __future__ import annotations

import sys

import torch

from services.worker.torch_groups import TorchDevice

NUM_BLOCKS, BLOCK_BYTES = 8, 4096


def pattern(device: torch.device) -> torch.Tensor:
    """Return blocks that all differ."""
    flat = torch.arange(NUM_BLOCKS * BLOCK_BYTES, device=device, dtype=torch.int64)
    return (flat * 2654435761 >> 7).to(torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)


def main() -> None:
    """Print a handle, then hold the memory until the input ends."""
    device = torch.device("cuda", 0)
    owner = TorchDevice(device)
    pool = pattern(device)
    torch.cuda.synchronize(device)
    owner.use_pool(pool)
    print(owner.export_pool().hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
