"""Flags the commands share, and what they mean together."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.http_target import Api
    from loadtest.launch import TargetSpec
    from loadtest.run_cost import Pricing
    from loadtest.scenario import Scenario

SHIPPED = Path(__file__).parent / "scenarios"


class ApiName(StrEnum):
    """Which part of OpenAI's API an HTTP target is asked by."""

    chat = "chat"
    completions = "completions"


ScenarioName = Annotated[
    str,
    typer.Argument(help="A YAML file, or the name of a shipped scenario.", show_default=False),
]
Target = Annotated[
    str,
    typer.Option(
        envvar="ISTHMUS_LOADTEST_TARGET",
        help="grpc://HOST:PORT of a router, or http://HOST:PORT/PATH of any "
        "OpenAI-compatible server (grpcs and https by TLS); sim:prefill=N,decode=N simulates a "
        "cluster, and mock://http?KEY=VALUE&... brings a server with known timing.",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Run the scenario's short form, which fits a laptop.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=1e-6, max=1e6, help="Mean rate of sessions a second, instead of the scenario's."
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's.")]
AskedBy = Annotated[ApiName, typer.Option(help="What an HTTP target is asked by.")]
Model = Annotated[str, typer.Option(help="Model to ask for; default: the first one served.")]
VocabSize = Annotated[
    int | None,
    typer.Option(
        min=2, help="Send token ids below this to /v1/completions; default: words everywhere."
    ),
]
CaFile = Annotated[
    Path | None, typer.Option(help="Authority of the target's certificate, PEM; turns TLS on.")
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File that holds the API key; default: the variable ISTHMUS_API_KEY."),
]
PriceFile = Annotated[
    Path | None,
    typer.Option("--prices", help="Price file (loadtest/cost.yaml): tell what the run cost."),
]
WorkersText = Annotated[
    str,
    typer.Option(
        "--workers",
        help="What was provisioned, such as prefill=2,decode=4; default: those that served.",
    ),
]
RESULTS = Path("results")  # where `--out` points by default
Out = Annotated[Path, typer.Option(help="Directory that gets a directory for each result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def is_target(text: str) -> bool:
    """Whether this is an address and no file."""
    return "://" in text or text.startswith("sim:")


def shipped_names() -> list[str]:
    """Return the names of the scenarios that come with the program."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_scenario(name: str) -> Path:
    """Return a scenario's file; ConfigError names those that are shipped."""
    for path in (Path(name), SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(shipped_names())
    raise ConfigError(f"there is no scenario {name}: give a YAML file, or one of {known}")


def read_scenario(
    name: str, *, quick: bool, rate: float | None, seed: int | None
) -> tuple[Scenario, Path]:
    """Read a scenario with what flags change, and the directory its files are beside."""
    from loadtest.scenario import load_scenario

    path = find_scenario(name)
    scenario = load_scenario(path, quick=quick)
    if seed is not None:
        scenario = scenario.model_copy(update={"seed": seed})
    if rate is not None:
        scenario = scenario.at_rate(rate)
    return scenario, path.parent


def pricing_of(file: Path | None, workers: str) -> Pricing | None:
    """Read prices before anything is sent; None = the cost is not asked."""
    if file is None:
        if workers:
            raise ConfigError("--workers is for the cost: give --prices, too")
        return None
    from loadtest.run_cost import Pricing, parse_workers
    from services.sim.prices import read_prices

    return Pricing(read_prices(file), parse_workers(workers) if workers else None)


def spec_of(
    target: str,
    api: ApiName,
    model: str,
    vocab_size: int | None,
    ca_file: Path | None,
    key_file: Path | None,
) -> TargetSpec:
    """Put the flags of a target together."""
    from loadtest.launch import TargetSpec

    kind: Api = "chat" if api is ApiName.chat else "completions"
    return TargetSpec(target, kind, model, vocab_size, ca_file, key_file)
