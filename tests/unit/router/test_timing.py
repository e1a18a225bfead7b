from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.api import RequestTiming
from services.router.timing import Marks, StageTimes, Whereabouts, attribute, ttft_stages

Moment = st.none() | st.floats(0, 100)
Span = st.integers(0, 10**9)


def total(timing: RequestTiming) -> int:
    """Sum the stages."""
    return (
        timing.router_us + timing.queue_us + timing.queue_prefill_us + timing.prefill_us
        + timing.handoff_us + timing.queue_decode_us + timing.migration_us + timing.decode_us
        + timing.unattributed_us
    )  # fmt: skip


@given(
    st.builds(
        Marks, st.floats(0, 100), Moment, Moment, Moment, Moment, Moment, queued_s=st.floats(0, 100)
    ),
    st.builds(StageTimes, Span, Span, Span, Span, Span, migration_us=Span),
    st.floats(0, 100),
    st.booleans(),
)
def test_stages_always_sum_to_e2e(
    marks: Marks, stages: StageTimes, more_s: float, has_report: bool
) -> None:
    """Whatever workers claim and in whatever order things happened, no time counts twice."""
    ended = marks.received + more_s
    timing = attribute(marks, stages, ended, has_decode_report=has_report, where=Whereabouts())
    assert total(timing) == timing.e2e_us == int(ended * 1e6) - int(marks.received * 1e6)
    assert timing.router_us >= 0
    assert timing.unattributed_us >= 0


def test_waiting_to_be_sent_is_a_stage_of_its_own() -> None:
    marks = Marks(0.0, sent=0.5, first_token=0.6, first_frame=0.61, queued_s=0.48)
    timing = attribute(
        marks, StageTimes(prefill_us=100_000), 0.7, has_decode_report=False, where=Whereabouts()
    )
    assert (timing.router_us, timing.queue_us) == (20_000, 480_000)
    stages = dict(ttft_stages(marks, timing))
    assert (stages["router"], stages["queue"]) == (20_000, 480_000)
    assert sum(stages.values()) == timing.ttft_us == 610_000


def test_handoff_hidden_behind_prefill_costs_nothing() -> None:
    marks = Marks(0.0, sent=0.010, first_token=0.110, continued=0.050, decode_token=0.130)
    stages = StageTimes(
        queue_prefill_us=20_000, prefill_us=70_000, handoff_us=65_000, queue_decode_us=1_000,
        decode_us=80_000,
    )  # fmt: skip
    timing = attribute(marks, stages, 0.210, has_decode_report=True, where=Whereabouts())
    assert timing.router_us == 10_000
    assert timing.handoff_us == 5_000  # 50 + 65 ms is 5 ms after the first token
    assert (timing.queue_prefill_us, timing.prefill_us) == (20_000, 70_000)
    assert (timing.queue_decode_us, timing.decode_us) == (1_000, 80_000)
    assert timing.unattributed_us == 24_000


def test_without_a_decode_report_the_router_fills_in() -> None:
    marks = Marks(0.0, sent=0.0, first_token=0.1, continued=0.05, decode_token=0.12)
    timing = attribute(
        marks, StageTimes(prefill_us=100_000), 0.3, has_decode_report=False, where=Whereabouts()
    )
    assert (timing.handoff_us, timing.decode_us, timing.unattributed_us) == (20_000, 180_000, 0)


def test_a_migration_is_kept_apart_from_the_handoff() -> None:
    """Its transfer was reported as the request's handoff: the longer of the two won."""
    handed_off = StageTimes(
        handoff_us=5_000, handoff_bytes=400, plane="memfd", handoff_blocks=4,
        handoff_blocks_deduped=1, handoff_blocks_attached=2, decode_us=100,
    )  # fmt: skip
    moved = StageTimes(
        handoff_us=70_000, handoff_bytes=900, plane="zmq", handoff_blocks=9, decode_us=200
    )
    stages = handed_off.merged(moved.of_migration()).merged(moved.of_migration())
    assert (stages.handoff_us, stages.handoff_bytes, stages.plane) == (5_000, 400, "memfd")
    assert (stages.handoff_blocks, stages.handoff_blocks_attached) == (4, 2)
    assert (stages.migration_us, stages.migration_bytes) == (140_000, 1_800)
    assert (stages.migration_blocks, stages.migration_plane) == (18, "zmq")
    marks = Marks(0.0, sent=0.0, first_token=0.1, continued=0.1, decode_token=0.12)
    timing = attribute(marks, stages, 0.3, has_decode_report=True, where=Whereabouts())
    assert (timing.handoff_us, timing.migration_us) == (5_000, 140_000)
