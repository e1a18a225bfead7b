"""Several models in one router process: a router for each, one face for the doors and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common.errors import ConfigError, RequestError
from services.router.api import GenerateCall, ServedModel, WriteOutputs
from services.router.config import RouterConfig
from services.router.dispatch import Router
from services.router.reports import Latencies, RequestReport, RunningRequest, Totals
from services.router.view import WorkerView


class ModelSet:
    """Implements RouterPort. The first router is that of the default model; all share reports."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = {router.served_models()[0].name: router for router in routers}
        if len(self._routers) != len(routers):
            raise ConfigError("two models of one router have the same name")
        self._first = routers[0]

    async def start(self) -> None:
        """Find the workers of every model."""
        for router in self._routers.values():
            await router.start()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let open ones end within `drain_s`, then end the rest."""
        await asyncio.gather(*(router.stop(drain_s) for router in self._routers.values()))

    # -- RouterPort --------------------------------------------------------------------------

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        """Run a request on its model, as its router does. Raises IsthmusError."""
        router = self._routers.get(call.model)
        if router is None:
            raise RequestError(
                "model_not_found",
                f"model {call.model[:128]!r} is not served; served: {', '.join(self._routers)}",
                param="model",
            )
        await router.generate(call, write)

    def served_models(self) -> tuple[ServedModel, ...]:
        """Every model, the default one first."""
        return tuple(m for router in self._routers.values() for m in router.served_models())

    def is_ready(self) -> tuple[bool, str]:
        """Say whether requests of some model would be served now, and why those of none would."""
        looks = {name: router.is_ready() for name, router in self._routers.items()}
        if any(is_ready for is_ready, _ in looks.values()):
            return True, ""
        if len(looks) == 1:
            return self._first.is_ready()
        return False, "; ".join(f"{name}: {why}" for name, (_, why) in looks.items())

    # -- for operators -----------------------------------------------------------------------

    @property
    def config(self) -> RouterConfig:
        """Settings of the process, as the default model's router has them."""
        return self._first.config

    @property
    def num_open(self) -> int:
        """Requests accepted and not ended."""
        return sum(router.num_open for router in self._routers.values())

    @property
    def is_degraded(self) -> tuple[bool, str]:
        """Whether requests of some model are routed without the store, and why."""
        looks = [router.is_degraded for router in self._routers.values()]
        return next((look for look in looks if look[0]), (False, ""))

    def workers(self) -> tuple[WorkerView, ...]:
        """Return the workers of all models as this process sees them."""
        return tuple(w for router in self._routers.values() for w in router.view().workers)

    def note_gaps(self, model: str, gaps_s: Sequence[float]) -> None:
        """Hear of times between tokens of a model's answers, for the autoscaler."""
        router = self._routers.get(model)
        if router is not None:
            router.signals.gaps(gaps_s)

    def running(self) -> tuple[RunningRequest, ...]:
        """Describe the requests that are open."""
        return tuple(found for router in self._routers.values() for found in router.running())

    def explain(self, request_id: str) -> RequestReport | None:
        """Tell why a request runs or ran where it did; None for one not known (any more)."""
        reports = (router.explain(request_id) for router in self._routers.values())
        return next((report for report in reports if report is not None), None)

    def kill(self, request_id: str) -> bool:
        """End a request on an operator's word; False when none of that id is open."""
        return any(router.kill(request_id) for router in self._routers.values())

    def newest_reports(self, count: int) -> tuple[RequestReport, ...]:
        """Return what is remembered of the last requests that ended, newest first."""
        return self._first.newest_reports(count)

    def totals(self) -> Totals:
        """Return sums over all requests so far."""
        return self._first.totals(self.running())

    def latencies(self) -> Latencies:
        """Return how quick the last requests were."""
        return self._first.latencies()
