from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.policy import run_trace
from services.bench.result import BenchFailed
from services.cli import exits
from services.cli.main import run
from services.sim.placement import OURS, RANDOM
from services.sim.world import ClusterSpec

SLICE = Path(__file__).parents[2] / "data" / "mooncake_conversation_first_120.jsonl.gz"
SPEC = ClusterSpec(num_prefill=3, num_decode=2)


def silent(step: str, share: float) -> None:
    """Tell nobody."""


def test_a_trace_without_bars_of_its_own_is_only_measured() -> None:
    result = run_trace(SLICE, SPEC, (OURS, RANDOM), speedup=2.0, seed=0, tell=silent)
    assert result.figures["requests"] == 120
    hits = [float(result.figures[f"{policy}.block_hit"] or 0) for policy in (OURS, RANDOM)]
    assert 0 < min(hits) <= max(hits) <= float(result.reference["ideal_block_hit"] or 0)
    assert (result.bars, result.exit_code) == ([], 0)


def test_what_is_no_trace_cannot_be_replayed(tmp_path: Path) -> None:
    bad = tmp_path / "trace.jsonl.gz"
    for content in (None, b"no gzip"):
        if content is not None:
            bad.write_bytes(content)
        with pytest.raises(BenchFailed, match="cannot replay"):
            run_trace(bad, SPEC, (OURS,), speedup=1.0, seed=0, tell=silent)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--trace", str(SLICE), "--synthetic-groups"),
        ("--trace", str(SLICE), "--policy", "best"),
        ("--trace", str(SLICE), "--routers", "1,4"),
    ],
)
def test_impossible_arguments_are_refused(words: tuple[str, ...]) -> None:
    assert run(["bench", "policy", *words]) == exits.USAGE
