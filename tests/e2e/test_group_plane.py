"""Real workers that hand KV over in two-rank groups (plane nccl, here on gloo): the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.bench.local_cluster import LocalCluster as Cluster
from services.text.tokenizer import TextModel
from tests.support.generate import generate, request
from tests.support.prompts import MAX_TOKENS, fixed_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
PLANES = {"ISTHMUS_TRANSFER__PLANES": "nccl"}  # and no other: nothing can be served without it


def planes_of(cluster: Cluster) -> set[str]:
    """Return every plane some worker uses to some peer."""
    return {plane for status in cluster.worker_statuses() for plane in status.planes.values()}


def test_two_pools_on_groups_give_the_tokens_of_one_worker(toy_dir: Path) -> None:
    rng = np.random.default_rng(23)
    prompts = [rng.integers(3, 250, n).tolist() for n in (5, 16, 100, 333)]
    body = [request(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    with Cluster(toy_dir, prefill=0, decode=1) as single:
        expected = [generate(single.grpc, each).token_ids[0] for each in body]
    with Cluster(toy_dir, prefill=1, decode=2, settings=PLANES) as cluster:
        for _ in range(3):  # so that both decode workers have a turn
            answers = [generate(cluster.grpc, each, mode="REMOTE") for each in body]
            assert [answer.token_ids[0] for answer in answers] == expected
            assert {answer.mode for answer in answers} == {"REMOTE"}
        assert planes_of(cluster) == {"nccl"}
        cluster.assert_no_blocks_in_use()


@pytest.mark.slow
def test_a_real_model_on_groups_gives_the_golden_ids(smollm2_dir: Path) -> None:
    text = TextModel.load(smollm2_dir)
    prompts = fixed_prompts(lambda s: text.encode(s, add_special=False).tolist())
    golden = json.loads(GOLDEN.read_text())["answers"]
    with Cluster(smollm2_dir, prefill=1, decode=1, settings=PLANES) as cluster:
        for prompt in prompts:
            body = request(prompt.token_ids, max_tokens=MAX_TOKENS)
            answer = generate(cluster.grpc, body, mode="REMOTE")
            assert answer.token_ids[0] == golden[prompt.name], prompt.name
        assert planes_of(cluster) == {"nccl"}
        cluster.assert_no_blocks_in_use()
