"""What an isthmus server says about one request, by gRPC or in the key `isthmus` of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadtest.records import RequestRecord
from services.pb import common_pb2

# In the order they happen. A handoff and what follows it are no part of the time to first token.
STAGES = (
    "router", "queue", "queue_prefill", "prefill", "handoff", "queue_decode", "decode",
    "migration", "unattributed",
)  # fmt: skip


def take_message(record: RequestRecord, timing: common_pb2.Timing) -> None:
    """Note what the last gRPC frame says."""
    record.mode = common_pb2.Mode.Name(timing.mode).removeprefix("MODE_")
    record.prefill_worker = timing.prefill_worker
    record.decode_worker = timing.decode_worker
    record.migrations = timing.migrations
    record.handoff_bytes = timing.handoff_bytes
    record.stages_ms = _stages(lambda name: getattr(timing, name))


def take_object(record: RequestRecord, timing: Mapping[str, object]) -> None:
    """Note what the last HTTP event says; a key that is missing or odd counts as nothing."""
    record.mode = _text(timing, "mode")
    record.prefill_worker = _text(timing, "prefill_worker")
    record.decode_worker = _text(timing, "decode_worker")
    record.migrations = _number(timing, "migrations")
    record.handoff_bytes = _number(timing, "handoff_bytes")
    record.stages_ms = _stages(lambda name: _number(timing, name))


def _stages(microseconds: Callable[[str], int]) -> dict[str, float]:
    found = {stage: microseconds(f"{stage}_us") / 1000 for stage in STAGES}
    return {stage: ms for stage, ms in found.items() if ms}


def _text(timing: Mapping[str, object], key: str) -> str:
    value = timing.get(key)
    return value if isinstance(value, str) else ""


def _number(timing: Mapping[str, object], key: str) -> int:
    value = timing.get(key)
    return value if isinstance(value, int) and value >= 0 else 0
