"""`isthmus bench handoff` with real processes, small: every arm runs and nothing arrives wrong."""

from __future__ import annotations

import pytest

from services.bench.handoff import ARMS, run

pytestmark = pytest.mark.integration


def test_every_arm_hands_off_what_was_announced() -> None:
    result = run([2], rounds=1, seed=3)
    for arm in ARMS:
        assert float(result.figures[f"{arm.name}_2_doorbell_p50_ms"] or 0) > 0
        assert float(result.figures[f"{arm.name}_2_whole_p50_ms"] or 0) > 0
    assert float(result.figures["gloo_raw_2_doorbell_p50_ms"] or 0) > 0
    assert "gloo_raw_2_sender_cpu_s_per_gb" not in result.figures
    wrong = [bar for bar in result.bars if "other content" in bar.name]
    assert [bar.value for bar in wrong] == [0]
    assert float(result.reference["pyzmq_2_to_memcpy"] or 0) > 0
    assert float(result.figures["zmq_2_to_pyzmq"] or 0) > 0
