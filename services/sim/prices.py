"""What a cluster costs, as its operator writes it down: a strict YAML file of prices.

All money is in US dollars, or in any other currency that is used throughout. A GPU stands for
whatever one is billed by: on machines without any, read "CPU machine".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from services.common.config_source import FieldDoc, iter_fields, read_yaml, validate
from services.common.settings import Section, setting

Role = Literal["prefill", "decode", "aggregated"]
_MAX_USD = 1e9


def _usd(default: float, description: str, unit: str) -> float:
    value: float = setting(default, description, unit=unit, ge=0, le=_MAX_USD)
    return value


class PoolPrices(Section):
    """The machines of one pool."""

    mode: Literal["rent", "own"] = setting("rent", "whether GPUs are rented or were bought")
    gpus_per_worker: float = setting(1.0, "GPUs one worker occupies", unit="GPUs", gt=0, le=1024)
    rent_per_gpu_h: float = _usd(2.5, "rent, mode rent", "$/GPU-hour")
    capex_per_gpu: float = _usd(
        30_000.0, "price of a GPU with its share of the server, mode own", "$/GPU"
    )
    overhead: float = setting(
        0.2, "what network, racks and building add to capex_per_gpu", unit="share", ge=0, le=10
    )
    interest: float = setting(0.08, "yearly interest on what was paid", unit="share", ge=0, le=1)
    life_years: float = setting(4.0, "years a GPU is written off over", unit="years", ge=0.1, le=50)
    availability: float = setting(
        0.95, "share of its hours an owned GPU can be used", unit="share", gt=0, le=1
    )
    idle_w: float = setting(100.0, "power of an idle GPU", unit="W", ge=0, le=1e6)
    max_w: float = setting(700.0, "power of a busy GPU", unit="W", ge=0, le=1e6)
    ops_per_gpu_h: float = _usd(0.0, "staff, space, support, network", "$/GPU-hour")

    @model_validator(mode="after")
    def _check_power(self) -> Self:
        if self.max_w < self.idle_w:
            raise ValueError("max_w is below idle_w")
        return self


class SharedPrices(Section):
    """What all pools share: routers, store, autoscaler, observability."""

    per_h: float = _usd(0.0, "all of it; split among the pools by GPU-hours", "$/hour")


class EnergyPrices(Section):
    """Electricity of owned GPUs; rent includes it."""

    per_kwh: float = _usd(0.12, "price of electricity", "$/kWh")
    pue: float = setting(
        1.3, "power of the building / power of the machines", unit="ratio", ge=1, le=10
    )


class CachePrices(Section):
    """Where KV is kept outside GPUs."""

    per_gib_h: float = _usd(0.0, "host memory or disks that hold KV", "$/GiB-hour")


class LossPrices(Section):
    """What a request that was not served well costs; only the opportunity cost counts it."""

    penalty_per_violation: float = _usd(0.0, "a request that misses its SLO", "$/request")
    margin_per_request: float = _usd(0.0, "a request refused or abandoned", "$/request")


class ApiPrices(Section):
    """What the same tokens would cost elsewhere; zeros = not compared."""

    per_m_input: float = _usd(0.0, "prompt tokens", "$/M tokens")
    per_m_cached: float = _usd(0.0, "prompt tokens that were cached", "$/M tokens")
    per_m_output: float = _usd(0.0, "answer tokens", "$/M tokens")


class Prices(Section):
    """A whole price file."""

    prefill: PoolPrices = setting(PoolPrices(), "workers that read prompts")
    decode: PoolPrices = setting(PoolPrices(), "workers that write answers")
    aggregated: PoolPrices = setting(PoolPrices(), "workers that do both")
    shared: SharedPrices = setting(SharedPrices(), "what all pools share")
    energy: EnergyPrices = setting(EnergyPrices(), "electricity")
    cache: CachePrices = setting(CachePrices(), "KV outside GPUs")
    loss: LossPrices = setting(LossPrices(), "requests not served well")
    api: ApiPrices = setting(ApiPrices(), "prices to break even with")

    def pool(self, role: Role) -> PoolPrices:
        """Return the prices of a pool."""
        pools: dict[Role, PoolPrices] = {
            "prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated,
        }  # fmt: skip
        return pools[role]


def read_prices(path: Path) -> Prices:
    """Read a price file; what it leaves out has its default.

    Raises:
        ConfigError: it cannot be read, has an unknown key or a value out of bounds.
    """
    return validate(read_yaml(path, Prices), Prices)


def prices_yaml() -> str:
    """Write a price file of all defaults, every key with its meaning and unit."""
    return "\n".join(_yaml_lines()) + "\n"


def _yaml_lines() -> Iterator[str]:
    section = ""
    for doc in iter_fields(Prices):
        name, _, key = doc.key.partition(".")
        if name != section:
            section = name
            yield ""
            yield f"{name}:  # {Prices.model_fields[name].description}"
        yield f"  {key}: {doc.default.strip(chr(34))}  # {_meaning(doc)}"


def _meaning(doc: FieldDoc) -> str:
    choice = f"{doc.type_name}: " if "|" in doc.type_name else ""
    return f"{choice}{doc.description}{f' ({doc.unit})' if doc.unit else ''}"
