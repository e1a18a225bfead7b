"""Two transfer ends over a pool each, made from the module's own `config` fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.transfer.config import TransferConfig
from tests.support.transfer_ends import DecodeEnd, PrefillEnd, make_decode, make_prefill


@pytest.fixture
def prefill(config: TransferConfig, tmp_path: Path) -> Iterator[PrefillEnd]:
    """A prefill end; its thread has ended afterwards."""
    end = make_prefill(tmp_path, config)
    yield end
    end.stop()
    assert not end.source.is_alive()


@pytest.fixture
def decode(config: TransferConfig) -> Iterator[DecodeEnd]:
    """A decode end that copies; its thread has ended afterwards."""
    end = make_decode(config)
    yield end
    end.stop()
    assert not end.sink.is_alive()
