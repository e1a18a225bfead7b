"""When a worker can be found, and what its probes say of it."""

from __future__ import annotations

import asyncio
import http.client
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from services.chaos.scripted_model import make_scripted_model
from services.chaos.scripted_worker import ScriptedBackend, Speed
from services.common.address import HeldPort
from services.common.clock import SystemClock
from services.common.config import IsthmusConfig, ModelSettings, StoreSettings, WorkerSettings
from services.common.errors import RequestError
from services.common.model_manifest import ModelManifest, read_manifest
from services.engine.loop import Executor
from services.engine.plan import StepPlan, StepResult
from services.engine.residency import BlockContent
from services.kv.memory import KvPoolMemory
from services.registry.reader import RedisRegistryReader
from services.registry.schema import namespace_of
from services.registry.store_client import StoreAddress
from services.worker.main import LIVENESS, READINESS, _Worker
from tests.support.cluster import eventually
from tests.support.store import store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Hold:
    """What holds an engine at its first step."""

    def __init__(self, *, is_broken: bool) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.is_broken = is_broken


class HeldExecutor:
    """Does no step before it is let go, or fails at it."""

    def __init__(self, inner: Executor, hold: Hold) -> None:
        self._inner = inner
        self._hold = hold

    def execute(self, plan: StepPlan) -> StepResult:
        self._hold.entered.set()
        assert self._hold.gate.wait(60.0)
        if self._hold.is_broken:
            raise RuntimeError("no device")
        return self._inner.execute(plan)


class HeldBackend(ScriptedBackend):
    """A scripted model behind such an executor."""

    def __init__(self, hold: Hold) -> None:
        super().__init__(Speed())
        self._hold = hold

    def attach(
        self, memory: KvPoolMemory, manifest: ModelManifest
    ) -> tuple[BlockContent, Executor]:
        content, executor = super().attach(memory, manifest)
        return content, HeldExecutor(executor, self._hold)


def make_config(model_dir: Path, store_url: str, runtime_dir: Path) -> IsthmusConfig:
    return IsthmusConfig(
        model=ModelSettings(name=str(model_dir)),
        store=StoreSettings(url=SecretStr(store_url)),
        worker=WorkerSettings(role="prefill", worker_id="w0", runtime_dir=str(runtime_dir)),
    )


async def eventually_says(address: str, name: str, status: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60.0):
        ask = health_pb2.HealthCheckRequest(service=name)
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(ask):
            if answer.status == status:
                return


def ask_http(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_worker_is_found_only_when_its_engine_has_answered(
    tmp_path: Path, store_url: str, is_broken: bool
) -> None:
    """RB-117."""
    model_dir = make_scripted_model(tmp_path / "model")
    hold = Hold(is_broken=is_broken)
    config = make_config(model_dir, store_url, tmp_path / "run")
    worker = _Worker(config, lambda *_: HeldBackend(hold), SystemClock())
    reader = RedisRegistryReader(
        StoreAddress(store_url),
        namespace_of(read_manifest(model_dir).weights_digest),
        SystemClock(),
    )
    starting = asyncio.create_task(worker.start())
    try:
        await eventually(lambda: hold.entered.is_set() or starting.done(), 30.0)
        assert not starting.done()
        assert await reader.snapshot() == ()
        hold.gate.set()
        if is_broken:
            with pytest.raises(RequestError, match="warm-up"):
                await starting
            assert await reader.snapshot() == ()
            return
        await starting
        parts = worker._parts
        assert parts is not None
        await eventually(lambda: parts.lease.is_registered, 30.0)
        (record,) = await reader.snapshot()
        assert record.info.worker_id == "w0"
        for name in ("", READINESS, LIVENESS):
            await eventually_says(record.info.address, name, SERVING)
    finally:
        hold.gate.set()
        await asyncio.gather(starting, return_exceptions=True)
        await worker.stop()
        worker.remove_runtime_dir()
        await reader.close()


async def test_an_idle_worker_lives_and_one_that_hangs_in_a_step_does_not(
    tmp_path: Path, store_url: str
) -> None:
    """RB-112: probes find a hung engine, where a process that only listens would answer well."""
    hold = Hold(is_broken=False)
    hold.gate.set()
    config = make_config(make_scripted_model(tmp_path / "model"), store_url, tmp_path / "run")
    config = config.model_copy(
        update={"worker": config.worker.model_copy(update={"metrics_port": 0})}
    )
    worker = _Worker(config, lambda *_: HeldBackend(hold), SystemClock())
    hung: asyncio.Task[None] | None = None
    try:
        await worker.start()
        assert worker._parts is not None
        assert worker._metrics_server is not None
        parts, port = worker._parts, worker._metrics_server.port
        address = parts.lease._info.address
        await eventually_says(address, READINESS, SERVING)
        assert await asyncio.to_thread(ask_http, port, "/ready") == (200, "ok\n")
        assert await asyncio.to_thread(ask_http, port, "/live") == (200, "ok\n")

        for _ in range(3):  # steps from which it knows how long they usually take
            await parts.shell.warm_up()
        hold.entered.clear()
        hold.gate.clear()
        hung = asyncio.create_task(parts.shell.warm_up())
        await eventually(hold.entered.is_set, 30.0)
        await eventually_says(address, LIVENESS, NOT_SERVING)
        await eventually_says(address, READINESS, NOT_SERVING)
        for path in ("/live", "/ready"):
            status, why = await asyncio.to_thread(ask_http, port, path)
            assert (status, "makes no progress" in why) == (503, True)
        assert "makes no progress" in await worker.failed()
        # A drain of such a worker ends by itself: what it waits for never comes.
        await asyncio.wait_for(worker.drain(), 60.0)
    finally:
        hold.gate.set()
        if hung is not None:
            await asyncio.gather(hung, return_exceptions=True)
        await worker.stop()
        worker.remove_runtime_dir()


async def test_a_worker_without_a_store_runs_and_is_not_ready(tmp_path: Path) -> None:
    """RB-116: it neither ends nor says that it could serve."""
    nobody = HeldPort("127.0.0.1")  # held, and nothing listens
    url = f"redis://127.0.0.1:{nobody.number}/0"
    config = make_config(make_scripted_model(tmp_path / "model"), url, tmp_path / "run")
    worker = _Worker(config, lambda *_: ScriptedBackend(Speed()), SystemClock())
    try:
        await worker.start()
        assert worker._parts is not None
        address = worker._parts.lease._info.address
        await eventually_says(address, LIVENESS, SERVING)
        await eventually_says(address, READINESS, NOT_SERVING)
    finally:
        await worker.stop()
        worker.remove_runtime_dir()
        nobody.release()
