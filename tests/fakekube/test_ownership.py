"""Server-side apply and the strategic merge, against what Kubernetes documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Resource
from tests.fakekube.ownership import (
    Manager,
    after_update,
    applied,
    leaves,
    read_entries,
    write_entries,
)
from tests.fakekube.patches import json_patched, merge_patched, strategic_patched
from tests.fakekube.schemas import builtin

SCHEMA = builtin("apps", "v1", "Deployment")
ONE, TWO = Manager("one", "Apply"), Manager("two", "Apply")


def deployment(containers: list[dict[str, Any]], **spec: Any) -> Resource:
    """One with these containers."""
    template = {"spec": {"containers": containers}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"template": template, **spec},
    }


def apply(
    live: Resource | None, wanted: Resource, who: Manager, *, force: bool = False
) -> Resource:
    """Apply at some moment."""
    return applied(live, wanted, SCHEMA, who, force=force, time="now")


def containers_of(resource: Resource) -> list[dict[str, Any]]:
    """Containers of its template."""
    found: list[dict[str, Any]] = resource["spec"]["template"]["spec"]["containers"]
    return found


def test_two_managers_own_an_item_of_a_list_each() -> None:
    first = apply(None, deployment([{"name": "a", "image": "a:1"}]), ONE)
    both = apply(first, deployment([{"name": "b", "image": "b:1"}]), TWO)
    assert {item["name"] for item in containers_of(both)} == {"a", "b"}
    left = apply(both, deployment([]), TWO)
    assert containers_of(left) == [{"name": "a", "image": "a:1"}]


def test_what_a_manager_no_longer_names_is_removed_unless_another_owns_it() -> None:
    live = apply(None, deployment([{"name": "a", "image": "a:1"}], replicas=2, paused=True), ONE)
    live = apply(live, deployment([{"name": "a", "image": "a:1"}], replicas=2), TWO)
    after = apply(live, deployment([{"name": "a", "image": "a:1"}]), ONE)
    assert after["spec"]["replicas"] == 2
    assert "paused" not in after["spec"]
    alone = apply(after, deployment([{"name": "a", "image": "a:1"}]), TWO)
    assert "replicas" not in alone["spec"]


def test_another_value_conflicts_and_the_same_value_is_shared() -> None:
    live = apply(None, deployment([{"name": "a", "image": "a:1"}]), ONE)
    with pytest.raises(ApiError) as refused:
        apply(live, deployment([{"name": "a", "image": "a:2"}]), TWO)
    assert refused.value.status == 409
    (cause,) = refused.value.causes
    assert cause["field"] == '.spec.template.spec.containers[name="a"].image'
    shared = apply(live, deployment([{"name": "a", "image": "a:1"}]), TWO)
    assert [entry.manager.name for entry in read_entries(shared)] == ["one", "two"]


def test_force_takes_a_field_over() -> None:
    live = apply(None, deployment([{"name": "a", "image": "a:1"}]), ONE)
    taken = apply(live, deployment([{"name": "a", "image": "a:2"}]), TWO, force=True)
    assert containers_of(taken) == [{"name": "a", "image": "a:2"}]
    by_name = {entry.manager.name: entry.fields for entry in read_entries(taken)}
    assert not any(path[-1] == "f:image" for path in by_name["one"])
    assert any(path[-1] == "f:image" for path in by_name["two"])


def test_a_change_by_an_update_takes_the_field_from_who_applied_it() -> None:
    live = apply(None, deployment([{"name": "a"}], replicas=2), ONE)
    changed = {**live, "spec": {**live["spec"], "replicas": 5}}
    scaler = Manager("scaler", "Update", "scale")
    entries = after_update(live, changed, SCHEMA, scaler, "later")
    changed["metadata"] = {**changed["metadata"], "managedFields": write_entries(entries)}
    with pytest.raises(ApiError, match=r'conflict with "scaler" using apps/v1: \.spec\.replicas'):
        apply(changed, deployment([{"name": "a"}], replicas=2), ONE)
    assert apply(changed, deployment([{"name": "a"}]), ONE)["spec"]["replicas"] == 5


def test_the_same_apply_again_changes_nothing() -> None:
    wanted = deployment([{"name": "a", "ports": [{"containerPort": 80}]}], replicas=2)
    live = apply(None, wanted, ONE)
    containers_of(live)[0]["ports"][0]["protocol"] = "TCP"  # as Kubernetes fills in
    assert apply(live, wanted, ONE) == live


def test_fields_survive_being_written_and_read() -> None:
    live = apply(None, deployment([{"name": "a", "args": ["x"]}], selector={}), ONE)
    (entry,) = read_entries(live)
    del live["metadata"]["managedFields"]
    assert entry.fields == leaves(live, SCHEMA).keys()


def test_a_strategic_patch_merges_items_and_follows_directives() -> None:
    before = deployment(
        [
            {"name": "a", "image": "a:1", "args": ["x"]},
            {"name": "b", "image": "b:1"},
        ],
        strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
    )
    patch = {
        "spec": {
            "strategy": {"$retainKeys": ["type"], "type": "Recreate"},
            "template": {
                "spec": {
                    "$setElementOrder/containers": [{"name": "c"}, {"name": "a"}],
                    "containers": [
                        {"name": "a", "image": "a:2", "args": None},
                        {"name": "b", "$patch": "delete"},
                        {"name": "c", "image": "c:1"},
                    ],
                }
            },
        }
    }
    after = strategic_patched(before, patch, SCHEMA)
    assert containers_of(after) == [{"name": "c", "image": "c:1"}, {"name": "a", "image": "a:2"}]
    assert after["spec"]["strategy"] == {"type": "Recreate"}
    assert containers_of(before)[0]["image"] == "a:1"


def test_a_merge_patch_replaces_lists_and_removes_nulls() -> None:
    patched = merge_patched({"a": [1, 2], "b": {"c": 1, "d": 2}}, {"a": [3], "b": {"c": None}})
    assert patched == {"a": [3], "b": {"d": 2}}


def test_a_json_patch_whose_test_fails_is_refused() -> None:
    operations = [{"op": "test", "path": "/a", "value": 2}, {"op": "remove", "path": "/a"}]
    with pytest.raises(ApiError) as refused:
        json_patched({"a": 1}, operations)
    assert refused.value.status == 422
    assert json_patched({"a": 2}, operations) == {}
