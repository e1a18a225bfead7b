"""Sixty-four streamed chats at once through the official client give single-worker answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from services.bench.local_cluster import LocalCluster as Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CHATS = 64
MAX_TOKENS = 12
TOPICS = (
    "rivers", "bread", "clocks", "glass", "winter", "maps", "violins", "bridges",
)  # fmt: skip


def question(index: int) -> str:
    """Different prompts, some long, groups of eight sharing a prefix."""
    topic = TOPICS[index % len(TOPICS)]
    opening = f"You are writing a short note about {topic}. Keep it plain and true. "
    padding = opening * (index // 16)
    return f"{padding}Tell me fact number {index // len(TOPICS) + 1} about {topic}."


@pytest.fixture(scope="module")
def cluster(smollm2_dir: Path) -> Iterator[Cluster]:
    with Cluster(smollm2_dir, prefill=1, decode=2) as running:
        yield running


@pytest.fixture(scope="module")
def single(smollm2_dir: Path) -> Iterator[Cluster]:
    with Cluster(smollm2_dir, prefill=0, decode=1) as running:
        yield running


async def ask(client: AsyncOpenAI, index: int) -> str:
    """Stream one greedy chat and return its text."""
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question(index)}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    )
    parts = []
    finish = None
    async for chunk in stream:
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    assert finish in ("stop", "length")
    return "".join(parts)


async def ask_all(url: str, concurrency: int) -> list[str]:
    """Ask every question, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> str:
            async with gate:
                return await ask(client, index)

        return await asyncio.gather(*(one(i) for i in range(NUM_CHATS)))


def test_concurrent_chats_equal_their_single_worker_answers(
    cluster: Cluster, single: Cluster
) -> None:
    alone = asyncio.run(ask_all(single.http, concurrency=1))
    together = asyncio.run(ask_all(cluster.http, concurrency=NUM_CHATS))
    assert together == alone
    used = {worker.worker_id for worker in cluster.worker_statuses() if worker.steps > 0}
    assert len(used) == 3, "every worker of both pools took part"
    cluster.assert_no_blocks_in_use()
