from __future__ import annotations

from pathlib import Path

import pytest

from services.bench import policy as bench
from services.bench.policy import run_trace
from services.bench.result import BenchFailed
from services.cli import exits
from services.cli.main import run
from services.sim.cluster import ClusterSpec
from services.sim.placement import OURS, RANDOM

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


def test_the_table_has_a_row_for_each_load_and_number_of_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "GROUP_CASES", ((30.0, 1, 0.5),))
    monkeypatch.setattr(bench, "GROUP_REQUESTS", 60)
    monkeypatch.setattr(bench, "TABLE_POLICIES", (OURS, RANDOM))
    result = bench.run_table([SLICE], SPEC, (1, 2), speedup=2.0, seed=0, tell=silent)
    assert [bar.name for bar in result.bars] == [f"hit, 30rps_burst1_r{r}" for r in (1, 2)]
    head, _, *rows = bench.as_markdown(result).splitlines()
    assert head == f"| load, routers | {OURS} | {RANDOM} |"
    names = ("30rps_burst1", f"{SLICE.name.split('.')[0]}_x2")
    assert [row.split(" | ")[0] for row in rows] == [f"| {n}_r{r}" for n in names for r in (1, 2)]
    told = ("token_hit", "attainment", "ttft_mean_s")
    cell = [str(result.figures[f"30rps_burst1_r1.{OURS}.{key}"]) for key in told]
    assert rows[0].split(" | ")[1] == " / ".join(cell)


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
        ("--trace", str(SLICE), "--trace", str(SLICE)),
        ("--whole", "--policy", OURS),
        ("--trace", str(SLICE), "--markdown"),
    ],
)
def test_impossible_arguments_are_refused(words: tuple[str, ...]) -> None:
    assert run(["bench", "policy", *words]) == exits.USAGE
