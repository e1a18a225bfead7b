"""What tells that a cluster should be looked at: watches, kept up by kopf.

kopf is asked for nothing else: its handlers only note names. What is done follows from what is
there when a cluster's turn comes, so a dropped watch costs time and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import kopf

from services.autoscaler import policy
from services.autoscaler.policy_schema import PLURAL as POLICIES
from services.operator import cluster
from services.operator.policies import cluster_named
from services.operator.resources import INSTANCE_LABEL, MANAGER
from services.operator.schedule import Key

Mark = Callable[[Key], None]
Login = Callable[[], kopf.ConnectionInfo]
_T = TypeVar("_T")
_GOODBYE_S = 0.5  # connections that are closed say so to the other end before their loop is gone


async def watch(
    mark: Mark, login: Login | None, namespace: str | None, stop: threading.Event
) -> None:
    """Watch until told to stop. `namespace` None = all; `login` None = our pod's account.

    kopf has a thread and a loop of its own: in the main thread it takes the signals of the process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Exception | None] = loop.create_future()

    def tell(fault: Exception | None) -> None:
        if not ended.done():
            ended.set_result(fault)

    def run() -> None:
        fault = None
        try:
            asyncio.run(_kopf(lambda key: _told(loop, mark, key), login, namespace, stop))
        except Exception as error:  # the outermost frame of a thread: whoever waits is told
            fault = error
        _told(loop, tell, fault)

    threading.Thread(target=run, name="watches", daemon=True).start()
    fault = await ended
    if fault is not None:
        raise fault


def _told(loop: asyncio.AbstractEventLoop, tell: Callable[[_T], None], what: _T) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
        loop.call_soon_threadsafe(tell, what)


async def _kopf(
    mark: Mark, login: Login | None, namespace: str | None, stop: threading.Event
) -> None:
    # Its warnings are of watches that are begun again, and of signals that it does not get.
    logging.getLogger("kopf").setLevel(logging.ERROR)
    registry = kopf.OperatorRegistry()
    _handle(registry, mark)
    if login is None:
        kopf.on.login(registry=registry)(kopf.login_with_service_account)
    else:
        kopf.on.login(registry=registry)(lambda **_: login())
    await kopf.operator(
        registry=registry,
        settings=_settings(),
        standalone=True,  # our own Lease says who leads
        clusterwide=namespace is None,
        namespaces=[] if namespace is None else [namespace],
        stop_flag=stop,
    )
    await asyncio.sleep(_GOODBYE_S)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    settings.posting.enabled = False  # conditions tell it
    settings.scanning.disabled = True  # kinds do not come and go while we run
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 300
    settings.networking.request_timeout = 10
    return settings


# Any: kopf passes what the API server told.
def _handle(registry: kopf.OperatorRegistry, mark: Mark) -> None:
    @kopf.on.event(cluster.API_VERSION, cluster.PLURAL, registry=registry)
    def on_cluster(name: str | None, namespace: str | None, **_: Any) -> None:
        mark(Key(namespace or "", name or ""))

    @kopf.on.event(policy.API_VERSION, POLICIES, registry=registry)
    def on_policy(body: kopf.Body, namespace: str | None, **_: Any) -> None:
        named = cluster_named(dict(body))
        if named:
            mark(Key(namespace or "", named))

    labels = {"app.kubernetes.io/managed-by": MANAGER}

    @kopf.on.event("apps/v1", "deployments", labels=labels, registry=registry)
    def on_deployment(body: kopf.Body, namespace: str | None, **_: Any) -> None:
        name = (dict(body)["metadata"].get("labels") or {}).get(INSTANCE_LABEL)
        if name:
            mark(Key(namespace or "", name))
