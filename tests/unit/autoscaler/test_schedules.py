from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.cron import checked_cron, checked_zone
from services.autoscaler.policy import (
    Metric,
    MetricTarget,
    MetricType,
    Pool,
    Role,
    Schedule,
    ScheduledPool,
    TargetType,
)
from services.autoscaler.schedules import (
    Limits,
    active_schedules,
    limits_at,
    limits_under,
    next_start,
    window_start,
)

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3600


def make_schedule(
    start: str = "0 8 * * 1-5",
    duration_s: int = 10 * HOUR,
    zone: str = "Europe/Berlin",
    name: str = "business-hours",
    **pools: ScheduledPool,
) -> Schedule:
    limits = pools or {"prefill": ScheduledPool(min_replicas=3)}
    return Schedule(
        name=name, time_zone=zone, start=start, duration_seconds=duration_s, pools=limits
    )


def make_pool(least: int = 1, most: int = 8) -> Pool:
    metric = Metric(type=MetricType.TTFT, target=MetricTarget(type=TargetType.VALUE, value="1"))
    return Pool(
        name="prefill",
        role=Role.PREFILL,
        min_replicas=least,
        max_replicas=most,
        metrics=(metric,),
    )


def berlin(*parts: int, fold: int = 0) -> float:
    return datetime(*parts, tzinfo=BERLIN, fold=fold).timestamp()  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("when", "is_active"),
    [
        (berlin(2026, 11, 30, 7, 59, 59), False),  # a Monday
        (berlin(2026, 11, 30, 8), True),
        (berlin(2026, 11, 30, 17, 59, 59), True),
        (berlin(2026, 11, 30, 18), False),
        (berlin(2026, 11, 29, 12), False),  # a Sunday
        (datetime(2026, 7, 1, 6, 30, tzinfo=UTC).timestamp(), True),  # summer: two hours ahead
        (datetime(2026, 12, 1, 6, 30, tzinfo=UTC).timestamp(), False),
    ],
)
def test_a_window_holds_from_its_start_to_its_end_in_local_time(
    when: float, is_active: bool
) -> None:
    assert (window_start(make_schedule(), when) is not None) == is_active


def test_a_fraction_of_a_second_changes_nothing() -> None:
    start = berlin(2026, 11, 30, 8)
    assert window_start(make_schedule(), start - 0.001) is None
    assert window_start(make_schedule(), start + 0.001) == start
    assert window_start(make_schedule(), start + 10 * HOUR - 0.001) == start
    assert window_start(make_schedule(), start + 10 * HOUR) is None


def test_a_window_goes_over_midnight_and_the_end_of_a_month() -> None:
    night = make_schedule("0 22 * * *", 8 * HOUR)
    assert window_start(night, berlin(2026, 12, 1, 5, 59)) == berlin(2026, 11, 30, 22)


def test_a_start_in_the_skipped_hour_comes_right_after_it() -> None:
    """02:30 does not exist on 2026-03-29 in Berlin."""
    schedule = make_schedule("30 2 * * *", HOUR)
    start = datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp()  # 03:00 there
    assert window_start(schedule, start - 1) is None
    assert window_start(schedule, start) == start
    assert window_start(schedule, start + HOUR) is None


def test_the_hour_that_comes_twice_starts_a_window_once_and_does_not_interrupt_it() -> None:
    """02:30 comes twice on 2026-10-25 in Berlin: at 00:30 and 01:30 UTC."""
    schedule = make_schedule("30 2 * * *", 2 * HOUR)
    start = datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp()
    found = {window_start(schedule, start + minute * 60) for minute in range(120)}
    assert found == {start}
    assert window_start(schedule, start + 2 * HOUR) is None
    assert window_start(schedule, start - 1) is None


@given(
    st.integers(1_767_225_600, 1_830_297_600),
    st.sampled_from(["15 2 * * *", "*/20 * * * *", "0 8 * * 1-5", "30 1 1 * *", "0 */6 * * 0"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
    st.integers(60, 40 * HOUR),
)
def test_a_moment_is_in_a_window_if_a_start_lies_within_its_duration(
    now: int, cron: str, zone: str, duration_s: int
) -> None:
    """Starts one after the other are the truth for the question of one moment."""
    schedule = make_schedule(cron, duration_s, zone)
    start = next_start(schedule, now - 42 * HOUR)
    starts = []
    while start <= now:
        starts.append(start)
        start = next_start(schedule, start)
    within = [s for s in starts if now < s + duration_s]
    assert window_start(schedule, now) == (min(within) if within else None)


def test_the_highest_limits_win_where_schedules_overlap() -> None:
    day = make_schedule("0 0 * * *", 24 * HOUR, prefill=ScheduledPool(min_replicas=3))
    noon = make_schedule(
        "0 12 * * *",
        HOUR,
        name="noon",
        prefill=ScheduledPool(min_replicas=5, max_replicas=6),
    )
    pool, schedules = make_pool(), (day, noon)
    assert limits_at(pool, schedules, berlin(2026, 11, 30, 11)) == Limits(3, 8, ("business-hours",))
    assert limits_at(pool, schedules, berlin(2026, 11, 30, 12)) == Limits(
        5, 8, ("business-hours", "noon")
    )
    assert [s.name for s in active_schedules(schedules, berlin(2026, 11, 30, 13))] == [day.name]


def test_a_schedule_can_lower_limits_and_leaves_other_pools_alone() -> None:
    night = make_schedule(prefill=ScheduledPool(min_replicas=0, max_replicas=2))
    other = make_schedule(decode=ScheduledPool(min_replicas=7))
    assert limits_under(make_pool(), (night,)) == Limits(0, 2, ("business-hours",))
    assert limits_under(make_pool(), (other,)) == Limits(1, 8)
    assert limits_under(make_pool(), ()) == Limits(1, 8)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0 8 * *", "4 fields, not five"),
        ("0 0 8 * * 1", "6 fields, not five"),
        ("@daily", "1 fields, not five"),
        ("61 8 * * *", "bad minute"),
        ("0 8 * * FUNDAY", "bad day-of-week"),
        ("0 8 31 2 *", "bad day-of-month"),
        ("0 0 */31 2 MON#5", "no day of the calendar"),
    ],
)
def test_what_is_no_schedule_is_told(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        checked_cron(text)


@pytest.mark.parametrize("name", ["Europe/Berlim", "../etc/passwd", "", "Europe", "+01:00"])
def test_an_unknown_time_zone_is_told(name: str) -> None:
    with pytest.raises(ValueError, match="no such time zone"):
        checked_zone(name)


def test_a_near_miss_of_a_time_zone_is_named() -> None:
    with pytest.raises(ValueError, match='did you mean "Europe/Berlin"'):
        checked_zone("Europe/Berlim")
