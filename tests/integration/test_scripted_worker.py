"""Scripted workers are workers: every mode gives the computed answer, and torch stays out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.bench.local_cluster import LocalCluster
from services.chaos.scripted_model import ScriptedReference, make_scripted_model
from services.common.model_manifest import read_manifest
from services.common.sampling import SamplingParams
from tests.support.generate import generate, request

pytestmark = pytest.mark.integration

PROMPT = list(range(3, 203))


def test_answers_of_every_mode_are_the_computed_ones(tmp_path: Path) -> None:
    model_dir = make_scripted_model(tmp_path / "model")
    reference = ScriptedReference(read_manifest(model_dir))
    params = SamplingParams(seed=9, max_tokens=30, n=2, ignore_eos=True)
    expected = dict(enumerate(reference.answer(PROMPT, params)))
    body = request(PROMPT, max_tokens=30, n=2, temperature=1.0)
    body.ignore_eos = True
    body.sampling.seed = 9
    with LocalCluster(model_dir, prefill=1, decode=1, flags=("--engine", "scripted")) as cluster:
        for mode in ("REMOTE", "LOCAL", "STAY"):
            answer = generate(cluster.grpc, body, mode=mode)
            assert (answer.mode, answer.token_ids) == (mode, expected)
        cluster.assert_no_blocks_in_use()
        _assert_only_loopback_listens(cluster)


@pytest.mark.parametrize("max_tokens", [8, 60])
def test_scripted_workers_read_a_peers_pool_in_place(tmp_path: Path, max_tokens: int) -> None:
    """What campaigns rely on: every byte of every attached block goes into every token."""
    model_dir = make_scripted_model(tmp_path / "model")
    reference = ScriptedReference(read_manifest(model_dir))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    expected = reference.answer(PROMPT, params)[0]
    body = request(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    settings = {"ISTHMUS_TRANSFER__PLANES": "attach,memfd,zmq"}
    flags = ("--engine", "scripted")
    with LocalCluster(model_dir, prefill=1, decode=1, flags=flags, settings=settings) as cluster:
        assert generate(cluster.grpc, body, mode="REMOTE").token_ids[0] == expected
        planes = [set(status.planes.values()) for status in cluster.worker_statuses()]
        assert {"attach"} in planes
        cluster.assert_no_blocks_in_use()


def _assert_only_loopback_listens(cluster: LocalCluster) -> None:
    """RB-122: by default no process of a cluster can be reached from elsewhere."""
    found = [
        connection.laddr.ip
        for pid in cluster.pids()
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(found) >= 6  # two doors of the router, gRPC of two workers, KV, the store
    assert {host.removeprefix("::ffff:") for host in found} <= {"127.0.0.1", "::1"}


def test_program_imports_no_torch() -> None:
    code = "import sys, services.chaos.scripted_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
