"""What requests take with a cluster to themselves: less than that no size of it can give. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.common.errors import ConfigError
from services.sim.performance import PerformanceModel
from services.sim.trials import Slo
from services.sim.workload import Arrival, Workload, leading_run

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Alone:
    """One request on an idle worker that holds all it could have cached."""

    number: int
    arrival: Arrival
    uncached_tokens: int
    ttft_s: float
    tpot_s: float

    def why_not(self, model: PerformanceModel, slo: Slo) -> str | None:
        """Say why it misses its limits even so; None = it keeps them."""
        held = self.arrival.num_tokens + self.arrival.output_tokens
        if held > model.kv_tokens:
            return f"needs KV for {held} tokens, a worker has {model.kv_tokens}"
        if self.ttft_s > slo.ttft_s:
            return f"{self.uncached_tokens} tokens to compute take {self.ttft_s:.3f} s"
        if self.arrival.output_tokens > 1 and self.tpot_s > slo.tpot_s:
            return f"a step alone takes {self.tpot_s * 1e3:.1f} ms"
        return None


def each_alone(workload: Workload, model: PerformanceModel) -> Iterator[Alone]:
    """Go through a load with a cache that forgets nothing and workers that are never busy."""
    seen: set[int] = set()
    for number, arrival in enumerate(workload.arrivals):
        hit = leading_run(arrival.units, seen) * workload.unit_tokens
        cached = min(hit, arrival.num_tokens - 1)
        uncached = arrival.num_tokens - cached
        yield Alone(
            number, arrival, uncached,
            ttft_s=model.prefill_s(uncached, cached),
            tpot_s=model.decode_s(1, arrival.num_tokens),
        )  # fmt: skip
        seen.update(arrival.units)


def check_reach(loads: Sequence[Workload], model: PerformanceModel, slo: Slo) -> float:
    """Return the share of requests that no cluster can serve well; refuse a target it forbids.

    Raises:
        ConfigError: it names some of them.
    """
    missed = [
        (alone, load.name, why)
        for load in loads
        for alone in each_alone(load, model)
        if (why := alone.why_not(model, slo)) is not None
    ]
    total = sum(len(load.arrivals) for load in loads)
    if total - len(missed) >= slo.attain * total:
        return len(missed) / total
    shown = "; ".join(
        f"request {alone.number} of {name} ({alone.arrival.num_tokens} tokens): {why}"
        for alone, name, why in sorted(missed, key=lambda m: -m[0].uncached_tokens)[:_SHOWN]
    )
    raise ConfigError(
        f"no cluster of such workers can keep TTFT {slo.ttft_s:g} s and TPOT "
        f"{slo.tpot_s * 1e3:g} ms for {slo.attain:.0%} of requests: {len(missed)} of {total} miss "
        f"them on an idle worker that has cached all it could: {shown}"
    )
