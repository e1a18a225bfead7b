"""Other clients: the official one for Python, and kopf, which operators are made with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import kubernetes
import pytest
from kubernetes.client.exceptions import ApiException

from tests.fakekube.kube import FakeKube, Fault
from tests.fakekube.programs import Programs
from tests.fakekube.small import CRD

pytestmark = pytest.mark.integration
CLIENT: Any = kubernetes  # has no types


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for what others in this loop do."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.02)


def make_client(programs: Programs) -> Any:
    """The official client."""
    return CLIENT.config.new_client_from_config(str(programs.kubeconfig))


async def test_the_official_client_changes_lists_and_watches(
    kube: FakeKube, programs: Programs
) -> None:
    def use() -> list[tuple[str, str]]:
        with make_client(programs) as client:
            core = CLIENT.client.CoreV1Api(client)
            first = CLIENT.client.V1ConfigMap(
                metadata=CLIENT.client.V1ObjectMeta(name="one", labels={"a": "b"}),
                data={"x": "1"},
            )
            made = core.create_namespaced_config_map("default", first)
            core.patch_namespaced_config_map("one", "default", {"data": {"y": "2"}})
            made.data = {"x": "3"}
            with pytest.raises(ApiException) as refused:
                core.replace_namespaced_config_map("one", "default", made)
            assert refused.value.status == 409
            listed = core.list_namespaced_config_map("default", label_selector="a=b")
            assert [item.data for item in listed.items] == [{"x": "1", "y": "2"}]
            core.delete_namespaced_config_map("one", "default")
            watch = CLIENT.watch.Watch()
            events = watch.stream(
                core.list_namespaced_config_map,
                "default",
                resource_version=made.metadata.resource_version,
                timeout_seconds=1,
            )
            return [(event["type"], event["object"].metadata.name) for event in events]

    assert await asyncio.to_thread(use) == [("MODIFIED", "one"), ("DELETED", "one")]


async def test_a_watch_from_a_forgotten_version_says_so(kube: FakeKube, programs: Programs) -> None:
    version = kube.add("v1", "ConfigMap", "one", "default")["metadata"]["resourceVersion"]
    kube.store.forget_history()

    def use() -> None:
        with make_client(programs) as client:
            core = CLIENT.client.CoreV1Api(client)
            stream = CLIENT.watch.Watch().stream(
                core.list_namespaced_config_map,
                "default",
                resource_version=version,
                timeout_seconds=30,
            )
            with pytest.raises(ApiException) as refused:
                list(stream)
            assert refused.value.status == 410

    await asyncio.to_thread(use)


@asynccontextmanager
async def operating(
    kube: FakeKube, registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings
) -> AsyncIterator[None]:
    """Run an operator in this loop."""

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=kube.url, ca_path=str(kube.ca_file), token=kube.admin_token
        )

    stop = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=settings,
            namespaces=["default"],
            stop_flag=stop,
            standalone=True,
        )
    )
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(running, 60)


async def test_kopf_handles_objects_through_dropped_watches_and_conflicts(
    kube: FakeKube, programs: Programs
) -> None:
    await programs.kubectl("apply", "-f", "-", stdin=CRD)
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.networking.error_backoffs = [0.01] * 5
    settings.watching.reconnect_backoff = 0.01

    @kopf.on.create("toys", registry=registry)
    def created(spec: kopf.Spec, patch: kopf.Patch, **_: Any) -> None:
        patch.status["seen"] = spec["colour"]

    def seen(name: str) -> bool:
        toy = kube.find("toys.example.dev", name)
        return toy is not None and toy.get("status", {}).get("seen") == "green"

    async with operating(kube, registry, settings):
        toy = {"apiVersion": "example.dev/v1", "kind": "Toy", "spec": {"colour": "green"}}
        kube.post({**toy, "metadata": {"name": "one", "namespace": "default"}})
        await until(lambda: seen("one"))
        kube.watches.drop_all()
        kube.faults.append(Fault(status=429, verb="patch", retry_after_s=0))
        kube.post({**toy, "metadata": {"name": "two", "namespace": "default"}})
        await until(lambda: seen("two"))
    assert not any(fault.times for fault in kube.faults)
