"""Decode reads prefill's pool in place: real processes, the single worker's tokens, no leak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.bench.local_cluster import LocalCluster as Cluster
from tests.support.generate import generate, request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PLANES = "attach,memfd,zmq"
LENGTHS = (1, 15, 16, 17, 100, 160)
SHORT, LONG = 8, 60  # tokens: never moved, all moved


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 250, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(toy_dir: Path) -> dict[int, list[list[int]]]:
    """What one worker answers."""
    with Cluster(toy_dir, prefill=0, decode=1) as cluster:
        return {
            count: [
                generate(cluster.grpc, request(p, max_tokens=count, ignore_eos=True)).token_ids[0]
                for p in prompts()
            ]
            for count in (SHORT, LONG)
        }


@pytest.fixture(scope="module")
def cluster(toy_dir: Path) -> Iterator[Cluster]:
    with Cluster(
        toy_dir, prefill=1, decode=1, settings={"ISTHMUS_TRANSFER__PLANES": PLANES}
    ) as running:
        yield running


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_tokens_are_the_single_workers(
    cluster: Cluster, expected: dict[int, list[list[int]]], count: int
) -> None:
    answers = [
        generate(cluster.grpc, request(p, max_tokens=count, ignore_eos=True), mode="REMOTE")
        for p in prompts()
    ]
    assert [answer.token_ids[0] for answer in answers] == expected[count]
    statuses = cluster.worker_statuses()
    assert {"attach"} in [set(status.planes.values()) for status in statuses]
    cluster.assert_no_blocks_in_use()
