"""The Triton kernels compute the reference's numbers, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is an extra")

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300.0  # 7 s on a machine that does nothing else
TOLERANCE = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60.0)


@pytest.fixture(scope="module")
def report() -> Any:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_interpreter"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("kernel", ["paged_prefill", "paged_decode"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matches_reference_on_odd_sizes(report: Any, kernel: str, dtype: str) -> None:
    errors = report["errors"][kernel][dtype]
    assert len(errors) == 5
    assert {name: e for name, e in errors.items() if e > TOLERANCE[dtype]} == {}


def test_mixed_storage_computes_in_float32(report: Any) -> None:
    assert report["mixed_storage"] < 2e-6


def test_queries_may_be_views_of_a_fused_projection(report: Any) -> None:
    assert report["strided_views"] is True


@pytest.mark.parametrize("kernel", ["paged_prefill", "paged_decode"])
def test_blocks_may_lie_in_several_pools(report: Any, kernel: str) -> None:
    assert report["many_pools"][kernel] < 2e-6
