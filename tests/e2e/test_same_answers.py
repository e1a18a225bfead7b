"""Two pools give the tokens of one worker: every prompt shape, every mode, hit or miss (RB-026)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.bench.local_cluster import LocalCluster as Cluster
from services.common.config import WorkerSettings
from services.models.resolved import read_config
from services.pb import inference_pb2, inference_pb2_grpc
from services.sim.memory import WorkerShape, worker_memory
from services.text.tokenizer import TextModel
from tests.support.generate import Answer, collect, generate, request
from tests.support.prompts import MAX_TOKENS, Prompt, fixed_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
MODES = ("REMOTE", "LOCAL", "STAY")


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[Prompt]:
    text = TextModel.load(smollm2_dir)
    return fixed_prompts(lambda s: text.encode(s, add_special=False).tolist())


@pytest.fixture(scope="module")
def pair(smollm2_dir: Path) -> Iterator[Cluster]:
    with Cluster(smollm2_dir, prefill=1, decode=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def single(smollm2_dir: Path) -> Iterator[Cluster]:
    with Cluster(smollm2_dir, prefill=0, decode=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(single: Cluster, prompts: list[Prompt]) -> dict[str, list[int]]:
    """What one worker process answers, each prompt on its own."""
    return {
        p.name: generate(single.grpc, request(p.token_ids, max_tokens=MAX_TOKENS)).token_ids[0]
        for p in prompts
    }


def test_a_worker_takes_the_memory_that_sizing_says(
    single: Cluster, expected: dict[str, list[int]], smollm2_dir: Path
) -> None:
    """Everything but KV within 20 %; blocks of KV that hold something are in memory as counted."""
    assert expected  # steps of all kinds have run
    settings = WorkerSettings()
    shape = WorkerShape(
        "float32", "float32", settings.max_step_tokens, settings.max_num_seqs, is_cpu=True
    )
    memory = worker_memory(read_config(smollm2_dir), shape)
    used = resident_bytes(single.pid_of("decode"))
    assert used["RssAnon"] + used["RssFile"] == pytest.approx(memory.fixed_bytes, rel=0.2)
    [status] = single.worker_statuses()
    assert status.blocks_cached > 0
    held, whole = (memory.block_bytes * n for n in (status.blocks_cached, status.blocks_total))
    assert held <= used["RssShmem"] <= whole * 1.02


def resident_bytes(pid: int) -> dict[str, int]:
    """What the kernel says is in memory: RssAnon, RssFile, RssShmem (the pool)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = (line.split() for line in lines if line.startswith("Rss"))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in rows}


def test_single_worker_gives_the_golden_ids(
    expected: dict[str, list[int]], smollm2_dir: Path
) -> None:
    golden = json.loads(GOLDEN.read_text())
    manifest = json.loads((smollm2_dir / "isthmus.json").read_text())
    assert golden["weights_digest"] == manifest["weights_digest"]
    assert expected == golden["answers"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_single_workers_tokens(
    pair: Cluster, prompts: list[Prompt], expected: dict[str, list[int]], mode: str
) -> None:
    """One by one, miss or hit; then hits, several at a time."""

    def check(prompt: Prompt) -> None:
        answer = generate(pair.grpc, request(prompt.token_ids, max_tokens=MAX_TOKENS), mode=mode)
        assert answer.token_ids[0] == expected[prompt.name], prompt.name
        assert answer.mode == mode

    for prompt in prompts:
        check(prompt)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(check, prompts))) == len(prompts)
    pair.assert_no_blocks_in_use()


def test_repeated_prompt_reports_its_cached_tokens(pair: Cluster, prompts: list[Prompt]) -> None:
    """RB-082: cached tokens are those of the worker that did the prefill."""
    prompt = next(p for p in prompts if p.name == "len_160")
    body = request(prompt.token_ids, max_tokens=2)
    generate(pair.grpc, body, mode="REMOTE")
    usage = generate(pair.grpc, body, mode="REMOTE").usage
    assert usage is not None
    assert usage.prompt_tokens == 160
    # The last token is always computed, so the last block is not taken from the cache.
    assert usage.cached_tokens == 144


def _sampled(cluster: Cluster, prompt: Prompt, mode: str, *, seed: int, n: int = 1) -> Answer:
    body = request(prompt.token_ids, max_tokens=12, n=n, temperature=0.8, top_p=0.95, seed=seed)
    return generate(cluster.grpc, body, mode=mode)


def test_seeded_sampling_is_the_same_in_every_mode(
    pair: Cluster, single: Cluster, prompts: list[Prompt]
) -> None:
    for prompt in prompts[:4]:
        alone = _sampled(single, prompt, "", seed=11)
        for mode in MODES:
            assert _sampled(pair, prompt, mode, seed=11).token_ids == alone.token_ids
        assert _sampled(pair, prompt, "REMOTE", seed=12).token_ids != alone.token_ids


def test_several_choices_cross_in_one_handoff(
    pair: Cluster, single: Cluster, prompts: list[Prompt]
) -> None:
    """RB-036: n > 1 gives each choice of the single worker; the prompt is counted once."""
    prompt = next(p for p in prompts if p.name == "len_33")
    alone = _sampled(single, prompt, "", seed=7, n=3)
    both = _sampled(pair, prompt, "REMOTE", seed=7, n=3)
    assert both.token_ids == alone.token_ids
    assert len({tuple(ids) for ids in both.token_ids.values()}) > 1
    assert both.usage is not None
    assert both.usage.prompt_tokens == 33
    pair.assert_no_blocks_in_use()


def test_one_token_is_not_handed_off(pair: Cluster, prompts: list[Prompt]) -> None:
    """RB-071: max_tokens 1 is served by prefill alone and leaves nothing pinned."""
    answer = generate(pair.grpc, request(prompts[0].token_ids, max_tokens=1), mode="REMOTE")
    assert len(answer.token_ids[0]) == 1
    assert answer.timing is not None
    assert answer.timing.handoff_bytes == 0
    pair.assert_no_blocks_in_use()


def test_stages_sum_to_the_whole(pair: Cluster, prompts: list[Prompt]) -> None:
    prompt = next(p for p in prompts if p.name == "many_chunks")
    fresh = prompt.token_ids[::-1]  # no worker has any of it cached
    timing = generate(pair.grpc, request(fresh, max_tokens=8), mode="REMOTE").timing
    assert timing is not None
    stages = (
        timing.router_us
        + timing.queue_us
        + timing.queue_prefill_us
        + timing.prefill_us
        + timing.handoff_us
        + timing.queue_decode_us
        + timing.decode_us
        + timing.unattributed_us
    )
    assert stages == timing.e2e_us
    assert 0 < timing.ttft_us <= timing.e2e_us
    assert timing.prefill_chunks > 1
    assert timing.prefill_worker
    assert timing.decode_worker


def test_answers_outlive_their_decode_worker(
    pair: Cluster, single: Cluster, prompts: list[Prompt], expected: dict[str, list[int]]
) -> None:
    """G1, G6: killed in mid-answer, greedy, sampled and with several choices; the last test here.

    No decode worker is left, so all of it ends at the prefill worker, from the very next token.
    """
    shapes: list[dict[str, float]] = [
        {},
        {"temperature": 0.8, "seed": 11, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"temperature": 0.8, "seed": 7, "n": 2},
    ]
    bodies = [
        request(prompt.token_ids, max_tokens=60, ignore_eos=True, **shape)  # type: ignore[arg-type]  # n is an int
        for prompt, shape in zip(prompts[:6], shapes * 2, strict=True)
    ]
    alone = [generate(single.grpc, body) for body in bodies]
    known = expected[prompts[0].name]
    assert alone[0].token_ids[0][: len(known)] == known
    victim = next(w for w in pair.worker_statuses() if w.role.decode > w.role.prefill)
    under_way = threading.Event()

    def ask(body: inference_pb2.GenerateRequest) -> Answer:
        with grpc.insecure_channel(pair.grpc) as channel:
            frames = inference_pb2_grpc.InferenceStub(channel).Generate(body, timeout=120)
            return collect(_noting(frames, under_way))

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(ask, bodies)
        assert under_way.wait(60)
        os.kill(victim.pid, signal.SIGKILL)
        moved = 0
        for answer, right in zip(answers, alone, strict=True):
            assert answer.token_ids == right.token_ids
            assert answer.text == right.text
            assert answer.finish == right.finish
            assert answer.usage is not None
            assert right.usage is not None
            assert answer.usage.prompt_tokens == right.usage.prompt_tokens
            assert answer.usage.completion_tokens == right.usage.completion_tokens
            assert answer.timing is not None
            moved += answer.timing.migrations
    assert moved > 0


def _noting(
    frames: Iterable[inference_pb2.GenerateFrame], under_way: threading.Event
) -> Iterator[inference_pb2.GenerateFrame]:
    for frame in frames:
        if frame.first_index > 5:
            under_way.set()
        yield frame
