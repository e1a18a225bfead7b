"""Policies that name a cluster, as its operator uses them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.autoscaler.policy import API_VERSION, KIND, Role
from services.autoscaler.policy_file import parse_policy
from services.common.errors import ConfigError
from services.operator.observed import DECODE, PREFILL, Policy, Resource

_COMPONENTS = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}


def cluster_named(policy: Resource) -> str:
    """Return the cluster that a policy names; "" = none."""
    return str(((policy.get("spec") or {}).get("clusterRef") or {}).get("name") or "")


def policies_of(cluster: str, resources: Sequence[Resource]) -> tuple[Policy, ...]:
    """Return those that name a cluster; only the oldest is followed."""
    named = [r for r in resources if cluster_named(r) == cluster]
    named.sort(key=lambda r: (r["metadata"].get("creationTimestamp", ""), r["metadata"]["name"]))
    found = [_read(resource) for resource in named]
    for i, policy in enumerate(found[1:], 1):
        fault = policy.fault or f"{found[0].name} names the cluster as well, and is older"
        found[i] = Policy(policy.name, policy.resource, fault=fault)
    return tuple(found)


def _read(resource: Resource) -> Policy:
    metadata = resource["metadata"]
    name = str(metadata["name"])
    # What Kubernetes itself notes of it is no part of the file.
    file = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": metadata.get("namespace") or "default"},
        "spec": resource.get("spec") or {},
    }
    try:
        spec = parse_policy(file, name).spec
    except ConfigError as error:
        return Policy(name, file, fault="; ".join(str(error).splitlines()))
    sizes, pools = {}, {}
    for pool in spec.pools:
        component = _COMPONENTS[pool.role]
        first = pool.min_replicas if pool.initial_replicas is None else pool.initial_replicas
        pools[component], sizes[component] = pool.name, first
    return Policy(name, file, sizes, pools)
