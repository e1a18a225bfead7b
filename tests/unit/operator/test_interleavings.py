"""Whatever happens in whatever order: no two models meet, what serves goes on, everything ends.

The world judges each action before it is done, and the models of pods after every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.operator_world import POLICY, SPEC, World

_ROUND_S = 30.0
_ROUNDS = 60  # more than all deadlines of this world together


def _model(name: str) -> Callable[[World, int], object]:
    return lambda world, _n: world.edit(model={"name": name})


def _fail(world: World, n: int) -> None:
    """A pod crashes, for good where `n` is odd."""
    if world.pods:
        pod = sorted(world.pods.values(), key=lambda p: p.name)[n % len(world.pods)]
        pod.is_ready = False
        if n % 2:
            pod.reason, pod.restarts = "CrashLoopBackOff", n


def _vanish(world: World, n: int) -> None:
    """A node takes a pod with it."""
    if world.pods:
        del world.pods[sorted(world.pods)[n % len(world.pods)]]


def _policy(world: World, n: int) -> None:
    world.policy = POLICY if n % 2 else None


def _scale(world: World, n: int) -> None:
    """The autoscaler, or somebody by hand, sets a size."""
    name = f"chat-decode-{world.selected}"
    if ("Deployment", name) in world.objects:
        world.objects["Deployment", name]["spec"]["replicas"] = 1 + n % 4


def _forget(world: World, _n: int) -> None:
    """The status is lost, as after a restore."""
    world.status = {}


def _meddle(world: World, n: int) -> None:
    """Somebody removes one of our resources that requests do not depend on."""
    names = sorted(k for k in world.objects if k[0] in ("PodDisruptionBudget", "NetworkPolicy"))
    if names:
        del world.objects[names[n % len(names)]]


_EVENTS: dict[str, Callable[[World, int], object]] = {
    "pass": lambda world, _n: world.reconcile(),
    "pass again": lambda world, _n: world.reconcile(),
    "pass that is cut off": lambda world, n: world.reconcile(stop_after=n % 6),
    "time": lambda world, _n: world.run(),
    "more time": lambda world, _n: world.run(),
    "much time": lambda world, n: world.run(60.0 * (n + 1)),
    "model one": _model("one"),
    "model two": _model("two"),
    "model bad": _model("bad"),
    "image": lambda world, n: world.edit(router={"replicas": 2, "image": {"tag": f"v{n}"}}),
    "sizes": lambda world, n: world.edit(pools={"prefill": {"replicas": 1 + n % 3}}),
    "wrong spec": lambda world, _n: world.edit(redis={}),
    "right spec": lambda world, _n: world.edit(redis=SPEC["redis"]),
    "fail": _fail,
    "vanish": _vanish,
    "policy": _policy,
    "scale": _scale,
    "forget": _forget,
    "meddle": _meddle,
}
_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(_EVENTS)), st.integers(0, 7)), min_size=1, max_size=40
)


def _serving() -> World:
    world = World(broken={"bad"})
    for _ in range(6):
        world.reconcile()
        world.run()
    assert world.status["router"]["ready"] == 2
    return world


_SERVING = _serving()  # copied by every example that begins with it


def _play(steps: list[tuple[str, int]]) -> World:
    """Play; an even first number begins with a cluster that serves, an odd one with nothing."""
    world = World(broken={"bad"}) if steps[0][1] % 2 else copy.deepcopy(_SERVING)
    for name, n in steps:
        _EVENTS[name](world, n)
        world.check_models()
    return world


@settings(max_examples=40, deadline=None)
@given(_STEPS)
def test_a_cluster_comes_to_rest_and_nothing_is_done_any_more(
    steps: list[tuple[str, int]],
) -> None:
    world = _play(steps)
    world.edit(redis=SPEC["redis"])
    for _ in range(_ROUNDS):
        plan = world.reconcile()
        world.run(_ROUND_S)
        for pod in world.pods.values():  # what was broken by chance is mended in the end
            pod.reason, pod.restarts = "", 0
        if not plan.actions and plan.requeue_after_s is None:
            break
    before = world.status
    plan = world.reconcile()
    assert plan.actions == ()
    assert world.status == before
    assert not world.others or world.spec["model"]["name"] == "bad"
    serving = {p.model for p in world.pods.values() if p.is_ready}
    assert serving <= {"one", "two"}
    if world.spec["model"]["name"] != "bad":
        assert serving == {world.spec["model"]["name"]}


@settings(max_examples=40, deadline=None)
@given(_STEPS, _STEPS, st.booleans())
def test_every_removal_ends(
    steps: list[tuple[str, int]], later: list[tuple[str, int]], is_stuck: bool
) -> None:
    world = _play(steps)
    world.remove()
    removed_at_s = world.now_s
    for name, n in later:
        if world.is_gone:
            return
        _EVENTS[name](world, n)
    for _ in range(_ROUNDS):
        if world.is_gone:
            break
        world.reconcile()
        world.run(_ROUND_S)
        for pod in world.pods.values():
            if is_stuck and pod.ends_at_s is not None:
                pod.ends_at_s = world.now_s + 1e6
    assert world.is_gone
    assert world.now_s - removed_at_s <= 2 * 600 + 120 + 8 * 60 * len(later) + 60


@settings(max_examples=40, deadline=None)
@given(_STEPS)
def test_the_same_state_gives_the_same_plan(steps: list[tuple[str, int]]) -> None:
    world = _play(steps)
    assert world.plan() == world.plan()
