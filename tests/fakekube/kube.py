"""A stand-in for a Kubernetes API server and its controllers, in one process on loopback.

It keeps the rules that Kubernetes documents as far as charts, operators and drivers of this project
meet them: optimistic concurrency, watches, patches, field ownership, access rules, finalizers and
owners, rolling updates. It shows nothing about a real cluster but that those rules are kept. There
is no scheduler beside one node, no network, no image is pulled and no container runs; admission
webhooks, CEL rules, conversion and quotas are missing. With KUBECONFIG set, those tests that only
use helm and kubectl run on the cluster that it names.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.clock import Clock, ManualClock, SystemClock
from tests.fakekube.access import ADMIN, Access, Call, service_account
from tests.fakekube.api import NAMESPACES, PODS, Api, Options, Target
from tests.fakekube.collector import Collector
from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import CRD, Kind, Kinds, Resource
from tests.fakekube.pods import NODE, Pods
from tests.fakekube.store import Change, Store
from tests.fakekube.watches import Watches
from tests.fakekube.workloads import Workloads

_MAX_STEPS = 500  # until everything is at rest
_ACCOUNTS = ("", "serviceaccounts")


@dataclass
class Fault:
    """What is done to calls instead of answering them, so many times."""

    status: int = 0  # 0 = they are answered, only late
    times: int = 1
    verb: str = "*"
    resource: str = "*"
    user: str = "*"
    delay_s: float = 0.0
    retry_after_s: int = 1  # of 429

    def matches(self, call: Call) -> bool:
        """Whether it is meant for a call."""
        return (
            self.times > 0
            and self.verb in ("*", call.verb)
            and self.resource in ("*", call.resource)
            and self.user in ("*", call.user)
        )


class FakeKube:
    """Everything but HTTP. Belongs to the event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.store = Store(self.clock)
        self.kinds = Kinds()
        self.api = Api(self.store, self.kinds, self.clock)
        self.access = Access(self.store)
        self.watches = Watches(self.store)
        self.pods = Pods(self.store, self._kind(PODS), self.clock)
        self.faults: list[Fault] = []
        self.is_controlled = True  # False = no controller does anything
        self.admin_token = secrets.token_hex(16)
        self.url = ""
        self.ca_file = Path()
        self._tokens = {self.admin_token: ADMIN}
        self._workloads = Workloads(self.store, self.kinds, self.api, self.clock)
        self._collector = Collector(self.store, self.kinds, self.api)
        self._is_dirty = False
        self._next_due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.store.listen(self._changed)
        for name in ("default", "kube-system"):
            self.add("v1", "Namespace", name)
        self.add("v1", "Node", NODE)

    def add(
        self, api_version: str, kind: str, name: str, namespace: str = "", **fields: object
    ) -> Resource:
        """Have an object, as an administrator makes it."""
        meta = {"name": name, **({"namespace": namespace} if namespace else {})}
        return self.post({"apiVersion": api_version, "kind": kind, "metadata": meta, **fields})

    def post(self, body: Resource) -> Resource:
        """The same, of a whole object."""
        kind = self.kinds.by_name(body["apiVersion"], body["kind"])
        assert kind is not None, body["kind"]
        target = Target(kind, body["metadata"].get("namespace", ""))
        return self.api.create(target, body, Options("test", validation="Strict"))

    def find(self, plural: str, name: str, namespace: str = "default") -> Resource | None:
        """Look at an object; `plural` with its group where it has one: deployments.apps."""
        kind = self._named(plural)
        return self.store.find(kind.key, namespace if kind.is_namespaced else "", name)

    def see(self, plural: str, name: str, namespace: str = "default") -> Resource:
        """The same, of one that is there."""
        kind = self._named(plural)
        return self.store.get(kind, namespace if kind.is_namespaced else "", name)

    def all(self, plural: str, namespace: str | None = "default") -> list[Resource]:
        """Look at all objects of a kind, of one namespace or (None) of all."""
        kind = self._named(plural)
        return self.store.all_of(kind.key, namespace if kind.is_namespaced else None)

    def token_of(self, namespace: str, account: str) -> str:
        """Return a token that this service account shows."""
        token = secrets.token_hex(16)
        self._tokens[token] = service_account(namespace, account)
        return token

    def user_of(self, headers: Mapping[str, str]) -> str:
        """Say who calls; ApiError if nobody known. A service account has to be there."""
        sort, _, token = headers.get("Authorization", "").partition(" ")
        user = self._tokens.get(token) if sort == "Bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized")
        if user != ADMIN:
            *_, space, name = user.split(":")
            if self.store.find(_ACCOUNTS, space, name) is None:
                raise ApiError(401, "Unauthorized")
            return user
        return headers.get("Impersonate-User", user)

    def fault_for(self, call: Call) -> Fault | None:
        """Return what is to be done to a call, once."""
        fault = next((fault for fault in self.faults if fault.matches(call)), None)
        if fault is not None:
            fault.times -= 1
        return fault

    def settle(self) -> None:
        """Have controllers act until nothing changes any more."""
        self._is_dirty = False
        if not self.is_controlled:
            return
        for _ in range(_MAX_STEPS):
            version = self.store.version
            dues = [self._workloads.step(), self.pods.step()]
            self._collector.step()
            if self.store.version == version:
                self._is_dirty = False
                self._wake_at(min((due for due in dues if due is not None), default=None))
                return
        raise AssertionError("controllers do not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, of a clock that is moved by hand; controllers act whenever they would."""
        clock = self.clock
        assert isinstance(clock, ManualClock)
        end = clock.now() + seconds
        self.settle()
        while (due := self._next_due) is not None and due <= end:
            clock.advance(max(0.0, due - clock.now()))
            self.settle()
        clock.advance(end - clock.now())
        self.settle()

    def close(self) -> None:
        """End all watches."""
        self.is_controlled = False
        if self._timer is not None:
            self._timer.cancel()
        self.watches.drop_all()

    def _wake_at(self, due: float | None) -> None:
        self._next_due = due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and not isinstance(self.clock, ManualClock):
            loop = asyncio.get_running_loop()
            # A little later, so that the time has surely come by their clock.
            self._timer = loop.call_later(max(0.0, due - self.clock.now()) + 0.001, self.settle)

    def _changed(self, change: Change) -> None:
        if change.key == CRD:
            if change.what == "DELETED":
                self.kinds.remove_crd(change.now["metadata"]["name"])
            else:
                self.kinds.add_crd(change.now)
        if change.key == NAMESPACES and change.what == "ADDED":
            self.add("v1", "ServiceAccount", "default", change.now["metadata"]["name"])
        if not self._is_dirty:
            self._is_dirty = True
            with suppress(RuntimeError):  # outside a loop, whoever calls settles
                asyncio.get_running_loop().call_soon(self._settle_soon)

    def _settle_soon(self) -> None:
        if self._is_dirty:
            self.settle()

    def _kind(self, key: tuple[str, str]) -> Kind:
        found = self.kinds.of(key)
        assert found is not None
        return found

    def _named(self, plural: str) -> Kind:
        name, _, group = plural.partition(".")
        return self._kind((group, name))
