"""Rollouts, failures and removals of a cluster, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from services.operator.plan import Apply, Finalize, Patch, Plan
from tests.support.operator_world import POLICY, World


def settle(world: World, rounds: int = 60) -> Plan:
    """Run until nothing is left to do."""
    for _ in range(rounds):
        plan = world.reconcile()
        world.run()
        if not plan.actions and plan.requeue_after_s is None:
            return plan
    raise AssertionError(f"not settled: {plan}")


def settled(**changes: Any) -> World:
    world = World()
    if changes:
        world.edit(**changes)
    settle(world)
    return world


def condition(world: World, kind: str) -> tuple[str, str]:
    found = next(c for c in world.status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def message(world: World) -> str:
    """Of what is wrong."""
    found = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    return str(found["message"])


def sizes(world: World) -> dict[str, int]:
    deployments = {n: r for (k, n), r in world.objects.items() if k == "Deployment"}
    return {n.split("-")[1]: r["spec"].get("replicas", 1) for n, r in deployments.items()}


def test_first_of_all_the_resource_is_held() -> None:
    plan = World().plan()
    assert [type(action) for action in plan.actions] == [Finalize]


def test_a_cluster_comes_to_serve_and_is_left_alone_then() -> None:
    world = settled()
    assert sizes(world) == {"router": 2, "prefill": 1, "decode": 2}
    assert condition(world, "Available") == ("True", "Serving")
    assert condition(world, "Progressing") == ("False", "Steady")
    assert condition(world, "Degraded") == ("False", "AsExpected")
    before = world.status
    plan = world.reconcile()
    assert plan.actions == ()
    assert world.status == before


def test_sizes_are_never_part_of_what_is_applied() -> None:
    world = World()
    for _ in range(5):
        for action in world.reconcile().actions:
            if isinstance(action, Apply) and action.body["kind"] == "Deployment":
                assert "replicas" not in action.body["spec"]
        world.run()


def test_another_model_serves_beside_the_old_one_before_it_gets_requests() -> None:
    world = settled()
    old = world.selected
    world.edit(model={"name": "two"})
    world.reconcile()
    assert world.selected == old
    assert sorted(p.model for p in world.pods.values()) == ["one"] * 5
    world.run()
    world.reconcile()
    world.run()
    assert {p.model for p in world.pods.values()} == {"one", "two"}
    assert world.selected == old
    settle(world)
    assert world.selected != old
    assert {p.model for p in world.pods.values()} == {"two"}
    assert not world.others


def test_old_routers_end_before_old_workers() -> None:
    world = settled()
    old = world.selected
    world.edit(model={"name": "two"})
    while world.selected == old:
        world.reconcile()
        world.run()
    assert world.objects["Deployment", f"chat-router-{old}"]["spec"]["replicas"] == 0
    assert world.objects["Deployment", f"chat-decode-{old}"]["spec"]["replicas"] == 2
    settle(world)
    assert ("Deployment", f"chat-decode-{old}") not in world.objects
    assert ("ConfigMap", f"chat-{old}") not in world.objects


def test_a_model_that_never_serves_is_given_up_at_the_deadline() -> None:
    world = settled()
    old = world.selected
    world.broken.add("bad")
    world.edit(model={"name": "bad"})
    settle(world, rounds=100)
    assert world.selected == old
    assert not world.others
    assert condition(world, "Available") == ("True", "Serving")
    assert condition(world, "Degraded") == ("True", "RolloutFailed")
    assert world.reconcile().actions == ()  # not tried again
    world.edit(model={"name": "good"})
    settle(world)
    assert {p.model for p in world.pods.values()} == {"good"}
    assert condition(world, "Degraded") == ("False", "AsExpected")


def test_pods_that_restart_again_and_again_are_given_up_at_once() -> None:
    world = settled()
    old, start_s = world.selected, world.now_s
    world.edit(model={"name": "bad"})
    for _ in range(3):
        world.reconcile()
        world.run()
        for pod in world.pods.values():
            if pod.model == "bad":
                pod.is_ready, pod.reason, pod.restarts = False, "CrashLoopBackOff", 5
    settle(world)
    assert world.selected == old
    assert world.now_s - start_s < 300
    assert "CrashLoop" in message(world)


def test_a_spec_edited_back_ends_the_rollout() -> None:
    world = settled()
    old = world.selected
    world.edit(model={"name": "two"})
    world.reconcile()
    world.run()
    world.edit(model={"name": "one"})
    settle(world)
    assert world.selected == old
    assert {p.model for p in world.pods.values()} == {"one"}


def test_a_revision_that_is_being_emptied_can_be_wanted_again() -> None:
    world = settled()
    old = world.selected
    world.edit(model={"name": "two"})
    while world.selected == old:
        world.reconcile()
        world.run()
    world.edit(model={"name": "one"})
    settle(world)
    assert world.selected == old
    assert sizes(world) == {"router": 2, "prefill": 1, "decode": 2}
    assert condition(world, "Available") == ("True", "Serving")


@pytest.mark.parametrize("section", ["transfer", "pools"])
def test_another_form_of_kv_is_another_revision(section: str) -> None:
    world = settled()
    old = world.selected
    form: dict[str, Any] = {
        "transfer": {"allowPlaintextKv": True, "wireDtype": "bfloat16"},
        "pools": {"decode": {"config": {"worker": {"dtype": "bfloat16"}}}},
    }
    world.edit(**{section: form[section]})
    settle(world)
    assert world.selected != old


def test_another_image_is_rolled_in_place() -> None:
    world = settled()
    old = world.selected
    world.edit(router={"replicas": 2, "image": {"tag": "9.9"}})
    settle(world)
    assert world.selected == old
    router = world.objects["Deployment", f"chat-router-{old}"]
    image = router["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "localhost/isthmus-control:9.9"


def test_a_policy_s_sizes_are_set_once_and_left_to_its_autoscaler() -> None:
    world = World(policy=POLICY)
    settle(world)
    assert sizes(world) == {"router": 2, "prefill": 2, "decode": 3, "autoscaler": 1}
    decode = world.objects["Deployment", f"chat-decode-{world.selected}"]
    decode["spec"]["replicas"] = 7  # as an autoscaler would
    world.edit(router={"replicas": 3})
    settle(world)
    assert sizes(world) == {"router": 3, "prefill": 2, "decode": 7, "autoscaler": 1}


def test_without_a_policy_sizes_are_those_of_the_spec_again() -> None:
    world = World(policy=POLICY)
    settle(world)
    world.policy = None
    settle(world)
    assert sizes(world) == {"router": 2, "prefill": 1, "decode": 2}


def test_pools_of_a_new_model_are_as_large_as_those_that_serve() -> None:
    world = World(policy=POLICY)
    settle(world)
    world.objects["Deployment", f"chat-decode-{world.selected}"]["spec"]["replicas"] = 6
    world.edit(model={"name": "two"})
    settle(world)
    assert sizes(world)["decode"] == 6
    args = world.objects["Deployment", "chat-autoscaler"]["spec"]["template"]["spec"]
    assert f"--deployment=d=chat-decode-{world.selected}" in args["containers"][0]["args"]


def test_a_wrong_spec_changes_nothing_and_says_all_that_is_wrong() -> None:
    world = settled()
    world.edit(model={"name": ""}, tls={"routerSecret": "x"}, colour="red")
    plan = world.reconcile()
    assert plan.actions == ()
    assert condition(world, "Degraded") == ("True", "InvalidSpec")
    for part in ("spec.model.name", "workerSecret", "colour"):
        assert part in message(world)


def test_settings_are_judged_as_the_processes_do() -> None:
    world = World()
    world.edit(config={"router": {"max_requests": 0}})
    world.reconcile()
    assert "isthmus.yaml of router: router.max_requests" in message(world)
    world.edit(transfer={}, config={})
    world.reconcile()
    assert "transfer.curve_key_file" in message(world)


def test_what_others_change_is_put_right() -> None:
    world = settled()
    name = f"chat-router-{world.selected}"
    world.objects["Deployment", name]["spec"]["template"]["spec"]["containers"][0]["image"] = "x"
    assert [a.reason for a in world.reconcile().actions] == ["not as specified"]
    settle(world)


def test_a_size_that_was_changed_by_hand_is_put_right() -> None:
    world = settled()
    name = f"chat-router-{world.selected}"
    world.objects["Deployment", name]["spec"]["replicas"] = 9
    (action,) = world.reconcile().actions
    assert isinstance(action, Patch)
    assert action.reason == "9 -> 2"


def test_a_service_that_was_removed_selects_the_same_routers_again() -> None:
    world = settled()
    old = world.selected
    world.edit(model={"name": "two"})
    world.reconcile()
    del world.objects["Service", "chat-router"]
    world.reconcile()
    assert world.selected in ("", old)
    settle(world)
    assert {p.model for p in world.pods.values()} == {"two"}


def test_removal_ends_routers_then_workers_then_the_resource() -> None:
    world = settled()
    world.remove()
    world.reconcile()
    assert sizes(world) == {"router": 0, "prefill": 1, "decode": 2}
    for _ in range(20):
        world.run()
        world.reconcile()
        if world.is_gone:
            break
    assert world.is_gone


def test_removal_ends_though_pods_never_do() -> None:
    world = settled()
    world.remove()
    for _ in range(40):
        for pod in world.pods.values():
            pod.ends_at_s = None if pod.ends_at_s is None else world.now_s + 1e6
        if world.is_gone:
            break
        world.reconcile()
        world.run()
    assert world.is_gone
    assert world.deleted_at_s is not None
    assert world.now_s - world.deleted_at_s <= 2 * 120 + 20
