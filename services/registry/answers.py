"""Reads what the scripts answer. Nothing the store says is trusted to be well formed."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # of struct

from services.common.errors import StoreUnavailable
from services.registry.base import WorkerInfo, WorkerRecord
from services.registry.cost import DECODE, REMOTE, Option, Verdict
from services.registry.schema import decode_info, unpack_record

# slot, kind, fits, partner, in_flight, then the seconds and tokens of an Option
_OPTION = struct.Struct("<HBBhH10d")


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """Outcome of a join: "OK", "VERSION", "SUPERSEDED" or "FULL"."""

    outcome: str
    slot: int = 0
    gen: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers, with the infos to remember for the next one."""

    records: tuple[WorkerRecord, ...]
    info_version: str
    infos: Mapping[int, WorkerInfo]


def parse_status(answer: object) -> str:
    """Return the word a script answered with."""
    return word_of(items_of(answer)[0])


def parse_join(answer: object) -> JoinAnswer:
    """Read a join's answer."""
    items = items_of(answer)
    outcome = word_of(items[0])
    if outcome == "OK" and len(items) == 3:
        return JoinAnswer(outcome, number_of(items[1]), number_of(items[2]))
    if outcome == "VERSION" and len(items) == 2:
        return JoinAnswer(outcome, detail=word_of(items[1]))
    return JoinAnswer(outcome)


def parse_snapshot(answer: object, known: Mapping[int, WorkerInfo], known_version: str) -> Snapshot:
    """Read a snapshot; `known` infos are used when the store left them out."""
    items = items_of(answer)
    if len(items) != 4:
        raise StoreUnavailable("the store answered with a snapshot in an unknown form")
    now_ms, version = number_of(items[0]), word_of(items[1])
    infos = dict(known) if version == known_version else _infos(items_of(items[3], empty=True))
    records = []
    for key, value in _pairs(items_of(items[2], empty=True)):
        slot = _slot(key)
        packed = unpack_record(value) if isinstance(value, bytes) else None
        info = infos.get(slot) if slot is not None else None
        if slot is None or packed is None or info is None:
            continue
        left = max(-(10**9), min(10**9, packed.deadline_ms - now_ms))
        records.append(WorkerRecord(slot, packed.gen, packed.state, int(left), packed.load, info))
    return Snapshot(tuple(sorted(records, key=lambda r: r.slot)), version, infos)


def parse_route(answer: object, num_asks: int) -> tuple[Verdict | None, ...]:
    """Read a decision for each request; None where no candidate was left."""
    items = items_of(answer)
    if len(items) != num_asks:
        raise StoreUnavailable("the store decided for another number of requests")
    return tuple([_verdict(items_of(item)) for item in items])


def _verdict(items: Sequence[object]) -> Verdict | None:
    if word_of(items[0]) == "NONE":
        return None
    packed = items[3] if len(items) == 4 else None
    if not isinstance(packed, bytes) or not packed or len(packed) % _OPTION.size:
        raise StoreUnavailable("the store answered a decision in an unknown form")
    options = tuple([_option(row) for row in _OPTION.iter_unpack(packed)])
    return Verdict(options, number_of(items[2]) == 1)


def _option(row: tuple[Any, ...]) -> Option:
    slot, kind, fits, partner, in_flight = row[:5]
    numbers = row[5:]
    if not REMOTE <= kind <= DECODE or not all(map(math.isfinite, numbers)):
        raise StoreUnavailable("the store answered a decision that makes no sense")
    values: tuple[Any, ...] = (kind, slot, bool(fits), partner, *numbers, in_flight)
    return Option(*values)


def _infos(flat: Sequence[object]) -> dict[int, WorkerInfo]:
    infos = {}
    for key, value in _pairs(flat):
        slot = _slot(key)
        info = decode_info(value) if isinstance(value, bytes) else None
        if slot is not None and info is not None:
            infos[slot] = info
    return infos


def items_of(answer: object, *, empty: bool = False) -> Sequence[object]:
    """Return the items of an answer; raises StoreUnavailable if it has none."""
    if not isinstance(answer, list) or not (answer or empty):
        raise StoreUnavailable("the store answered a script in an unknown form")
    return answer


def _pairs(flat: Sequence[object]) -> list[tuple[object, object]]:
    return list(zip(flat[::2], flat[1::2], strict=False))


def word_of(value: object) -> str:
    """Return a value as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _slot(value: object) -> int | None:
    return int(value) if isinstance(value, bytes) and value.isdigit() else None


def number_of(value: object) -> int:
    """Return a value as a number; raises StoreUnavailable if it is none."""
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]  # any RESP scalar
    except (TypeError, ValueError):
        raise StoreUnavailable("the store answered a script with a word for a number") from None
