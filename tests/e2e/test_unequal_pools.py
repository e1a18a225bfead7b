"""Real workers whose pools differ, or whose link rounds: the tokens of one that rounds the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.bench.greedy import Sequences
from services.bench.local_cluster import LocalCluster as Cluster
from services.kv.convert import convert_part, whole
from services.models.load import load_model
from tests.support.generate import generate, request

pytestmark = pytest.mark.e2e

NUM_TOKENS = 100  # six blocks and a tail
ANSWER = 24


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, 250, NUM_TOKENS).tolist() for _ in range(4)]


def single_worker(toy_dir: Path, dtype: str, wire: tuple[str, ...]) -> list[list[int]]:
    """Prefill in float32, round, and decode in `dtype`, each prompt alone and in one process."""
    first_model, model = load_model(toy_dir), load_model(toy_dir, dtype=dtype)
    answers = []
    for prompt in prompts():
        prefill = Sequences(first_model, 1, NUM_TOKENS + ANSWER)
        decode = Sequences(model, 1, NUM_TOKENS + ANSWER)
        tokens = [int(prefill.feed(np.array([prompt]))[0].argmax())]
        prefill.round(wire)
        blocks = prefill.state()
        into = np.zeros((len(blocks), decode.layout.block_bytes), np.uint8)
        for block, target in zip(blocks, into, strict=True):
            left, right = prefill.layout, decode.layout
            convert_part(left, block, whole(left), right, target, whole(right))
        decode.restore(into, NUM_TOKENS)
        while len(tokens) < ANSWER:
            tokens.append(int(decode.feed(np.array([[tokens[-1]]]))[0].argmax()))
        answers.append(tokens)
    return answers


def two_pools(
    toy_dir: Path,
    flags: tuple[str, ...],
    settings: dict[str, str],
    plane: str,
    modes: tuple[str, ...] = ("REMOTE",),
) -> list[list[list[int]]]:
    """Return the answers of one round after the other."""
    rounds = []
    with Cluster(toy_dir, prefill=1, decode=1, flags=flags, settings=settings) as cluster:
        body = [request(prompt, max_tokens=ANSWER, ignore_eos=True) for prompt in prompts()]
        for mode in modes:
            answers = [generate(cluster.grpc, each, mode=mode) for each in body]
            assert {answer.mode for answer in answers} == {mode}
            rounds.append([answer.token_ids[0] for answer in answers])
        planes = [set(status.planes.values()) for status in cluster.worker_statuses()]
        assert {plane} in planes
        cluster.assert_no_blocks_in_use()
    return rounds


def test_float32_prefill_and_bfloat16_decode(toy_dir: Path) -> None:
    """RB-027: pools of unequal dtype give right tokens instead of corruption."""
    torch.set_num_threads(1)
    (found,) = two_pools(toy_dir, ("--decode-dtype", "bfloat16"), {}, "memfd")
    assert found == single_worker(toy_dir, "bfloat16", ())
    assert found != single_worker(toy_dir, "float32", ())  # it is not the same by chance


def test_an_int8_link_between_float32_pools(toy_dir: Path) -> None:
    settings = {
        "ISTHMUS_TRANSFER__PLANES": "zmq",
        "ISTHMUS_TRANSFER__WIRE_DTYPE": "int8",
    }
    (found,) = two_pools(toy_dir, (), settings, "zmq")
    assert found == single_worker(toy_dir, "float32", ("int8",))


def test_prefix_hits_never_mix_rounded_with_exact_kv(toy_dir: Path) -> None:
    """RB-027: what came rounded serves the same link again, and never a LOCAL request."""
    settings = {"ISTHMUS_TRANSFER__PLANES": "zmq", "ISTHMUS_TRANSFER__WIRE_DTYPE": "int8"}
    modes = ("REMOTE", "LOCAL", "REMOTE", "LOCAL")
    found = two_pools(toy_dir, (), settings, "zmq", modes)
    rounded = single_worker(toy_dir, "float32", ("int8",))
    exact = single_worker(toy_dir, "float32", ())
    assert rounded != exact, "else this proves nothing"
    assert found == [rounded, exact, rounded, exact]
