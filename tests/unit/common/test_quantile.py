from __future__ import annotations

import pytest

from services.common.quantile import nearest_rank


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.99, 10), (0.0, 1), (1.0, 10)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert nearest_rank([float(v) for v in range(10, 0, -1)], share) == value


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(i) for i in range(1, 201)]
    assert nearest_rank(values, 0.99) == 198.0
    assert nearest_rank(values, 0.5) == 100.0
    assert nearest_rank([3.0, 1.0], 0.99) == 3.0
    assert nearest_rank([3.0], 0.01) == 3.0
    assert nearest_rank(values[:100], 0.55) == 55.0  # 55.00000000000001 in floats
