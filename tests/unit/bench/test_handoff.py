"""The handoff benchmark: what its bars are taken from, and two real ends in one small run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.bench import handoff as bench
from services.bench.handoff import Series
from services.bench.handoff_source import LAYOUT, SourceSettings


def _series(doorbell: Sequence[float], memcpy: Sequence[float], sender_cpu: float = 0.0) -> Series:
    return Series(list(doorbell), list(doorbell), list(memcpy), sender_cpu, 2 * len(doorbell))


def test_a_slow_moment_of_the_machine_hits_both_sides_of_a_ratio() -> None:
    series = _series([1.0, 10.0, 1.0], [0.9, 9.0, 0.9])
    assert series.ratio == pytest.approx(0.9)
    uneven = _series([1.0, 10.0, 1.2], [0.5, 9.0, 0.9])
    assert uneven.ratio == pytest.approx(0.75)


def test_bars_stand_where_the_claims_are_made() -> None:
    measured = {
        ("memfd", 64): _series([1.0], [0.81]),
        ("memfd", 1024): _series([1.0], [0.87], sender_cpu=0.02),
        ("memfd", 16): _series([1.0], [0.1]),
        ("memfd_layer_major", 64): _series([1.0], [0.79]),
        ("zmq", 64): _series([1.0], [0.19]),
        ("curve", 64): _series([1.0], [0.05]),
    }
    result = bench.result_of(measured, num_wrong=0)
    verdicts = {bar.name: bar.is_met for bar in result.bars}
    assert verdicts == {
        "memfd with doorbell, 64 blocks / memcpy": True,
        "memfd with doorbell, 1024 blocks / memcpy": False,
        "sender CPU on memfd, 1024 blocks / time of memcpy": True,
        "memfd from a layer-major source with doorbell, 64 blocks / memcpy": False,
        "zmq, 64 blocks / memcpy": True,
        "curve, 64 blocks / memcpy": False,
        "blocks with other content than announced": True,
    }
    assert result.exit_code == 1


def test_a_wrong_block_fails_the_run_whatever_the_speed() -> None:
    result = bench.result_of({("memfd", 64): _series([1.0], [2.0])}, num_wrong=1)
    assert [bar.is_met for bar in result.bars] == [True, False]
    assert result.exit_code == 1


def test_verification_is_told_apart_as_time_a_block() -> None:
    measured = {("memfd", 16): _series([1.0], [1.0]), ("memfd_always", 16): _series([1.16], [1.0])}
    figures = bench.result_of(measured, num_wrong=0).figures
    assert figures["memfd_16_verify_us_per_block"] == pytest.approx(0.16 / 16 * 1e6)


def test_long_handoffs_are_measured_less_often() -> None:
    assert [bench.rounds_of(n, 40) for n in (1, 64, 1024)] == [40, 40, 10]
    assert bench.rounds_of(1024, 4) == bench.MIN_ROUNDS


def test_a_source_is_started_with_what_was_asked_for() -> None:
    settings = SourceSettings("w", "/run", ("zmq",), 8, (3, 1), seed=7, curve_key_file="key")
    assert SourceSettings.from_json(settings.to_json()) == settings


def test_blocks_are_those_of_the_default_model() -> None:
    assert LAYOUT.block_bytes == 360 * 1024


def test_pyzmq_alone_stands_beside_the_zmq_plane() -> None:
    series = _series([2.0, 20.0, 2.0], [0.4, 4.0, 0.4])
    series.raw = [1.0, 10.0, 1.5]
    result = bench.result_of({("zmq", 64): series}, num_wrong=0)
    assert result.reference["pyzmq_64_to_memcpy"] == pytest.approx(0.4)
    assert result.figures["zmq_64_to_pyzmq"] == pytest.approx(0.5)


def test_every_plane_and_both_layouts_have_every_row_without_options() -> None:
    wanted = {
        (plane, is_layer_major)
        for plane in ("memfd", "zmq", "nccl")
        for is_layer_major in (False, True)
    }
    assert {(arm.plane, arm.is_layer_major) for arm in bench.ARMS} == wanted
    assert ",".join(str(count) for count in bench.BLOCKS) == "1,16,64,1024"
    measured = {
        (arm.name, count): _series([2.0], [1.0]) for arm in bench.ARMS for count in bench.BLOCKS
    }
    figures = bench.result_of(measured, num_wrong=0).figures
    for arm, count in measured:
        for kind in ("whole", "doorbell"):
            for unit in ("gb_s", "p50_ms", "p99_ms"):
                assert figures[f"{arm}_{count}_{kind}_{unit}"]
        assert {
            f"{arm}_{count}_{rest}" for rest in ("rounds", "to_memcpy", "sender_cpu_s_per_gb")
        } <= set(figures)
