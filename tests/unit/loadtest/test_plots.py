"""Scales, numbers and the markup of plots."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.plots import numbers
from loadtest.plots.chart import Axis, LinePlot, Mark, Series, line_plot, thinned
from loadtest.plots.markup import Markup, join, tag
from loadtest.plots.scale import linear_scale, log_scale, suits_log

VALUES = st.floats(-1e9, 1e9)
POSITIVE = st.floats(1e-6, 1e9)


@given(low=VALUES, high=VALUES)
@example(low=12.2, high=12.200000000000001)
@example(low=0.0, high=0.0)
@example(low=-3.0, high=-3.0)
@example(low=0.0, high=5e-324)
def test_a_linear_axis_holds_its_values_between_few_even_ticks(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    scale = linear_scale(low, high, 0.0, 100.0)
    slack = 1e-6 * (scale.high - scale.low)
    assert scale.low - slack <= low <= high <= scale.high + slack
    assert 2 <= len(scale.ticks) <= 6
    steps = [b - a for a, b in zip(scale.ticks, scale.ticks[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert scale.at(scale.low) == 0.0
    assert scale.at(scale.high) == 100.0


@given(low=POSITIVE, high=POSITIVE)
def test_a_logarithmic_axis_holds_its_values_between_few_ticks(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    scale = log_scale(low, high, 0.0, 100.0)
    assert scale.low <= low * (1 + 1e-6)
    assert scale.high >= high * (1 - 1e-6)
    assert 1 <= len(scale.ticks) <= 6
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)


def test_ticks_are_round() -> None:
    assert linear_scale(3.0, 97.0, 0, 1).ticks == (0, 20, 40, 60, 80, 100)
    assert linear_scale(0.0, 1.0, 0, 1).ticks == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert log_scale(3.0, 40.0, 0, 1).ticks == (2, 5, 10, 20, 50)
    assert log_scale(3.0, 9e5, 0, 1).ticks == (10, 100, 1000, 10_000, 100_000, 1_000_000)
    assert log_scale(3.0, 40.0, 0, 100, gap=30.0).ticks == (3, 10, 30)
    assert log_scale(3.0, 40.0, 0, 100, gap=90.0).ticks == (2, 50)


def test_ticks_of_clocks_and_of_things_are_those_people_expect() -> None:
    clock = linear_scale(0.0, 241.0, 0, 1, steps=numbers.CLOCK_STEPS_S)
    assert linear_scale(40.0, 257.0, 0, 1).ticks == (0, 100, 200, 300)
    assert [numbers.seconds_axis(tick) for tick in clock.ticks] == [
        "0 s", "60 s", "2 min", "3 min", "4 min", "5 min",
    ]  # fmt: skip
    assert linear_scale(0.0, 2.0, 0, 1, is_whole=True).ticks == (0, 1, 2)
    assert linear_scale(0.0, 30.0, 0, 1, is_whole=True).ticks == (0, 10, 20, 30)
    assert linear_scale(0.0, 1e6, 0, 1, steps=numbers.CLOCK_STEPS_S).ticks[-1] == 1e6


def test_an_axis_is_logarithmic_only_where_values_are_positive_and_far_apart() -> None:
    assert suits_log([1.0, 20.0])
    assert not suits_log([1.0, 19.0])
    assert not suits_log([0.0, 100.0])
    assert not suits_log([5e-324, 100.0])
    assert not suits_log([])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ttft_ms", 0.0, "0 ms"),
        ("ttft_ms", 0.25, "250 µs"),
        ("ttft_ms", 12.345, "12.3 ms"),
        ("ttft_ms", 999.6, "1 s"),
        ("ttft_ms", 4560.0, "4.56 s"),
        ("ttft_ms", 150_000.0, "2.5 min"),
        ("makespan_s", 41.5, "41.5 s"),
        ("output_tok_s", 123_456.0, "123k tok/s"),
        ("goodput_rps", 12.04, "12/s"),
        ("hit_share", 0.4149, "41.5 %"),
        ("hit_share", 0.99999, "> 99.99 %"),
        ("hit_share", 1.0, "100 %"),
        ("migrations", 1234.0, "1234"),
        ("api_usd", 0.310, "$0.31"),
        ("usd_per_m_good", 0.104, "$0.104"),
    ],
)
def test_figures_are_written_in_the_unit_of_their_name(name: str, value: float, told: str) -> None:
    assert numbers.figure(name, value) == told


@given(st.floats(-1e12, 1e12))
def test_rounding_keeps_three_digits(value: float) -> None:
    told = float(numbers.significant(value))
    assert math.isclose(told, value, rel_tol=0.0051)


def test_names_are_told_in_words() -> None:
    assert numbers.title_of("ttft_sent_ms") == "TTFT sent"
    assert numbers.title_of("output_tok_s") == "Output"
    assert numbers.title_of("measured") == "Measured"


def test_text_is_escaped_once_and_markup_is_not() -> None:
    inner = tag("b", "a<b & 'c'")
    assert tag("p", inner, "<i>", title='"x"') == (
        '<p title="&quot;x&quot;"><b>a&lt;b &amp; &#x27;c&#x27;</b>&lt;i&gt;</p>'
    )
    assert join("a\x00\ud800b") == "a\ufffd\ufffdb"
    assert isinstance(join("a"), Markup)


def test_thinning_keeps_the_ends_of_every_stretch() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[1234] = (1234.0, 99.0)
    points[5678] = (5678.0, -5.0)
    kept = thinned(points)
    assert len(kept) <= 400
    assert kept == sorted(kept)
    assert {(1234.0, 99.0), (5678.0, -5.0)} <= set(kept)


def test_a_line_goes_through_its_points_with_its_band_and_its_limit() -> None:
    axis = Axis("rate", numbers.count, 0.0, 10.0)
    series = Series("a", [(0.0, 0.0), (10.0, 10.0)], [(0.0, 0.0, 5.0), (10.0, 10.0, 10.0)])
    drawn = line_plot(LinePlot("T", "told", axis, axis, [series], [Mark(5.0, "limit")]))
    assert 'points="62.0,204.0 424.0,12.0"' in drawn
    assert 'points="62.0,108.0 424.0,12.0 424.0,12.0 62.0,204.0"' in drawn
    assert ">limit</text>" in drawn
    assert 'role="img" aria-label="T. told"' in drawn


def test_a_stepped_line_keeps_a_value_until_the_next() -> None:
    axis = Axis("x", numbers.count, 0.0, 10.0)
    series = Series("a", [(0.0, 0.0), (10.0, 10.0)], is_stepped=True)
    drawn = line_plot(LinePlot("T", "told", axis, axis, [series]))
    assert 'points="62.0,204.0 424.0,204.0 424.0,12.0"' in drawn
