"""A campaign is its seed: same faults in the same order, every kind and every point among them."""

from __future__ import annotations

from services.chaos.fault_schedule import LINK_KINDS, FaultSchedule
from services.chaos.known_load import LoadShape, make_bodies
from services.runtime.fault_points import SINK_POINTS, SOURCE_POINTS, VARIABLE, FaultPoints


def test_same_seed_gives_the_same_faults_whatever_is_asked_in_between() -> None:
    one, other = FaultSchedule(3, 4), FaultSchedule(3, 4)
    outer = [one.next_outer() for _ in range(50)]
    interleaved = [(other.next_point("prefill"), other.next_outer())[1] for _ in range(50)]
    assert outer == interleaved
    assert outer != [FaultSchedule(4, 4).next_outer() for _ in range(50)]


def test_every_kind_and_every_point_of_a_role_is_drawn() -> None:
    schedule = FaultSchedule(1, 4)
    faults = [schedule.next_outer() for _ in range(300)]
    assert {f.kind for f in faults} == {"kill", "freeze", *LINK_KINDS}
    assert {f.worker_idx for f in faults} == {0, 1, 2, 3}
    for role, points in (("prefill", SOURCE_POINTS), ("decode", SINK_POINTS)):
        drawn = [schedule.next_point(role) for _ in range(400)]
        assert {point.partition(":")[0] for point in drawn} == {*points, ""}
        for point in drawn:
            FaultPoints.from_environ({VARIABLE: point})  # the worker can read it


def test_bodies_follow_from_the_seed_and_are_of_fixed_length() -> None:
    bodies = make_bodies(1, LoadShape(), 257)
    assert bodies == make_bodies(1, LoadShape(), 257)
    assert bodies != make_bodies(2, LoadShape(), 257)
    assert all(body.ignore_eos and body.timeout_ms for body in bodies)
    assert {len(b.token_ids) // 4 for b in bodies} <= set(LoadShape().prompt_lengths)
