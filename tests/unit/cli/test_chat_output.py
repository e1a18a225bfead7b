from __future__ import annotations

from services.cli.chat import timing_lines
from services.pb import common_pb2, inference_pb2

TIMING = common_pb2.Timing(
    router_us=1_000,
    queue_prefill_us=2_000,
    prefill_us=100_000,
    handoff_us=3_500,
    queue_decode_us=500,
    decode_us=900_000,
    unattributed_us=3_000,
    ttft_us=103_000,
    e2e_us=1_010_000,
    mode=common_pb2.MODE_REMOTE,
    plane=common_pb2.PLANE_MEMFD,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    handoff_bytes=3 << 20,
    handoff_blocks=4,
)
USAGE = inference_pb2.Usage(prompt_tokens=64, cached_tokens=16, completion_tokens=10)


def test_says_where_it_ran_and_how_the_kv_crossed() -> None:
    where, how_long = timing_lines(TIMING, USAGE, show_all=False)
    assert where == (
        "mode REMOTE · prefill on prefill-0 · decode on decode-0"
        " · handoff 4 blocks, 3.0 MiB over memfd, 3.5 ms of it after the first token"
    )
    assert how_long == (
        "TTFT 103 ms · 10 tokens at 9.9 tok/s · prompt 64 tokens (16 cached) · total 1010 ms"
    )


def test_stages_are_listed_and_add_up() -> None:
    lines = timing_lines(TIMING, USAGE, show_all=True)[2:]
    values = [float(line.split()[-2]) for line in lines]
    assert sum(values[:-1]) == values[-1] == 1010.0


def test_local_answer_mentions_no_handoff() -> None:
    local = common_pb2.Timing(mode=common_pb2.MODE_LOCAL, decode_worker="decode-0")
    assert timing_lines(local, USAGE, show_all=False)[0] == "mode LOCAL · decode on decode-0"


def test_says_what_was_read_in_place_and_what_a_migration_moved() -> None:
    timing = common_pb2.Timing()
    timing.CopyFrom(TIMING)
    timing.plane = common_pb2.PLANE_ATTACH
    timing.handoff_blocks, timing.handoff_bytes, timing.handoff_blocks_attached = 1, 1 << 20, 3
    timing.migrations, timing.migration_blocks, timing.migration_bytes = 1, 5, 5 << 20
    timing.migration_plane, timing.migration_us = common_pb2.PLANE_ZMQ, 2_000
    where, _, *stages = timing_lines(timing, USAGE, show_all=True)
    assert " · handoff 3 blocks read in place and 1 block, 1.0 MiB over attach, 3.5 ms" in where
    assert where.endswith(" · migrated once, 5 blocks, 5.0 MiB over zmq")
    assert any(line.split() == ["migration", "2.00", "ms"] for line in stages)


def test_a_handoff_that_moved_nothing_is_told_too() -> None:
    timing = common_pb2.Timing(
        mode=common_pb2.MODE_REMOTE, plane=common_pb2.PLANE_ATTACH, handoff_blocks_attached=1
    )
    where = timing_lines(timing, USAGE, show_all=False)[0]
    assert where == "mode REMOTE · handoff 1 block read in place, hidden under the prefill"
