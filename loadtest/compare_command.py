"""`compare`: is B better than A? Two targets in turn, or two stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadtest import options
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.compare import CompareRules
    from loadtest.comparing import Records
    from loadtest.launch import TargetSpec
    from loadtest.result import CompareResult
    from loadtest.scenario import Scenario


def compare(
    a: Annotated[str, typer.Argument(help="Target or stored result that is there already.")],
    b: Annotated[str, typer.Argument(help="Target or stored result that may be better.")],
    scenario: Annotated[
        str, typer.Option(help="Load for two targets: a YAML file, or a shipped scenario.")
    ] = "",
    blocks: Annotated[
        int, typer.Option(min=1, help="Parts of the load, sent A B, B A, A B and so on.")
    ] = 12,
    rules: Annotated[
        Path | None, typer.Option(help="YAML file: confidence, thresholds, prices of the arms.")
    ] = None,
    quick: options.Quick = False,
    rate: options.Rate = None,
    seed: options.Seed = None,
    api: options.AskedBy = options.ApiName.chat,
    model: options.Model = "",
    vocab_size: options.VocabSize = None,
    ca_file: options.CaFile = None,
    api_key_file: options.ApiKeyFile = None,
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> int:
    """Compare. Ends with 0 when B is better, 1 when it is worse, 2 when that cannot be told."""
    from loadtest.compare import EXIT_CODES, CompareRules
    from loadtest.comparing import compare_stored, read_rules
    from loadtest.outputs import save_compare
    from loadtest.results import ResultUnreadable, check_writable
    from loadtest.summary import summary

    read = CompareRules() if rules is None else read_rules(rules)
    check_writable(out)
    if not options.is_target(a) and not options.is_target(b):
        records: Records | None = None
        try:
            result = compare_stored(Path(a), Path(b), read)
        except ResultUnreadable as error:
            raise ConfigError(str(error)) from None
    else:
        if not scenario:
            raise ConfigError("--scenario is missing: two targets are compared under a load")
        found, base = options.read_scenario(scenario, quick=quick, rate=rate, seed=seed)
        specs = [
            options.spec_of(url, api, model, vocab_size, ca_file, api_key_file) for url in (a, b)
        ]
        result, records = _run(found, base, (specs[0], specs[1]), read, blocks)
    typer.echo(result.model_dump_json(indent=1) if json else summary(result))
    directory = save_compare(out, result, records)
    typer.echo(f"written to {directory}", err=True)
    return EXIT_CODES[result.verdict]


def _run(
    scenario: Scenario,
    base: Path,
    specs: tuple[TargetSpec, TargetSpec],
    rules: CompareRules,
    num_blocks: int,
) -> tuple[CompareResult, Records]:
    from loadtest.comparing import BlockOrder, Side, compare_targets
    from loadtest.launch import run_schedule, schedule_of
    from loadtest.origin import origin

    def side(spec: TargetSpec) -> Side:
        return Side(spec.url, lambda load: run_schedule(schedule_of(load, base), spec))

    return compare_targets(
        side(specs[0]), side(specs[1]), scenario, rules, origin(), order=BlockOrder(num_blocks),
        tell=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
