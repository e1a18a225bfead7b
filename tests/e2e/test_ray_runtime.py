"""`isthmus up --runtime ray`: the same cluster, its workers Ray actors, gone with it."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import psutil
import pytest
from openai import OpenAI

from services.bench.local_cluster import LocalCluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def refusal(address: str, method: str) -> grpc.StatusCode:
    """How Ray's port at an address answers somebody without the token."""
    with grpc.insecure_channel(address) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        try:
            call(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_up_on_ray_answers_a_chat_and_leaves_no_process(
    toy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-124: Ray's own port does nothing for who has no token."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # as people have it: with a token
    with LocalCluster(toy_dir, prefill=1, decode=1, flags=("--runtime", "ray")) as cluster:
        assert cluster.status()["ray"]["namespace"].startswith("isthmus-")
        names = [psutil.Process(cluster.pid_of(role)).name() for role in ("prefill", "decode")]
        assert all(name.startswith("ray::") for name in names)
        environ = psutil.Process(cluster.pid_of("decode")).environ()
        assert environ["RAY_AUTH_MODE"] == "token"
        gcs = cluster.status()["ray"]["address"]
        for method in ("NodeInfoGcsService/GetClusterId", "ActorInfoGcsService/KillActorViaGcs"):
            assert refusal(gcs, f"/ray.rpc.{method}") is grpc.StatusCode.UNAUTHENTICATED
        client = OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
        chat = client.chat.completions.create(
            model=cluster.status()["model"],
            messages=[{"role": "user", "content": "Tell me about rivers."}],
            max_tokens=8,
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens > 0
        up = psutil.Process(cluster.pids()[0])
        processes = up.children(recursive=True)
        assert len(processes) > 4  # Ray's own, the workers, the router, the store
        runtime_dir = cluster.runtime_dir()
    _, alive = psutil.wait_procs(processes, 20)
    assert not alive, [process.name() for process in alive]
    assert cluster.returncode == 0
    assert not os.path.exists(runtime_dir)
