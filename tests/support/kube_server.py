"""A stand-in for a Kubernetes API server: scales, pods, ray clusters, and who ends which pod.

It has what drivers ask for and no more, and shows nothing about a real cluster but that its rules,
as Kubernetes documents them, are kept.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

NAMESPACE = "serving"
CREATED = "2026-11-30T08:00:00Z"
READY_AT = "2026-11-30T08:03:00Z"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass
class Deployment:
    """Size and labels."""

    replicas: int
    selector: str
    version: int = 1


@dataclass
class KubeServer:
    """What there is; tests change it by hand."""

    deployments: dict[str, Deployment] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    ray_clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_acting: bool = True  # whether sizes are acted on at once
    conflicts: int = 0  # of the next changes of a size
    refuse_with: int = 0  # every call
    page: int = 500
    changes: list[str] = field(default_factory=list)  # every call that is no read
    tokens: list[str] = field(default_factory=list)  # that callers showed
    url: str = ""
    _count: int = 0

    def deploy(self, name: str, replicas: int) -> None:
        """Have a Deployment with so many pods that serve."""
        self.deployments[name] = Deployment(replicas, f"pool={name}")
        for _ in range(replicas):
            self.add_pod(name)

    def add_pod(
        self, deployment: str, *, ready: bool = True, node: bool = True, **more: str
    ) -> str:
        """Have one more pod."""
        self._count += 1
        name = f"{deployment}-{self._count}"
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": READY_AT}
        self.pods[name] = {
            "metadata": {
                "name": name,
                "labels": {"pool": deployment, "pod-template-hash": more.get("template", "a")},
                "annotations": {},
                "creationTimestamp": CREATED,
            },
            "spec": {"nodeName": "node-1"} if node else {},
            "status": {
                "phase": more.get("phase", "Running" if node else "Pending"),
                "podIP": f"10.0.0.{self._count}" if node else "",
                "conditions": [condition],
            },
        }
        return name

    def annotations(self, pod: str) -> dict[str, str]:
        """What is noted on a pod."""
        found: dict[str, str] = self.pods[pod]["metadata"]["annotations"]
        return found

    def terminate(self, pod: str) -> None:
        """Begin to end a pod."""
        self.pods[pod]["metadata"] |= {
            "deletionTimestamp": "2026-11-30T08:11:00Z",
            "deletionGracePeriodSeconds": 60,
        }

    def act(self) -> None:
        """Make as many pods of each Deployment as it wants, ending them by the documented order."""
        for name, deployment in self.deployments.items():
            mine = [p for p in self.pods.values() if p["metadata"]["labels"]["pool"] == name]
            alive = [p for p in mine if "deletionTimestamp" not in p["metadata"]]
            for _ in range(deployment.replicas - len(alive)):
                self.add_pod(name, ready=False)
            alive.sort(key=_goes_first)
            for pod in alive[: max(0, len(alive) - deployment.replicas)]:
                self.terminate(pod["metadata"]["name"])

    async def scale(self, request: web.Request) -> web.Response:
        """GET and PUT of a Deployment's scale."""
        deployment = self.deployments.get(request.match_info["name"])
        if deployment is None:
            return _refused(404, "not found")
        if request.method == "PUT":
            body = await request.json()
            version = body["metadata"]["resourceVersion"]
            if self.conflicts:
                self.conflicts -= 1
                deployment.version += 1
            if version != str(deployment.version):
                return _refused(409, "the object has been modified")
            deployment.replicas = body["spec"]["replicas"]
            deployment.version += 1
            if self.is_acting:
                self.act()
        return web.json_response(
            {
                "metadata": {
                    "name": request.match_info["name"],
                    "resourceVersion": str(deployment.version),
                },
                "spec": {"replicas": deployment.replicas},
                "status": {"selector": deployment.selector, "replicas": 0},
            }
        )

    async def list_pods(self, request: web.Request) -> web.Response:
        """Pods with labels, in pages."""
        wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        found = [p for p in self.pods.values() if wanted.items() <= p["metadata"]["labels"].items()]
        start = int(request.query.get("continue", "0"))
        end = start + min(self.page, int(request.query["limit"]))
        more = {"continue": str(end)} if end < len(found) else {}
        return web.json_response({"metadata": more, "items": found[start:end]})

    async def patch_pod(self, request: web.Request) -> web.Response:
        """Merge annotations."""
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _refused(404, "not found")
        assert request.content_type == "application/merge-patch+json"
        body = await request.json()
        assert set(body) == {"metadata"}
        assert set(body["metadata"]) == {"annotations"}
        pod["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return web.json_response(pod)

    async def ray_cluster(self, request: web.Request) -> web.Response:
        """GET and PATCH of a RayCluster."""
        cluster = self.ray_clusters.get(request.match_info["name"])
        if cluster is None:
            return _refused(404, "not found")
        if request.method == "PATCH":
            assert request.content_type == "application/merge-patch+json"
            body = await request.json()
            version = cluster["metadata"]["resourceVersion"]
            if self.conflicts:
                self.conflicts -= 1
                cluster["metadata"]["resourceVersion"] = version = str(int(version) + 1)
            if body["metadata"]["resourceVersion"] != version:
                return _refused(409, "the object has been modified")
            cluster["spec"] |= body["spec"]
            cluster["metadata"]["resourceVersion"] = str(int(version) + 1)
        return web.json_response(cluster)

    @web.middleware
    async def noted(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Note calls that change something."""
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.refuse_with:
            return _refused(self.refuse_with, "as the test asked for")
        answer = await handler(request)
        if request.method != "GET":
            tail = request.path.partition(f"/{NAMESPACE}/")[2]
            body = json.dumps(await request.json(), sort_keys=True)
            what = body if "pods" in tail or "ray" in tail else ""
            self.changes.append(f"{request.method} {tail} {what}".strip())
        return answer


def _goes_first(pod: dict[str, Any]) -> tuple[bool, int, bool, int]:
    cost = pod["metadata"]["annotations"].get("controller.kubernetes.io/pod-deletion-cost", "0")
    ready = pod["status"]["conditions"][0]["status"] == "True"
    phase = _PHASES[pod["status"]["phase"]]
    return ("nodeName" in pod["spec"], phase, ready, int(cost))


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=status)


@asynccontextmanager
async def kube_server() -> AsyncIterator[KubeServer]:
    """Serve on loopback."""
    server = KubeServer()
    app = web.Application(middlewares=[server.noted])
    space = f"namespaces/{NAMESPACE}"
    scale = f"/apis/apps/v1/{space}/deployments/{{name}}/scale"
    ray = f"/apis/ray.io/v1/{space}/rayclusters/{{name}}"
    app.router.add_get(scale, server.scale)
    app.router.add_put(scale, server.scale)
    app.router.add_get(f"/api/v1/{space}/pods", server.list_pods)
    app.router.add_patch(f"/api/v1/{space}/pods/{{name}}", server.patch_pod)
    app.router.add_get(ray, server.ray_cluster)
    app.router.add_patch(ray, server.ray_cluster)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
