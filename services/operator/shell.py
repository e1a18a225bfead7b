"""One pass over one cluster: look, decide, act, tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.autoscaler.driver import DriverError
from services.autoscaler.kube_api import KubeApi, KubeError, Resource
from services.autoscaler.policy_schema import PLURAL as POLICIES
from services.common.clock import Clock
from services.operator import cluster
from services.operator.observed import Observed, observe
from services.operator.plan import FINALIZER, Action, Apply, Delete, Finalize, Patch, Plan
from services.operator.policies import policies_of
from services.operator.reconcile import read_cluster, reconcile
from services.operator.resources import MANAGER, selector_of
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_PATHS = {
    "Deployment": ("apps/v1", "deployments"),
    "ConfigMap": ("", "configmaps"),
    "Service": ("", "services"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
}
_MISSING = 404


class ClusterShell:
    """The clusters of one name space. Belongs to the event loop."""

    def __init__(self, api: KubeApi, clock: Clock, may_act: Callable[[], bool]) -> None:
        """Prepare. `may_act` is asked before every change: whether we still lead."""
        self._api = api
        self._may_act = may_act
        self._clock = clock
        self._clusters = self._path(cluster.API_VERSION, cluster.PLURAL)

    async def reconcile(self, name: str) -> Plan | None:
        """Make one pass; None = there is no such cluster. Raises DriverError."""
        resource = await self._find(f"{self._clusters}/{name}")
        if resource is None:
            return None
        now_s = self._clock.unix_ms() / 1000
        plan = reconcile(read_cluster(resource), await self._observe(name, now_s), now_s)
        for action in plan.actions:
            self._check_lead()
            await self._act(resource, action)
            _log(name, action)
        is_let_go = any(isinstance(a, Finalize) and not a.is_wanted for a in plan.actions)
        if not is_let_go and plan.status != cluster.parse_status(resource.get("status")):
            self._check_lead()
            status = plan.status.model_dump(mode="json", by_alias=True)
            await self._api.merge_patch(f"{self._clusters}/{name}/status", {"status": status})
        return plan

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    def _check_lead(self) -> None:
        if not self._may_act():
            raise DriverError("the lease is over: another one may act")

    async def _observe(self, name: str, now_s: float) -> Observed:
        selector = selector_of(name)
        policies = self._path("autoscaling.isthmus.dev/v1alpha1", POLICIES)
        kinds = [self._listed(kind, selector) for kind in _PATHS]
        *found, pods, named = await asyncio.gather(
            *kinds, self._api.pods(selector), self._api.listed(policies)
        )
        resources = [resource for kind in found for resource in kind]
        return observe(resources, pods, policies_of(name, named), now_s)

    async def _listed(self, kind: str, selector: str) -> list[Resource]:
        """Return all of a kind; a list does not tell it of each."""
        found = await self._api.listed(self._path(*_PATHS[kind]), selector)
        return [{**resource, "kind": kind} for resource in found]

    async def _act(self, resource: Resource, action: Action) -> None:
        match action:
            case Apply(body):
                path = f"{self._path(*_PATHS[body['kind']])}/{body['metadata']['name']}"
                await self._api.apply(path, body, MANAGER)
            case Patch(name, body):
                await self._api.merge_patch(f"{self._path(*_PATHS['Deployment'])}/{name}", body)
            case Delete(kind, name):
                await self._delete(f"{self._path(*_PATHS[kind])}/{name}")
            case Finalize(is_wanted):
                await self._finalize(resource["metadata"], is_wanted)

    async def _delete(self, path: str) -> None:
        try:
            await self._api.delete(path)
        except KubeError as error:
            if error.status != _MISSING:
                raise

    async def _finalize(self, metadata: Resource, is_wanted: bool) -> None:
        """Change our entry only: the version has others that change the list be seen."""
        others = [each for each in metadata.get("finalizers") or () if each != FINALIZER]
        body = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": [*others, FINALIZER] if is_wanted else others,
            }
        }
        await self._api.merge_patch(f"{self._clusters}/{metadata['name']}", body)

    async def _find(self, path: str) -> Resource | None:
        try:
            return await self._api.get(path)
        except KubeError as error:
            if error.status != _MISSING:
                raise
            return None

    def _path(self, version: str, plural: str) -> str:
        root = f"apis/{version}" if version else "api/v1"
        return f"{root}/namespaces/{self._api.namespace}/{plural}"


def _log(name: str, action: Action) -> None:
    match action:
        case Apply(body):
            what = f"{body['kind']} {body['metadata']['name']}"
        case Delete(kind, name_of):
            what = f"{kind} {name_of}"
        case Patch(name_of):
            what = f"Deployment {name_of}"
        case Finalize(is_wanted):
            what = "is held" if is_wanted else "is let go"
    log.info(
        "operator.acted",
        cluster=name,
        action=type(action).__name__.lower(),
        what=what,
        reason=action.reason,
    )
