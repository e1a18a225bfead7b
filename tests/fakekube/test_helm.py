"""Real helm: install, upgrade, rollback, test, uninstall."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest

from tests.fakekube.kube import FakeKube
from tests.fakekube.pods import PodPlan
from tests.fakekube.programs import Programs
from tests.fakekube.small import write_chart

pytestmark = pytest.mark.integration
_WAIT = ("--wait", "--timeout", "180s")


async def test_installs_upgrades_rolls_back_and_uninstalls(
    anywhere: Programs, tmp_path: Path
) -> None:
    chart = write_chart(tmp_path)

    async def text() -> str:
        return await anywhere.kubectl("get", "configmap", "rel", "-o", "jsonpath={.data.text}")

    await anywhere.helm("install", "rel", chart, *_WAIT)
    assert await text() == "first"
    await anywhere.helm("upgrade", "rel", chart, "--set", "text=second", "--no-hooks", *_WAIT)
    assert await text() == "second"
    await anywhere.helm("rollback", "rel", "1", "--no-hooks", *_WAIT)
    assert await text() == "first"
    history = json.loads(await anywhere.helm("history", "rel", "-o", "json"))
    assert [entry["status"] for entry in history] == ["superseded", "superseded", "deployed"]
    await anywhere.helm("uninstall", "rel", *_WAIT)
    assert await anywhere.kubectl("get", "deployments,configmaps,pods", "-o", "name") in (
        "",
        "configmap/kube-root-ca.crt\n",  # which a real cluster puts into every namespace
    )


async def test_hooks_and_tests_run_as_pods(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    chart = write_chart(tmp_path)
    kube.pods.plan = lambda _pod: PodPlan(log="all is well\n")
    await programs.helm("install", "rel", chart, *_WAIT)
    await programs.helm("upgrade", "rel", chart, *_WAIT)
    assert kube.find("jobs.batch", "rel-before") is None  # deleted, as it succeeded
    assert "all is well" in await programs.helm("test", "rel", "--logs")
    assert kube.see("pods", "rel-test")["status"]["phase"] == "Succeeded"


async def test_a_hook_that_fails_ends_the_upgrade(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    chart = write_chart(tmp_path)
    await programs.helm("install", "rel", chart, *_WAIT)
    kube.pods.plan = lambda _pod: PodPlan(exit_code=1)
    done = await programs.failing(
        "helm", "upgrade", "rel", str(chart), "--set", "text=second", "--timeout", "180s"
    )
    assert "pre-upgrade hooks failed" in done.err
    assert kube.see("configmaps", "rel")["data"] == {"text": "first"}


async def test_pods_that_never_start_fail_the_install_in_time(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    kube.pods.plan = lambda _pod: PodPlan(never_starts="ImagePullBackOff")
    chart = write_chart(tmp_path)
    done = await programs.failing("helm", "install", "rel", str(chart), "--wait", "--timeout", "3s")
    assert "deadline exceeded" in done.err
    releases = json.loads(await programs.helm("list", "--failed", "-o", "json"))
    assert [release["status"] for release in releases] == ["failed"]


async def test_releases_are_read_from_secrets_that_helm_posts_as_protobuf(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    await programs.helm("install", "rel", write_chart(tmp_path), *_WAIT)
    secret = kube.see("secrets", "sh.helm.release.v1.rel.v1")
    assert secret["type"] == "helm.sh/release.v1"
    packed = base64.b64decode(base64.b64decode(secret["data"]["release"]))
    assert json.loads(gzip.decompress(packed))["name"] == "rel"


async def test_a_size_that_another_manager_has_set_is_in_the_way_unless_the_chart_leaves_it_out(
    kube: FakeKube, programs: Programs, tmp_path: Path
) -> None:
    chart = write_chart(tmp_path)
    await programs.helm("install", "rel", chart, *_WAIT)
    await programs.kubectl("scale", "deployment/rel", "--replicas=5")
    done = await programs.failing("helm", "upgrade", "rel", str(chart), "--set", "text=second")
    assert 'conflict with "kubectl"' in done.err
    assert ".spec.replicas" in done.err
    await programs.helm("upgrade", "rel", chart, "--set", "text=second,replicas=null", *_WAIT)
    assert kube.see("deployments.apps", "rel")["spec"]["replicas"] == 5
