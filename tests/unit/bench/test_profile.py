"""From measured times of a worker to the file the simulator reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench import profile as bench
from services.bench.profile import Measured, ProfiledWorker, model_of, run, table
from services.sim.performance import Network, parse_model

NETWORK = Network(token_bytes=100, bytes_s=1e9)


def test_medians_are_fitted_and_the_fit_is_judged() -> None:
    measured = Measured(chunks=[512.0, 500.0, 512.0])
    for n in (64, 256):
        for k in (0, 512):
            seconds = 0.01 + n * 1e-3 + n * (k + n / 2) * 1e-7
            measured.prompts[n, k] = [seconds, 9.0, seconds]  # one slow moment
    for batch in (1, 4):
        for context in (32, 256):
            resident = batch * (context + bench.STEPS / 2)
            measured.steps[batch, context] = [0.02 + batch * 1e-3 + resident * 1e-6]
    found = model_of(measured, ProfiledWorker("m", "test", 77, 1.5, NETWORK))
    assert (found.chunk_tokens, found.kv_blocks, found.startup_s) == (512, 77, 1.5)
    assert found.prefill.token_s == pytest.approx(1e-3)
    assert found.decode.request_s == pytest.approx(1e-3)
    assert found.fit is not None
    assert max(found.fit.prefill_max, found.fit.decode_max) < 1e-6
    assert any("off by 0.0%" in line for line in table(found))


def test_a_real_worker_is_measured(toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (16, 48, 96))
    monkeypatch.setattr(bench, "CONTEXTS", (0, 32))
    monkeypatch.setattr(bench, "BATCHES", (1, 3))
    monkeypatch.setattr(bench, "DECODE_CONTEXTS", (32, 64))
    found = run(str(toy_dir), budget_s=0.01, threads=1, seed=1, kv_memory_bytes=1 << 22)
    assert found.prefill.token_s > 0
    assert found.decode.fixed_s > 0
    assert found.source.startswith("isthmus profile, 1 rounds")
    written = found.model_dump_json(exclude_none=True)
    assert parse_model(written, "written") == found
