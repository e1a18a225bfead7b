"""Who may do what, by the Roles in the store, and a log of who did.

The log is what shows that a Role is as small as it can be: what was called is all that is granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Resource
from tests.fakekube.store import Store

_RBAC = "rbac.authorization.k8s.io"
ADMIN = "admin"
_NO_NAME = ("create", "deletecollection")  # no name is known when these are asked for


@dataclass(frozen=True, slots=True)
class Call:
    """What somebody asks for."""

    user: str
    verb: str
    group: str
    resource: str  # with its subresource: deployments/scale
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """One verb on one resource, as a rule of a Role grants it."""

    verb: str
    group: str
    resource: str
    name: str = ""  # "" = of any name


def service_account(namespace: str, name: str) -> str:
    """The user that a service account is."""
    return f"system:serviceaccount:{namespace}:{name}"


def grants(rules: Iterable[Mapping[str, Any]]) -> set[Grant]:
    """Spell rules out."""
    return {
        Grant(verb, group, resource, name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule.get("apiGroups") or ()
        for resource in rule.get("resources") or ()
        for name in rule.get("resourceNames") or ("",)
    }


def allows(grant: Grant, call: Call) -> bool:
    """Whether a grant covers a call."""
    sub = call.resource.partition("/")[2]
    return (
        grant.verb in ("*", call.verb)
        and grant.group in ("*", call.group)
        and grant.resource in ("*", call.resource, f"*/{sub}" if sub else "*")
        and (not grant.name or (grant.name == call.name and call.verb not in _NO_NAME))
    )


def unused(rules: Iterable[Mapping[str, Any]], calls: Iterable[Call]) -> set[Grant]:
    """Return what is granted and was never called."""
    made = list(calls)
    return {grant for grant in grants(rules) if not any(allows(grant, call) for call in made)}


class Access:
    """Reads Roles and their bindings from the store, at every call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.log: list[tuple[Call, int]] = []  # with the status of the answer, 403 where refused

    def check(self, call: Call) -> None:
        """Raise ApiError if a call is not allowed."""
        if call.user == ADMIN or any(allows(grant, call) for grant in self._granted(call)):
            return
        of = f' in API group "{call.group}"'
        where = (
            f' in the namespace "{call.namespace}"' if call.namespace else " at the cluster scope"
        )
        name = f' "{call.name}"' if call.name else ""
        raise ApiError(
            403,
            f'{call.resource}{name} is forbidden: User "{call.user}" cannot {call.verb} resource'
            f' "{call.resource}"{of}{where}',
        )

    def calls_of(self, user: str) -> set[Call]:
        """Return what somebody asked for and was let do."""
        return {call for call, status in self.log if call.user == user and status != 403}

    def refused(self, user: str) -> set[Call]:
        """Return what somebody asked for in vain."""
        return {call for call, status in self.log if call.user == user and status == 403}

    def rules_of(self, user: str) -> list[Resource]:
        """Return the rules that are bound to somebody, of all Roles and ClusterRoles."""
        return [
            rule
            for binding, space in self._bindings()
            if _is_bound(binding, user)
            for rule in self._rules(binding, space)
        ]

    def _granted(self, call: Call) -> Iterator[Grant]:
        for binding, space in self._bindings():
            if space in ("", call.namespace) and _is_bound(binding, call.user):
                yield from grants(self._rules(binding, space))

    def _bindings(self) -> Iterator[tuple[Resource, str]]:
        for binding in self._store.all_of((_RBAC, "clusterrolebindings")):
            yield binding, ""
        for binding in self._store.all_of((_RBAC, "rolebindings")):
            yield binding, binding["metadata"]["namespace"]

    def _rules(self, binding: Resource, space: str) -> list[Resource]:
        ref = binding["roleRef"]
        is_cluster = ref["kind"] == "ClusterRole"
        key = (_RBAC, "clusterroles" if is_cluster else "roles")
        role = self._store.find(key, "" if is_cluster else space, ref["name"])
        # Rules for paths that are no resources are granted to everybody here.
        return [rule for rule in (role or {}).get("rules") or () if "apiGroups" in rule]


def _is_bound(binding: Resource, user: str) -> bool:
    return any(
        user == service_account(subject.get("namespace", ""), subject["name"])
        if subject["kind"] == "ServiceAccount"
        else subject["name"] == user
        for subject in binding.get("subjects") or ()
    )
