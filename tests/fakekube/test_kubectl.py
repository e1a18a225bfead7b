"""Real kubectl: apply, scale, wait, get, delete."""

from __future__ import annotations

import json

import pytest

from tests.fakekube.kube import FakeKube
from tests.fakekube.programs import Programs
from tests.fakekube.small import CRD, DEPLOYMENT

pytestmark = pytest.mark.integration
_TOY = "apiVersion: example.dev/v1\nkind: Toy\nmetadata: {name: bear}\nspec: {colour: red}\n"


async def test_applies_scales_waits_and_deletes(anywhere: Programs) -> None:
    said = [await anywhere.kubectl("apply", "-f", "-", stdin=DEPLOYMENT) for _ in range(2)]
    assert said == ["deployment.apps/web created\n", "deployment.apps/web unchanged\n"]
    await anywhere.kubectl("scale", "deployment/web", "--replicas=3")
    await anywhere.kubectl("rollout", "status", "deployment/web", "--timeout=180s")
    await anywhere.kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=180s")
    pods = json.loads(await anywhere.kubectl("get", "pods", "-l", "app=web", "-o", "json"))
    assert [pod["status"]["phase"] for pod in pods["items"]] == ["Running"] * 3
    await anywhere.kubectl("delete", "deployment", "web", "--cascade=foreground")
    assert await anywhere.kubectl("get", "replicasets", "-o", "name") == ""


async def test_a_client_side_apply_removes_what_it_no_longer_names(anywhere: Programs) -> None:
    labelled = DEPLOYMENT.replace("name: web\nspec", "name: web\n  labels: {tier: front}\nspec")
    await anywhere.kubectl("apply", "-f", "-", stdin=labelled)
    await anywhere.kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    labels = "jsonpath={.metadata.labels}"
    assert await anywhere.kubectl("get", "deployment", "web", "-o", labels) in ("", "{}")


async def test_server_side_apply_tells_conflicts_and_can_force_them(anywhere: Programs) -> None:
    apply = ("apply", "--server-side", "-f", "-")
    await anywhere.kubectl(*apply, "--field-manager=one", stdin=DEPLOYMENT)
    other = DEPLOYMENT.replace("replicas: 2", "replicas: 1")
    done = await anywhere.failing("kubectl", *apply, "--field-manager=two", stdin=other)
    assert 'conflict with "one" using apps/v1: .spec.replicas' in done.err
    await anywhere.kubectl(*apply, "--field-manager=two", "--force-conflicts", stdin=other)
    replicas = "jsonpath={.spec.replicas}"
    assert await anywhere.kubectl("get", "deployment", "web", "-o", replicas) == "1"


async def test_a_field_that_does_not_exist_is_refused(anywhere: Programs) -> None:
    wrong = DEPLOYMENT.replace("image:", "imag:")
    done = await anywhere.failing("kubectl", "apply", "-f", "-", stdin=wrong)
    assert 'unknown field "spec.template.spec.containers[0].imag"' in done.err


async def test_a_selector_never_changes(anywhere: Programs) -> None:
    await anywhere.kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    other = DEPLOYMENT.replace("app: web", "app: other")
    done = await anywhere.failing("kubectl", "apply", "-f", "-", stdin=other)
    assert "field is immutable" in done.err


async def test_shows_columns_of_a_crd_and_keeps_its_rules(
    kube: FakeKube, programs: Programs
) -> None:
    await programs.kubectl("apply", "-f", "-", stdin=CRD)
    await programs.kubectl("wait", "--for=condition=Established", "crd/toys.example.dev")
    await programs.kubectl("apply", "-f", "-", stdin=_TOY)
    ready = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    await programs.kubectl(
        "patch", "toy", "bear", "--subresource=status", "--type=merge", "-p", ready
    )
    shown = await programs.kubectl("get", "ty")
    assert [line.split() for line in shown.splitlines()] == [
        ["NAME", "SIZE", "READY"],
        ["bear", "1", "True"],
    ]
    await programs.kubectl("scale", "toy/bear", "--replicas=4")
    assert kube.see("toys.example.dev", "bear")["spec"] == {"colour": "red", "size": 4}
    blue = _TOY.replace("red", "blue")
    done = await programs.failing("kubectl", "apply", "-f", "-", stdin=blue)
    assert "'blue' is not one of ['red', 'green']" in done.err


async def test_deleting_a_crd_deletes_its_objects_once_their_finalizers_are_gone(
    kube: FakeKube, programs: Programs
) -> None:
    await programs.kubectl("apply", "-f", "-", stdin=CRD)
    held = _TOY.replace("{name: bear}", "{name: bear, finalizers: [example.dev/hold]}")
    await programs.kubectl("apply", "-f", "-", stdin=held)
    await programs.kubectl("delete", "crd", "toys.example.dev", "--wait=false")
    assert "deletionTimestamp" in kube.see("toys.example.dev", "bear")["metadata"]
    free = '{"metadata":{"finalizers":null}}'
    await programs.kubectl("patch", "toy", "bear", "--type=merge", "-p", free)
    assert kube.find("customresourcedefinitions.apiextensions.k8s.io", "toys.example.dev") is None


async def test_says_what_an_account_may_do(kube: FakeKube, programs: Programs) -> None:
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    kube.add(f"{rbac}/v1", "Role", "reader", "default", rules=[rule])
    account = {"kind": "ServiceAccount", "name": "default", "namespace": "default"}
    role = {"apiGroup": rbac, "kind": "Role", "name": "reader"}
    kube.add(f"{rbac}/v1", "RoleBinding", "reader", "default", roleRef=role, subjects=[account])
    who = "--as=system:serviceaccount:default:default"
    assert await programs.kubectl("auth", "can-i", "get", "pods", who) == "yes\n"
    done = await programs.failing("kubectl", "auth", "can-i", "list", "pods", who)
    assert done.out == "no\n"
