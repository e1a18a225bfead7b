"""The operator on the stand-in: made, changed, sized, given up, removed; conflicts, restarts."""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml

from services.autoscaler.kube_api import KubeApi
from services.common.clock import SystemClock
from services.operator.lease import KubeLease
from services.operator.main import LEASE_NAME, Operator, OperatorProcess, Options
from services.operator.observed import REVISION_LABEL
from services.operator.rbac import CLUSTER_RULES, LEASE_RULES
from services.telemetry.metrics import Metrics
from tests.fakekube.access import service_account, unused
from tests.fakekube.api import Options as How
from tests.fakekube.api import Target
from tests.fakekube.kube import FakeKube, Fault
from tests.fakekube.pods import PodPlan
from tests.support.operator_world import SPEC

pytestmark = [
    pytest.mark.integration,
    # The watches' own loop ends a while after their connections are closed, whoever else is slow.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
SPACE = "default"
USER = service_account(SPACE, "operator")
CLUSTERS = "isthmusclusters.isthmus.dev"
DEPLOYMENTS = "deployments.apps"
GONE = 499


def rules() -> list[dict[str, Any]]:
    """As a Role has them."""
    told = [asdict(rule) for rule in (*CLUSTER_RULES, *LEASE_RULES)]
    return [
        {"apiGroups": [r["group"]], "resources": [r["resource"]], "verbs": list(r["verbs"])}
        for r in told
    ]


class Rig:
    """A stand-in with our definitions, and operators on it."""

    def __init__(self, kube: FakeKube, folder: Path) -> None:
        self.kube = kube
        for path in sorted((ROOT / "helm/isthmus/crds").glob("*.yaml")):
            kube.post(yaml.safe_load(path.read_text()))
        kube.add("v1", "Secret", "store", SPACE, stringData={"url": "redis://store:6379/0"})
        for name in ("operator", "isthmus-autoscaler"):
            kube.add("v1", "ServiceAccount", name, SPACE)
        kube.add("rbac.authorization.k8s.io/v1", "Role", "operator", SPACE, rules=rules())
        kube.add(
            "rbac.authorization.k8s.io/v1", "RoleBinding", "operator", SPACE,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"},
            subjects=[{"kind": "ServiceAccount", "name": "operator", "namespace": SPACE}],
        )  # fmt: skip
        self._token = kube.token_of(SPACE, "operator")
        self._file = folder / "token"
        self._file.write_text(self._token)
        self._file.chmod(0o600)
        self._tls = ssl.create_default_context(cafile=str(kube.ca_file))

    def api(self, namespace: str = "") -> KubeApi:
        return KubeApi(
            self.kube.url, namespace or SPACE, token_file=self._file, tls=self._tls, timeout_s=20.0
        )

    def login(self) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=self.kube.url, ca_path=str(self.kube.ca_file), token=self._token
        )

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[asyncio.Task[str]]:
        """One process of it."""
        options = Options(make_api=self.api, login=self.login)
        operator = Operator(options, Metrics.disabled(), SystemClock())
        task = asyncio.create_task(operator.run())
        try:
            yield task
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError), ended  # it led all the time
            await operator.close()

    def make(self, **changes: Any) -> None:
        spec = {**copy.deepcopy(SPEC), **changes}
        self.kube.add("isthmus.dev/v1alpha1", "IsthmusCluster", "chat", SPACE, spec=spec)

    def edit(self, **changes: Any) -> None:
        """Change the spec, as kubectl does."""
        self.patch(CLUSTERS, "chat", {"spec": changes})

    def patch(self, plural: str, name: str, body: dict[str, Any]) -> None:
        kind = "application/merge-patch+json"
        self.kube.api.patch(self.target(plural, name), kind, body, How("kubectl"))

    def target(self, plural: str, name: str) -> Target:
        """Where it is."""
        return Target(self.kube._named(plural), SPACE, name)

    def condition(self, kind: str) -> tuple[str, str]:
        found = self.kube.find(CLUSTERS, "chat") or {}
        for each in (found.get("status") or {}).get("conditions") or ():
            if each["type"] == kind:
                return each["status"], each["reason"]
        return "", ""

    def is_steady(self) -> bool:
        cluster = self.kube.find(CLUSTERS, "chat") or {}
        status = cluster.get("status") or {}
        is_seen = status.get("observedGeneration") == cluster["metadata"]["generation"]
        steady = self.condition("Progressing") == ("False", "Steady")
        return is_seen and steady and self.condition("Available") == ("True", "Serving")

    def sizes(self) -> dict[str, int]:
        return {
            d["metadata"]["labels"]["app.kubernetes.io/component"]: d["spec"]["replicas"]
            for d in self.kube.all(DEPLOYMENTS)
        }

    def changes(self) -> int:
        """Calls of the operator that change something, its lease aside."""
        verbs = ("create", "patch", "delete")
        return sum(c.user == USER and c.verb in verbs for c, _ in self.kube.access.log)

    def has_looked_since(self, start: int) -> bool:
        """Whether a whole pass has begun."""
        return any(c.user == USER and c.resource == "pods" for c, _ in self.kube.access.log[start:])

    @property
    def selected(self) -> str:
        service = self.kube.see("services", "chat-router")
        return str(service["spec"]["selector"][REVISION_LABEL])


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for what the operator does."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.05)


@pytest.fixture
async def rig(kube: FakeKube, tmp_path: Path) -> Rig:
    return Rig(kube, tmp_path)


async def test_a_cluster_is_made_changed_and_removed(rig: Rig) -> None:
    """And every verb the operator is granted is one it needs."""
    rig.kube.add("v1", "ConfigMap", "others", SPACE)
    async with rig.operator():
        rig.make()
        await until(rig.is_steady)
        assert rig.sizes() == {"router": 2, "prefill": 1, "decode": 2}
        first = rig.selected
        rig.edit(pools={"decode": {"replicas": 3}})
        await until(lambda: rig.is_steady() and rig.sizes()["decode"] == 3)
        policy = yaml.safe_load((ROOT / "services/autoscaler/example.yaml").read_text())
        policy["spec"]["clusterRef"]["name"] = "chat"
        policy["metadata"]["namespace"] = SPACE
        rig.kube.post(policy)
        await until(lambda: "autoscaler" in rig.sizes())
        rig.edit(model={"name": "two"}, networkPolicy={"enabled": False})
        await until(lambda: rig.selected != first and len(rig.sizes()) == 4 and rig.is_steady())
        assert not rig.kube.all("networkpolicies.networking.k8s.io")
        rig.kube.api.delete(rig.target(CLUSTERS, "chat"), {})
        await until(lambda: rig.kube.find(CLUSTERS, "chat") is None)
        await until(lambda: not rig.kube.all(DEPLOYMENTS))
    assert rig.kube.find("configmaps", "others") is not None
    ok = (200, 201, GONE)  # who watches stays until it leaves
    calls = [call for call, s in rig.kube.access.log if call.user == USER and s in ok]
    refused = [call for call, s in rig.kube.access.log if call.user == USER and s == 403]
    assert refused == []
    assert unused(rules(), calls) == set()


async def test_a_model_that_never_starts_is_told_of_and_given_up(rig: Rig) -> None:
    async with rig.operator():
        rig.make()
        await until(rig.is_steady)
        first = rig.selected
        rig.kube.pods.plan = lambda pod: (
            PodPlan(never_starts="CrashLoopBackOff")
            if first not in pod["metadata"]["name"] and "router" not in pod["metadata"]["name"]
            else PodPlan()
        )
        rig.edit(model={"name": "bad"})
        await until(lambda: rig.condition("Degraded")[1] in ("CrashLoop", "RolloutFailed"))
        assert rig.selected == first
        assert rig.condition("Available") == ("True", "Serving")
        rig.edit(model={"name": "one"})
        await until(lambda: rig.is_steady() and len(rig.kube.all(DEPLOYMENTS)) == 3)
        assert rig.selected == first
        assert rig.condition("Degraded") == ("False", "AsExpected")


async def test_faults_only_cost_time_and_what_serves_is_left_alone(rig: Rig) -> None:
    async with rig.operator():
        rig.kube.faults += [
            Fault(status=409, verb="patch", user=USER),
            Fault(status=429, verb="list", user=USER),
            Fault(status=500, verb="get", user=USER),
        ]
        rig.make()
        await until(rig.is_steady)
        rig.kube.watches.drop_all()
        rig.edit(router={"replicas": 3})
        await until(lambda: rig.is_steady() and rig.sizes()["router"] == 3)
        # No hot loop: whatever is told of a cluster that serves, nothing is changed.
        before, seen = rig.changes(), len(rig.kube.access.log)
        rig.patch(CLUSTERS, "chat", {"metadata": {"labels": {"x": "y"}}})
        await until(lambda: rig.has_looked_since(seen))
        assert rig.changes() == before


async def test_another_operator_goes_on_in_the_middle_of_a_rollout(rig: Rig) -> None:
    rig.make()
    async with rig.operator():
        await until(rig.is_steady)
        first = rig.selected
        rig.kube.pods.plan = lambda pod: (
            PodPlan() if first in pod["metadata"]["name"] else PodPlan(startup_s=2.0)
        )
        rig.edit(model={"name": "two"})
        await until(lambda: len(rig.kube.all(DEPLOYMENTS)) == 6)
    assert rig.selected == first
    async with rig.operator():
        await until(lambda: rig.selected != first and rig.is_steady())
    assert len(rig.kube.all(DEPLOYMENTS)) == 3


async def test_one_operator_leads_and_another_follows(rig: Rig) -> None:
    apis = [rig.api(), rig.api()]
    first, second = (
        KubeLease(api, LEASE_NAME, owner, SystemClock())
        for api, owner in zip(apis, "ab", strict=True)
    )
    assert await first.renew()
    assert not await second.renew()
    assert second.leader == "a"
    assert await first.renew()
    await first.give_back()
    assert first.left_s == 0
    assert await second.renew()
    assert not await first.renew()
    for api in apis:
        await api.close()


async def test_a_process_ends_when_another_one_leads(rig: Rig) -> None:
    process = OperatorProcess(Options(make_api=rig.api, login=rig.login), SystemClock())
    await process.start()
    try:
        leases = "leases.coordination.k8s.io"
        await until(lambda: rig.kube.find(leases, LEASE_NAME) is not None)
        rig.patch(leases, LEASE_NAME, {"spec": {"holderIdentity": "other"}})
        async with asyncio.timeout(60):
            assert await process.failed() == "lease: ended"
    finally:
        await process.stop()
    assert rig.kube.see(leases, LEASE_NAME)["spec"]["holderIdentity"] == "other"
