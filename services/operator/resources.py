"""What a cluster consists of in Kubernetes, as it is applied. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from services.operator.cluster import API_VERSION, KIND, ClusterSpec
from services.operator.configuration import configuration
from services.operator.observed import (
    AUTOSCALER,
    COMPONENT_LABEL,
    DECODE,
    PREFILL,
    REVISION_LABEL,
    ROUTER,
    SERVING,
    Policy,
    Resource,
)
from services.operator.pods import is_accelerated, pod_template, pods_of, ports_of

INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGER = "isthmus-operator"  # of what we apply, and the label of what is ours
_API_SERVER_PORTS = (443, 6443)
_API_VERSIONS = {
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The resource that everything here belongs to."""

    name: str
    uid: str


def selector_of(name: str) -> str:
    """Return the labels of everything of a cluster, as a query."""
    return f"app.kubernetes.io/managed-by={MANAGER},{INSTANCE_LABEL}={name}"


def front_name(cluster: str) -> str:
    """Name the Service of the front doors."""
    return f"{cluster}-router"


def revision_names(cluster: str, revision: str) -> list[tuple[str, str]]:
    """Name what belongs to one revision, by kind; Deployments last: they tell that it is there."""
    deployments = [("Deployment", f"{cluster}-{part}-{revision}") for part in SERVING]
    return [("ConfigMap", f"{cluster}-{revision}"), *deployments]


def autoscaler_names(cluster: str) -> list[tuple[str, str]]:
    """Name what follows a policy, by kind."""
    return [(kind, f"{cluster}-{AUTOSCALER}") for kind in ("ConfigMap", "Deployment")]


def network_policy_names(cluster: str) -> list[tuple[str, str]]:
    """Name what says who may talk to whom, by kind."""
    return [("NetworkPolicy", f"{cluster}-{part}") for part in (*SERVING, AUTOSCALER)]


def shared(owner: Owner, spec: ClusterSpec) -> list[Resource]:
    """Return what serves every revision: disruption budgets and network policies."""
    found = []
    for component in SERVING:
        body = {"maxUnavailable": 1, "selector": {"matchLabels": _selector(owner, component)}}
        name = f"{owner.name}-{component}"
        found.append(_resource(owner, "PodDisruptionBudget", name, component, spec=body))
    if spec.network_policy.enabled:
        found += (_network_policy(owner, spec, part) for part in (*SERVING, AUTOSCALER))
    return found


def front(owner: Owner, spec: ClusterSpec, revision: str) -> Resource:
    """Return the Service of the front doors; requests go to routers of the one revision."""
    is_tls = bool(spec.tls.doors_secret)
    ports = [
        _port("grpc", spec.router.grpc_port, "grpc" if is_tls else "kubernetes.io/h2c"),
        _port("http", spec.router.http_port, "https" if is_tls else "http"),
    ]
    selector = {**_selector(owner, ROUTER), REVISION_LABEL: revision}
    body: Resource = {"type": "ClusterIP", "selector": selector, "ports": ports}
    return _resource(owner, "Service", front_name(owner.name), ROUTER, spec=body)


def revision(owner: Owner, spec: ClusterSpec, name: str) -> list[Resource]:
    """Return the pods of one revision and their configuration. Sizes are not part of it."""
    config_map = f"{owner.name}-{name}"
    files = {
        f"{component}.yaml": _yaml(configuration(spec, component))
        for component in (*SERVING, AUTOSCALER)
    }
    config = _resource(owner, "ConfigMap", config_map, "", revision=name)
    deployments = []
    for component in SERVING:
        selector = {**_selector(owner, component), REVISION_LABEL: name}
        labels = dict(selector)
        if component in (PREFILL, DECODE):
            labels["isthmus.dev/pool"] = component
        body = {
            "revisionHistoryLimit": 5,
            "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
            "selector": {"matchLabels": selector},
            "strategy": _strategy(spec, component),
            "template": pod_template(spec, component, labels, config_map),
        }
        full = f"{owner.name}-{component}-{name}"
        deployments.append(
            _resource(owner, "Deployment", full, component, revision=name, spec=body)
        )
    return [{**config, "data": files}, *deployments]


def autoscaler(owner: Owner, spec: ClusterSpec, policy: Policy, active: str) -> list[Resource]:
    """Return the process that follows a policy and sizes the pools of one revision."""
    name = f"{owner.name}-{AUTOSCALER}"
    ports = ports_of(spec, AUTOSCALER)
    args = (
        "--driver", "deployment", "--host", "$(POD_IP)",
        "--grpc-port", str(ports["health"]), "--metrics-port", str(ports["metrics"]),
        *(f"--deployment={pool}={owner.name}-{part}-{active}"
          for part, pool in sorted(policy.pools.items())),
        f"--worker-port={spec.worker_ports.grpc}",
    )  # fmt: skip
    selector = _selector(owner, AUTOSCALER)
    template = pod_template(
        spec,
        AUTOSCALER,
        selector,
        f"{owner.name}-{active}",
        autoscaler_args=args,
        policy_map=name,
    )
    body = {
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "Recreate"},  # the old one knows the pools by their old names
        "template": template,
    }
    config = _resource(owner, "ConfigMap", name, AUTOSCALER)
    return [
        {**config, "data": {"policy.yaml": _yaml(policy.resource)}},
        _resource(owner, "Deployment", name, AUTOSCALER, spec=body),
    ]


def _strategy(spec: ClusterSpec, component: str) -> Resource:
    pods = pods_of(spec, component)
    if pods.strategy:
        return pods.strategy
    surge = 0 if is_accelerated(pods.resources) else 1
    numbers = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    return {"type": "RollingUpdate", "rollingUpdate": numbers}


def _network_policy(owner: Owner, spec: ClusterSpec, component: str) -> Resource:
    """Say who may talk to a component, and whom it may talk to; nobody else may."""
    rules, ports = spec.network_policy, ports_of(spec, component)
    workers = [_peer(owner, part) for part in (PREFILL, DECODE)]
    callers = [_peer(owner, part) for part in (ROUTER, AUTOSCALER)]
    doors = (list(rules.clients), ports["grpc"], ports["http"]) if component == ROUTER else None
    ingress = [_flow("from", list(rules.monitoring), ports["metrics"])]
    if doors is not None:
        ingress.append(_flow("from", *doors))
    egress = [
        _flow("to", list(spec.redis.peers), spec.redis.port),
        {
            "to": list(rules.dns),
            "ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")],
        },
    ]
    if component in (PREFILL, DECODE):
        transfer = ports["transfer"]
        ingress += [_flow("from", callers, ports["grpc"]), _flow("from", workers, transfer)]
        egress.append(_flow("to", workers, transfer))
    else:
        egress.append(_flow("to", workers, spec.worker_ports.grpc))
    if component == AUTOSCALER:
        egress.append(_flow("to", [], *_API_SERVER_PORTS))
    body = {
        "podSelector": {"matchLabels": _selector(owner, component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [*egress, *rules.extra_egress],
    }
    return _resource(owner, "NetworkPolicy", f"{owner.name}-{component}", component, spec=body)


def _flow(way: str, peers: list[Resource], *ports: int) -> Resource:
    """No peers = anybody, on these ports."""
    told = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return {way: peers, **told} if peers else told


def _peer(owner: Owner, component: str) -> Resource:
    return {"podSelector": {"matchLabels": _selector(owner, component)}}


def _selector(owner: Owner, component: str) -> dict[str, str]:
    """Labels that no change of a cluster ever changes."""
    return {
        "app.kubernetes.io/name": "isthmus",
        INSTANCE_LABEL: owner.name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": MANAGER,
    }


def _resource(
    owner: Owner, kind: str, name: str, component: str, *, revision: str = "", **more: Resource
) -> Resource:
    labels = {
        **{k: v for k, v in _selector(owner, component).items() if v},
        "app.kubernetes.io/part-of": "isthmus",
        **({REVISION_LABEL: revision} if revision else {}),
    }
    reference = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }
    return {
        "apiVersion": _API_VERSIONS.get(kind, "v1"),
        "kind": kind,
        "metadata": {"name": name, "labels": labels, "ownerReferences": [reference]},
        **more,
    }


def _port(name: str, number: int, protocol: str) -> Resource:
    return {"name": name, "port": number, "targetPort": name, "appProtocol": protocol}


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=yaml.CSafeDumper, sort_keys=True)
