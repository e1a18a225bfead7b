"""Runs two arms in interleaved blocks, or reads two stored runs, and compares them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from loadtest.analysis import CONFIDENCE, Origin, analyse, distributions, measured_part
from loadtest.blocks import block_of, block_scenario, join, joined_scenario, order_of
from loadtest.compare import Arm, CompareRules, compare, differences
from loadtest.figures import between_arms, interference_told
from loadtest.percentiles import CURVE_STEPS
from loadtest.raw_file import read_records
from loadtest.records import Phase, RequestRecord, Status
from loadtest.result import CompareResult, RunResult
from loadtest.results import ResultUnreadable, check_raw_file, load_result, result_path
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario, parse_scenario
from services.common.bounded_file import read_bounded
from services.common.config_source import parse_yaml
from services.common.errors import ConfigError

MIN_BLOCKS = 11  # with fewer, chance alone is as clear too often for the usual confidence
_MAX_RULES_BYTES = 64 << 10
_SLICES = 20  # of stored runs
_NOT_INTERLEAVED = (
    "the runs were not interleaved: whatever changed between them counts as a difference"
)

RunBlock = Callable[[Scenario], RunLog]
Tell = Callable[[str], None]
Records = tuple[Sequence[RequestRecord], Sequence[RequestRecord]]


@dataclass(frozen=True, slots=True)
class Side:
    """One arm of a comparison that is run: its name, and how to send it a block."""

    name: str
    run: RunBlock


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How a load is cut, and what of it is compared."""

    num_blocks: int
    but: str = ""  # a part of a mixed workload that is left out of what is compared


def read_rules(path: Path) -> CompareRules:
    """Read a YAML file; ConfigError names the key that is wrong."""
    text = read_bounded("rules", path, _MAX_RULES_BYTES).decode(errors="replace")
    try:
        return CompareRules.model_validate_json(
            json.dumps(parse_yaml(text, str(path))), strict=True
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}") from None


def compare_targets(
    a: Side,
    b: Side,
    scenario: Scenario,
    rules: CompareRules,
    origin: Origin,
    *,
    order: BlockOrder,
    tell: Tell,
) -> tuple[CompareResult, Records]:
    """Send the same blocks to both arms in turn; a run that is stopped keeps its whole pairs."""
    num_blocks, but = order.num_blocks, order.but
    if num_blocks < MIN_BLOCKS:
        tell(f"warning: fewer than {MIN_BLOCKS} blocks cannot convince at the usual confidence")
    sides = {"a": a, "b": b}
    logs: dict[str, dict[int, RunLog]] = {"a": {}, "b": {}}
    for block, arm in order_of(num_blocks):
        log = sides[arm].run(block_scenario(scenario, block, num_blocks))
        if log.is_interrupted:
            break
        logs[arm][block] = log
        tell(f"block {block + 1} of {num_blocks}, {arm.upper()}: {len(log.records)} requests")
    blocks = sorted(logs["a"].keys() & logs["b"].keys())
    if not blocks:
        raise ConfigError("the comparison was stopped before both arms had a block")
    starts_s = [0.0]
    for block in blocks[:-1]:
        starts_s.append(starts_s[-1] + max(logs[arm][block].duration_s for arm in logs))
    one = block_scenario(scenario, 0, num_blocks)
    whole = joined_scenario(scenario, one, starts_s[-1])

    def arm_of(side: Side, parts: Sequence[RunLog], price: float | None) -> tuple[Arm, RunLog]:
        log = join(parts, starts_s)
        each_s = one.phases.measure_s
        length_s = sum(part.duration_s if each_s is None else each_s for part in parts)
        result = analyse(log, whole, origin, measured_s=length_s)
        records = _others(_measured(log.records), but)
        if but:
            answered = [record for record in records if record.status is Status.OK]
            shown = distributions(answered, curve_steps=CURVE_STEPS)
            result = result.model_copy(update={"distributions": shown})
        return Arm(side.name, result, records, block_of, length_s, log.duration_s, price), log

    arm_a, log_a = arm_of(a, [logs["a"][block] for block in blocks], rules.usd_per_hour_a)
    arm_b, log_b = arm_of(b, [logs["b"][block] for block in blocks], rules.usd_per_hour_b)
    warnings = list(differences(arm_a.result, arm_b.result))
    result = compare(arm_a, arm_b, scenario.slo, rules, is_paired=True, warnings=warnings)
    return result, (log_a.records, log_b.records)


def with_interference(result: CompareResult, records: Records, *, but: str) -> CompareResult:
    """Add how much longer a token of the other requests takes beside that part."""
    without, beside = (
        [r for r in _others(_measured(arm), but) if r.status is Status.OK] for arm in records
    )
    figures = between_arms(beside, without, CONFIDENCE)
    told = interference_told(figures, but)
    return result.model_copy(
        update={"figures": figures, "verdict_reason": f"{told}; {result.verdict_reason}"}
    )


def compare_stored(a: Path, b: Path, rules: CompareRules) -> CompareResult:
    """Compare two results with their raw files; ResultUnreadable says what is missing."""
    one, other = _stored(a), _stored(b)
    warnings = [*differences(one, other), _NOT_INTERLEAVED]
    is_paired = one.scenario_digest == other.scenario_digest and one.seed == other.seed
    scenario = parse_scenario(one.scenario, str(a))
    arm_a, arm_b = _arm(a, one, rules.usd_per_hour_a), _arm(b, other, rules.usd_per_hour_b)
    return compare(arm_a, arm_b, scenario.slo, rules, is_paired=is_paired, warnings=warnings)


def _stored(path: Path) -> RunResult:
    result = load_result(path)
    if not isinstance(result, RunResult):
        raise ResultUnreadable(f"{path} holds a {result.kind}, and only runs can be compared")
    fault = check_raw_file(result, result_path(path).parent)
    if fault is not None:
        raise ResultUnreadable(f"{path}: {fault}")
    return result


def _arm(path: Path, result: RunResult, usd_per_hour: float | None) -> Arm:
    raw = result_path(path).parent / Path(result.raw_file).name  # as it was checked
    scenario = parse_scenario(result.scenario, str(path))
    _, measured = measured_part(read_records(raw), scenario, result.duration_s)
    first_s = min((record.scheduled_s for record in measured), default=0.0)
    last_s = max((record.scheduled_s for record in measured), default=0.0)
    rate_rps = result.rates.get("offered_rps")  # absent where nothing lasted any time
    length_s = len(measured) / rate_rps if rate_rps else 0.0

    def slice_of(record: RequestRecord) -> int:
        part = (record.scheduled_s - first_s) / (last_s - first_s) if last_s > first_s else 0.0
        return min(_SLICES - 1, int(part * _SLICES))

    name = str(path)
    return Arm(name, result, measured, slice_of, length_s, result.duration_s, usd_per_hour)


def _others(records: Sequence[RequestRecord], but: str) -> list[RequestRecord]:
    return [record for record in records if not but or record.kind.partition("/")[0] != but]


def _measured(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.phase is Phase.MEASURE]
