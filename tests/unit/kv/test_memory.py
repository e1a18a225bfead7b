"""Pool memory: what the owner writes a peer reads, and nothing else is possible."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8)


def test_peer_reads_what_the_owner_writes() -> None:
    with KvPoolMemory.create(LAYOUT, 5) as owner:
        assert owner.fd is not None
        with KvPoolMemory.attach(owner.fd, LAYOUT, 5) as peer:
            owner.blocks[3] = 7
            owner.gens[3] = 42
            owner.digests[3] = np.arange(LAYOUT.digests_per_block)
            owner.nonce[:] = 9
            assert (peer.blocks[3] == 7).all()
            assert not peer.blocks[2].any()
            assert not peer.blocks[4].any()
            assert peer.gens.tolist() == [0, 0, 0, 42, 0]
            assert peer.digests[3].tolist() == list(range(LAYOUT.digests_per_block))
            assert (peer.nonce == 9).all()
            assert peer.blocks.shape == (5, LAYOUT.block_bytes)
            assert peer.digests.shape == (5, LAYOUT.digests_per_block)


def test_peer_can_neither_write_nor_resize() -> None:
    with KvPoolMemory.create(LAYOUT, 5) as owner:
        fd = owner.fd
        assert fd is not None
        peer = KvPoolMemory.attach(fd, LAYOUT, 5)
        with pytest.raises(ValueError, match="read-only"):
            peer.blocks[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(fd, owner.size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, owner.size_bytes * 2)
        owner.blocks[0] = 1  # the owner still can


def test_mapping_outlives_its_owner() -> None:
    owner = KvPoolMemory.create(LAYOUT, 5)
    assert owner.fd is not None
    peer = KvPoolMemory.attach(owner.fd, LAYOUT, 5)
    owner.blocks[1] = 5
    owner.close()
    owner.close()
    assert owner.fd is None
    assert (peer.blocks[1] == 5).all()


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [
        (LAYOUT, 6000),
        (KvLayout(num_layers=3, num_kv_heads=2, head_dim=4096), 5),
        (KvLayout(num_layers=6, num_kv_heads=1, head_dim=8), 5),  # the same bytes, cut otherwise
    ],
)
def test_attach_refuses_another_geometry(layout: KvLayout, num_blocks: int) -> None:
    with KvPoolMemory.create(LAYOUT, 5) as owner:
        assert owner.fd is not None
        with pytest.raises(ValueError, match="peer's pool"):
            KvPoolMemory.attach(owner.fd, layout, num_blocks)


def test_attach_refuses_memory_that_could_shrink() -> None:
    with KvPoolMemory.create(LAYOUT, 5) as owner:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, owner.size_bytes)
            with pytest.raises(ValueError, match="not sealed"):
                KvPoolMemory.attach(fd, LAYOUT, 5)
        finally:
            os.close(fd)


def test_anonymous_memory_has_the_same_views() -> None:
    with KvPoolMemory.create(LAYOUT, 5, kind="anonymous") as owner:
        assert owner.fd is None
        owner.blocks[4] = 3
        assert owner.blocks.shape == (5, LAYOUT.block_bytes)
        assert (owner.gens == 0).all()
    with pytest.raises(ValueError, match="anonymous"):
        KvPoolMemory.create(LAYOUT, 5, kind="disk")


def test_blocks_start_on_a_huge_page_boundary_and_views_do_not_overlap() -> None:
    with KvPoolMemory.create(LAYOUT, 700) as owner:
        base = owner.nonce.ctypes.data - 64
        assert (owner.blocks.ctypes.data - base) % (2 << 20) == 0
        owner.nonce[:] = 1
        owner.gens[:] = 2
        owner.digests[:] = 3
        owner.blocks[:] = 4
        assert (owner.nonce == 1).all()
        assert (owner.gens == 2).all()
        assert (owner.digests == 3).all()


def test_no_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with KvPoolMemory.create(LAYOUT, 5) as owner:
            assert owner.fd is not None
            KvPoolMemory.attach(owner.fd, LAYOUT, 5).close()
    assert len(os.listdir("/proc/self/fd")) == before
