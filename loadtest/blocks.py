"""A comparison's interleaved blocks: the load of each, and one log of all. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from loadtest.records import Chunk, RequestRecord, Status
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario

_NUMBERS = 1 << 32  # of requests a block may have
_MIN_BLOCK_S = 2.0


def order_of(num_blocks: int) -> Iterator[tuple[int, Literal["a", "b"]]]:
    """Give each block once for either arm: A B, B A, A B ... so that neither is always second."""
    for block in range(num_blocks):
        if block % 2 == 0:
            yield block, "a"
            yield block, "b"
        else:
            yield block, "b"
            yield block, "a"


def block_scenario(scenario: Scenario, block: int, num_blocks: int) -> Scenario:
    """Return the load of one block: a part of the time, and requests of its own."""
    seed = random.Random(f"{scenario.seed}/block/{block}").randrange(1 << 32)
    changes: dict[str, object] = {"seed": seed}
    if scenario.phases.measure_s is not None:
        length_s = max(_MIN_BLOCK_S, scenario.phases.measure_s / num_blocks)
        changes["phases"] = scenario.phases.model_copy(update={"measure_s": length_s})
    return scenario.model_copy(update=changes)


def joined_scenario(scenario: Scenario, block: Scenario, last_start_s: float) -> Scenario:
    """Return the scenario that all blocks of an arm are as one run."""
    phases = block.phases
    if phases.measure_s is None:
        return scenario
    joined = phases.model_copy(update={"measure_s": last_start_s + phases.measure_s})
    return scenario.model_copy(update={"phases": joined})


def join(logs: Sequence[RunLog], starts_s: Sequence[float]) -> RunLog:
    """Lay the blocks of one arm end to end; numbers tell block and request."""
    joined = RunLog(logs[0].facts, logs[0].started_at)
    for block, (log, start_s) in enumerate(zip(logs, starts_s, strict=True)):
        joined.records += [_moved(record, start_s, block, log) for record in log.records]
        joined.samples += [replace(s, at_s=s.at_s + start_s) for s in log.samples]
        joined.duration_s = max(joined.duration_s, start_s + log.duration_s)
        joined.num_shed += log.num_shed
        joined.notes += [note for note in log.notes if note not in joined.notes]
        joined.is_interrupted |= log.is_interrupted
    return joined


def block_of(record: RequestRecord) -> int:
    """Return the block a joined record is of."""
    return record.number // _NUMBERS


def _moved(record: RequestRecord, by_s: float, block: int, log: RunLog) -> RequestRecord:
    # What its block's end cut off was open until then, not until the end of all blocks.
    is_cut = record.status is Status.CENSORED and record.done_s is None
    done_s = log.duration_s if is_cut else record.done_s
    return replace(
        record,
        number=block * _NUMBERS + record.number,
        session=f"{block}/{record.session}" if record.session else "",
        scheduled_s=record.scheduled_s + by_s,
        sent_s=None if record.sent_s is None else record.sent_s + by_s,
        chunks=[Chunk(chunk.at_s + by_s, chunk.num_tokens) for chunk in record.chunks],
        done_s=None if done_s is None else done_s + by_s,
    )
