"""One request leaves one trace over three processes, whose stages lie inside the root span."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from services.bench.local_cluster import LocalCluster
from tests.support.generate import generate, request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STAGES = {
    "isthmus.request",
    "isthmus.route",
    "isthmus.prefill.queue",
    "isthmus.prefill",
    "isthmus.prefill.chunk",
    "isthmus.handoff",
    "isthmus.decode.queue",
    "isthmus.decode",
    "isthmus.unattributed",
}
CLOCK_SLACK_NS = 5_000_000  # processes of one machine, wall clocks derived at different moments


def test_stages_of_a_handed_off_request_are_one_trace(toy_dir: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "spans.jsonl"
    settings = {
        "ISTHMUS_TELEMETRY__TRACE_FILE": str(trace_file),
        "ISTHMUS_WORKER__MAX_NUM_SEQS": "16",
    }
    prompt = [5 + i % 200 for i in range(1200)]
    with LocalCluster(toy_dir, prefill=1, decode=1, settings=settings) as cluster:
        timing = generate(cluster.grpc, request(prompt, max_tokens=6), mode="REMOTE").timing
        time.sleep(0.2)
    assert timing is not None
    spans: list[dict[str, Any]] = [json.loads(line) for line in trace_file.read_text().splitlines()]
    [root] = [s for s in spans if s["name"] == "isthmus.request"]
    trace = [s for s in spans if s["trace_id"] == root["trace_id"]]

    assert {s["name"] for s in trace} == STAGES
    assert {s["resource"]["service.instance.id"] for s in trace} == {
        "router-0",
        "prefill-0",
        "decode-0",
    }
    assert sum(s["name"] == "isthmus.prefill.chunk" for s in trace) == timing.prefill_chunks > 1
    for span in trace:
        assert span["end_ns"] >= span["start_ns"]
        assert span["start_ns"] >= root["start_ns"] - CLOCK_SLACK_NS, span["name"]
        assert span["end_ns"] <= root["end_ns"] + CLOCK_SLACK_NS, span["name"]
    [handoff] = [s for s in trace if s["name"] == "isthmus.handoff"]
    assert handoff["attributes"]["plane"] == "memfd"
    assert handoff["attributes"]["blocks"] == timing.handoff_blocks
