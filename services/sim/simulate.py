"""The one way into the simulator: a load and a cluster in, a report out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.router.policy import PolicyConfig
from services.sim.cluster import ClusterSpec
from services.sim.controller import Controller, Failure
from services.sim.placement import OURS, UNDISPLACED
from services.sim.report import SimReport
from services.sim.workload import Workload
from services.sim.world import Follow, World, nothing_follows


def simulate(
    workload: Workload,
    spec: ClusterSpec,
    *,
    policy: str = OURS,
    seed: int = 0,
    follow: Follow = nothing_follows,
    controller: Controller | None = None,
    failures: Sequence[Failure] = (),
) -> SimReport:
    """Run a load through a cluster in virtual time; equal arguments give equal reports.

    Args:
        controller: changes the sizes of pools; it sees virtual time only.
    """
    # Displacement and shared state are what is ours; a plain cost has neither.
    displacement = PolicyConfig().displacement if policy == OURS else 0.0
    config = PolicyConfig(displacement=displacement, hold=spec.hold)
    rule = OURS if policy == UNDISPLACED else policy
    with _no_collection():
        return _run(World(workload, spec, rule, config, seed, follow, controller, failures))


def _run(world: World) -> SimReport:
    """Run a world that is forgotten, but for its report, before anybody looks for cycles."""
    world.run()
    return world.report()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave out the search for cycles: a run has millions of values, and none in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
