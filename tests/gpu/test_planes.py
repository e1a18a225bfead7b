"""The planes cuda_ipc and nccl on real GPUs; the rest of the suite runs their code without one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.bench.local_cluster import LocalCluster as Cluster
from services.transfer.api import SinkReady
from services.transfer.device import Group, GroupError, GroupSpec
from services.transfer.pair_store import PairStore
from services.worker.torch_groups import TorchDevice
from tests.support.cuda_pool_process import BLOCK_BYTES, NUM_BLOCKS, pattern
from tests.support.generate import generate, request
from tests.support.transfer_ends import CALM, make_decode, make_prefill, same_content, with_planes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL does not put two ranks on one GPU"
)


# ---- cuda_ipc -----------------------------------------------------------------------------------


def test_a_pool_of_another_process_is_opened_and_copied() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.cuda_pool_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert owner.stdout is not None
    try:
        handle = bytes.fromhex(owner.stdout.readline())
        blocks = TorchDevice(torch.device("cuda", 0)).open_pool(handle, NUM_BLOCKS, BLOCK_BYTES)
        out = np.zeros((5, BLOCK_BYTES), np.uint8)
        blocks.copy_out([(6, out[:2]), (1, out[2:])])
        expected = pattern(torch.device("cpu")).numpy()
        assert np.array_equal(out, expected[[6, 7, 1, 2, 3]])
    finally:
        owner.communicate(timeout=30)


@pytest.mark.parametrize("plane", ["cuda_ipc", "zmq"])
def test_two_workers_on_a_gpu_give_the_tokens_of_one(toy_dir: Path, plane: str) -> None:
    rng = np.random.default_rng(23)
    prompts = [rng.integers(3, 250, n).tolist() for n in (5, 16, 100, 333)]
    body = [request(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    flags = ("--device", "cuda")
    with Cluster(toy_dir, prefill=0, decode=1, flags=flags) as single:
        expected = [generate(single.grpc, each).token_ids[0] for each in body]
    settings = {"ISTHMUS_TRANSFER__PLANES": plane}
    with Cluster(toy_dir, prefill=1, decode=1, flags=flags, settings=settings) as cluster:
        answers = [generate(cluster.grpc, each, mode="REMOTE").token_ids[0] for each in body]
        assert answers == expected
        planes = {p for status in cluster.worker_statuses() for p in status.planes.values()}
        assert planes == {plane}
        cluster.assert_no_blocks_in_use()


# ---- nccl ---------------------------------------------------------------------------------------


def build_pair(slot_bytes: int = 1 << 20) -> tuple[Group, Group]:
    """Build both ends of a group, on two devices of this process."""
    stores: list[PairStore] = []
    stores.append(PairStore(lambda key, value: stores[1].on_entry(key, value)))
    stores.append(PairStore(lambda key, value: stores[0].on_entry(key, value)))
    made: dict[int, Group] = {}

    def build(rank: int) -> None:
        spec = GroupSpec("kv/1/2/3", rank, "127.0.0.1", slot_bytes, 2, 20.0)
        made[rank] = TorchDevice(torch.device("cuda", rank)).make_group(spec, stores[rank])

    threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made[0], made[1]


@pytest.fixture
def pair() -> Iterator[tuple[Group, Group]]:
    groups = build_pair()
    yield groups
    for group in groups:
        group.abort()


@two_gpus
def test_batches_cross_in_order(pair: tuple[Group, Group]) -> None:
    left, right = pair
    for i in range(8):
        slot = i % 2
        left.host(slot)[:] = i + 1
        received = right.recv(slot, 1 << 20)
        left.send(slot, 1 << 20).wait()
        received.wait()
        assert (right.host(slot) == i + 1).all()


@two_gpus
def test_a_receive_that_never_comes_is_aborted(pair: tuple[Group, Group]) -> None:
    _, right = pair
    errors: list[Exception] = []

    def wait() -> None:
        try:
            right.recv(0, 1 << 20).wait()
        except GroupError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    threading.Timer(0.5, right.abort).start()
    waiter.join(20)
    assert not waiter.is_alive()
    assert len(errors) == 1


@two_gpus
def test_a_handoff_between_two_devices(tmp_path: Path) -> None:
    config = with_planes(CALM, "nccl")
    prefill = make_prefill(tmp_path, config, device=TorchDevice(torch.device("cuda", 0)))
    decode = make_decode(config, device=TorchDevice(torch.device("cuda", 1)))
    try:
        for i in range(4):
            ticket, offer = prefill.offer_all(f"k{i}", 200)
            blocks = decode.receive(f"k{i}", ticket, offer)
            ready = decode.events.wait(f"k{i}", 60.0)
            assert isinstance(ready, SinkReady), ready
            assert ready.stats.plane == "nccl"
            assert same_content(prefill, f"k{i}", decode, blocks, 200 % 16)
            decode.free.extend(block for block in blocks if block is not None)
            prefill.free.extend(prefill.lent.pop(f"k{i}"))
    finally:
        decode.stop()
        prefill.stop()
