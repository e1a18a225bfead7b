"""Handles of CUDA pools, as far as they are bytes; tests/gpu opens real ones."""

from __future__ import annotations

import pytest
import torch

from services.transfer.device import DeviceError
from services.worker import torch_ipc
from services.worker.torch_groups import TorchDevice

NAMES = (b"h" * 66, b"/counter-1", b"e" * 64)
HANDLE = torch_ipc._HEAD.pack(b"isthcu01", 4096, 512, 8, True, *map(len, NAMES)) + b"".join(NAMES)


def test_a_handle_is_what_torch_wants_to_open_it_with() -> None:
    assert torch_ipc._parse(HANDLE, 3) == (3, NAMES[0], 4096, 512, NAMES[1], 8, NAMES[2], True)
    assert len(HANDLE) < 400  # it rides in the packet that brings the control page


@pytest.mark.parametrize("spoiled", [b"", HANDLE[:-1], HANDLE + b"x", b"other001" + HANDLE[8:]])
def test_anything_else_is_refused(spoiled: bytes) -> None:
    with pytest.raises(DeviceError):
        torch_ipc._parse(spoiled, 0)


def test_a_cpu_has_nothing_to_share() -> None:
    device = TorchDevice(torch.device("cpu"))
    with pytest.raises(DeviceError, match="no pool"):
        device.export_pool()
    device.use_pool(torch.zeros(4))
    with pytest.raises(DeviceError, match="CUDA"):
        device.export_pool()
    with pytest.raises(DeviceError, match="no CUDA"):
        device.open_pool(HANDLE, 1, 1)
