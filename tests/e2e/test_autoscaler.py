"""A cluster with an autoscaler beside it: pools go to zero, and a request brings them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.bench.local_cluster import LocalCluster
from tests.support.generate import generate, request
from tests.support.scaling_policy import policy_values
from tests.support.toy_model import make_toy_model
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ZERO = {
    "minReplicas": 0,
    "scaleToZero": {"enabled": True, "idleSeconds": 2, "activationTimeoutSeconds": 300},
    "drain": {"deadlineSeconds": 60},
}
WAIT_S = 120.0


def test_cluster_goes_to_zero_and_a_held_request_brings_it_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    values = policy_values({"prefill": ZERO, "decode": ZERO}, tickSeconds=1)
    policy.write_text(yaml.safe_dump(values))
    model = make_toy_model(tmp_path / "model")
    flags = ("--engine", "scripted", "--policy", str(policy))
    with LocalCluster(model, prefill=1, decode=1, flags=flags) as cluster:
        wait_for(lambda: not cluster.worker_statuses(), WAIT_S, "no worker is left")
        told = cluster.cluster_status().autoscaler
        assert {pool.pool for pool in told.pools} == {"prefill", "decode"}
        answer = generate(cluster.grpc, request([5, 6, 7], max_tokens=4), timeout_s=WAIT_S)
        assert len(answer.token_ids[0]) == 4
    assert cluster.returncode == 0
