"""A router over fake workers and a real store, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.common.clock import SystemClock
from services.common.ids import RequestId, new_request_id
from services.common.model_manifest import ModelManifest
from services.common.sampling import SamplingParams
from services.kv.hashing import HASH_SCHEME
from services.registry.reader import ReaderConfig, RedisRegistryReader
from services.registry.store_client import StoreAddress
from services.router.api import (
    ChoiceDelta,
    ChoiceEnd,
    GenerateCall,
    RequestEnd,
    RouterOutput,
    TextWriter,
)
from services.router.config import RouterConfig
from services.router.dispatch import Router
from services.router.hooks import RouterHooks
from services.router.output_sink import LiveSink
from services.router.policy import PolicyConfig
from tests.support.fake_worker import FakeWorker, expected_token

NS = "cluster"
NO_BYPASS = PolicyConfig(bypass_tokens=0)  # short prompts take the whole way
DIGEST = "d" * 64


def make_manifest(**changes: object) -> ModelManifest:
    """Build the manifest the fake workers serve."""
    fields: dict[str, object] = {
        "name": "toy", "family": "llama", "weights_digest": DIGEST, "config_digest": "c",
        "tokenizer_digest": "t", "context_length": 2048, "vocab_size": 256, "num_layers": 2,
        "num_kv_heads": 1, "head_dim": 8, "rope": "{}", "eos_token_ids": (0,), **changes,
    }  # fmt: skip
    return ModelManifest.model_validate(fields)


IDENTITY = {
    "weights_digest": DIGEST, "tokenizer_digest": "t", "num_layers": "2", "num_kv_heads": "1",
    "head_dim": "8", "rope": "{}", "hash_scheme": HASH_SCHEME,
}  # fmt: skip


class DigitText:
    """Token N is the text "<N>"."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes."""
        return f"<{token_id}>".encode()

    def text_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to the text."""
        return self.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """Return the same as text."""
        return self.text_bytes(token_id).decode()


def make_call(
    prompt: Sequence[int] = tuple(range(1, 101)),
    *,
    max_tokens: int = 8,
    n: int = 1,
    stop: tuple[str, ...] = (),
    timeout_s: float = 10.0,
    force_mode: str | None = None,
    request_id: str | None = None,
    **sampling: Any,
) -> GenerateCall:
    """Build a request."""
    now = time.monotonic()
    params = replace(SamplingParams(temperature=0.0), max_tokens=max_tokens, n=n, **sampling)
    return GenerateCall(
        request_id=RequestId(request_id) if request_id else new_request_id(),
        model="toy", token_ids=np.array(prompt, dtype=np.uint32), sampling=params, stop=stop,
        deadline=now + timeout_s, received_at=now, force_mode=force_mode,
    )  # fmt: skip


@dataclass
class Answer:
    """Everything a request gave."""

    outputs: list[RouterOutput]
    num_short: int = 0  # tokens that went the short way

    def tokens(self, choice: int = 0) -> list[int]:
        """Token ids of a choice; checks that the indexes have neither gap nor repeat."""
        ids: list[int] = []
        for item in self.outputs:
            if isinstance(item, ChoiceDelta) and item.choice == choice:
                assert item.first_index == len(ids)
                ids.extend(item.token_ids)
        return ids

    def text(self, choice: int = 0) -> str:
        """Text of a choice."""
        return "".join(
            i.text for i in self.outputs if isinstance(i, ChoiceDelta) and i.choice == choice
        )

    def ends(self) -> list[ChoiceEnd]:
        """Ends of all choices."""
        return [item for item in self.outputs if isinstance(item, ChoiceEnd)]

    @property
    def end(self) -> RequestEnd:
        """The end of the request."""
        last = self.outputs[-1]
        assert isinstance(last, RequestEnd)
        return last


def reference(call: GenerateCall, choice: int = 0) -> list[int]:
    """The tokens any worker gives."""
    prompt = [int(t) for t in call.token_ids]
    return [expected_token(prompt, choice, i) for i in range(call.sampling.max_tokens)]


class LiveDoor:
    """A door that collects; every text is one of DigitText's."""

    def __init__(self) -> None:
        self.outputs: list[RouterOutput] = []
        self.num_short = 0
        self._next_index = 0

    def write_now(self, output: ChoiceDelta) -> bool:
        """Take a delta."""
        self.outputs.append(output)
        return True

    def writer(self) -> TextWriter | None:
        """Say where the text goes on."""
        last = next(o for o in reversed(self.outputs) if isinstance(o, ChoiceDelta))
        self._next_index = last.first_index + len(last.token_ids)
        return self._write

    def _write(self, text: str) -> bool:
        token_ids = (int(text.strip("<>")),)
        self.outputs.append(ChoiceDelta(0, self._next_index, token_ids, text))
        self._next_index += 1
        return True

    def note_written(self, num_tokens: int) -> None:
        """Count what went the short way."""
        self.num_short += num_tokens


class Cluster:
    """Handle of a running test cluster."""

    def __init__(self, router: Router, workers: dict[str, FakeWorker], store_url: str) -> None:
        self.router = router
        self.workers = workers
        self.store_url = store_url

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    async def ask(self, call: GenerateCall) -> Answer:
        """Run a request to its end, as a door that writes tokens in the moment they come."""
        door = LiveDoor()
        sink = LiveSink(door)

        async def write(outputs: Sequence[RouterOutput]) -> None:
            sink.is_open = False
            door.outputs.extend(outputs)
            await asyncio.sleep(0)  # as a connection does
            sink.is_open = True

        await self.router.generate(replace(call, sink=sink), write)
        return Answer(door.outputs, door.num_short)

    def state_of(self, worker_id: str) -> str:
        """State of a worker in the router's view."""
        worker = next((w for w in self.router.view().workers if w.worker_id == worker_id), None)
        return worker.state if worker else "unknown"

    async def until_state(self, worker_id: str, state: str, timeout_s: float = 5.0) -> None:
        """Wait for a state."""
        await eventually(lambda: self.state_of(worker_id) == state, timeout_s)

    async def add(self, worker: FakeWorker, port: int = 0) -> FakeWorker:
        """Start one more worker, or another life of one."""
        worker.identity = {**IDENTITY, **worker.identity}
        await worker.start(port, store_url=self.store_url, ns=NS)
        self.workers[worker.worker_id] = worker
        return worker

    def assert_clean(self) -> None:
        """RB-059: nothing is open and every booking is back."""
        assert self.router.num_open == 0
        assert all(w.booked.in_flight == 0 for w in self.router.view().workers)
        self.router._cluster.bookings.check_integrity()
        assert self.router._cluster.bookings.booked() == {}


async def eventually(check: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until `check` is truthy."""
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


def make_router(
    config: RouterConfig,
    store_url: str,
    hooks: RouterHooks | None = None,
    reader_config: ReaderConfig | None = None,
) -> Router:
    """Make one of a cluster's routers; it is not started."""
    reader = RedisRegistryReader(StoreAddress(store_url), NS, SystemClock(), reader_config)
    return Router(config, make_manifest(), DigitText(), reader, SystemClock(), hooks)


@asynccontextmanager
async def running_cluster(
    store_url: str,
    workers: Sequence[FakeWorker],
    config: RouterConfig | None = None,
    hooks: RouterHooks | None = None,
    reader_config: ReaderConfig | None = None,
) -> AsyncIterator[Cluster]:
    """Start workers and router; wait until every worker is judged."""
    config = config or RouterConfig()
    if config.policy == PolicyConfig():
        config = replace(config, policy=NO_BYPASS)
    cluster = Cluster(make_router(config, store_url, hooks, reader_config), {}, store_url)
    router = cluster.router
    try:
        for worker in workers:
            await cluster.add(worker)
        await eventually(lambda: all(w.lease.is_registered for w in workers))
        await router.start()
        judged = ("live", "incompatible")
        await eventually(lambda: all(cluster.state_of(w.worker_id) in judged for w in workers))
        yield cluster
    finally:
        await router.stop()
        for worker in cluster.workers.values():
            worker.thaw()
            await worker.stop()
