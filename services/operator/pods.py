"""The pods of a cluster: the one place that says how a component runs. Pure.

The chart renders the same pods where no operator is used; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.common.version import installed_version
from services.operator.cluster import (
    ClusterSpec,
    Image,
    PodSettings,
    Probes,
    VolumeType,
    WorkerPool,
)
from services.operator.configuration import DOOR_HOSTS, MODELS, SECRETS, configuration
from services.operator.drift import digest_of
from services.operator.observed import AUTOSCALER, PREFILL, ROUTER, Resource

USER = 10001
CONFIG_FILE = "/etc/isthmus/isthmus.yaml"
POLICY_FILE = "/etc/isthmus-policy/policy.yaml"
AUTOSCALER_PORTS = {"health": 50062, "metrics": 9400}
_REPOSITORIES = {ROUTER: "isthmus-control", AUTOSCALER: "isthmus-control"}
_PROBES = {
    "startup": {"periodSeconds": 10, "failureThreshold": 60, "timeoutSeconds": 5},
    "readiness": {"periodSeconds": 2, "failureThreshold": 2, "timeoutSeconds": 2},
    "liveness": {
        "periodSeconds": 5,
        "failureThreshold": 2,
        "timeoutSeconds": 2,
        # What is frozen would not use the pod's long grace, which is for drains.
        "terminationGracePeriodSeconds": 3,
    },
}
_POD_SECURITY: Resource = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_SECURITY: Resource = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}
_SMALL = PodSettings(drain_seconds=5)  # what is not said of an autoscaler's pod

_Actions = tuple[Resource, Resource]  # of probes: can it serve, does it make progress


@dataclass(frozen=True, slots=True)
class _Program:
    """What is particular to a component's container."""

    name: str
    args: list[str]
    ports: dict[str, int]
    env: dict[str, str]
    probes: _Actions


def pods_of(spec: ClusterSpec, component: str) -> PodSettings:
    """Return the settings of a component's pods."""
    if component == ROUTER:
        return spec.router
    if component == AUTOSCALER:
        own = spec.autoscaler
        return _SMALL.model_copy(update={"image": own.image, "resources": own.resources})
    return spec.pools.prefill if component == PREFILL else spec.pools.decode


def ports_of(spec: ClusterSpec, component: str) -> dict[str, int]:
    """Return the ports of a component, by name."""
    if component == ROUTER:
        pods = spec.router
        return {"grpc": pods.grpc_port, "http": pods.http_port, "metrics": pods.metrics_port}
    if component == AUTOSCALER:
        return dict(AUTOSCALER_PORTS)
    ports = spec.worker_ports
    return {"grpc": ports.grpc, "transfer": ports.transfer, "metrics": ports.metrics}


def pod_template(
    spec: ClusterSpec,
    component: str,
    labels: dict[str, str],
    config_map: str,
    *,
    autoscaler_args: tuple[str, ...] = (),
    policy_map: str = "",
) -> Resource:
    """Return the template of a component's pods. `autoscaler_args` are of that component only."""
    pods = pods_of(spec, component)
    program = _program(spec, component, autoscaler_args)
    files = _files(spec, component)
    notes = {
        "checksum/config": digest_of(configuration(spec, component), 64),
        "checksum/secret": digest_of([files, spec.secrets_revision], 64),
    }
    pod: Resource = {
        "automountServiceAccountToken": component == AUTOSCALER,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pods.grace_s,
        "securityContext": _POD_SECURITY,
        "containers": [_container(spec, component, pods, program, files, policy_map)],
        "volumes": _volumes(spec, component, pods, files, config_map, policy_map),
        **_placement(pods, labels),
    }
    if component == AUTOSCALER:
        pod["serviceAccountName"] = spec.autoscaler.service_account_name
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each.name} for each in spec.image_pull_secrets]
    return {"metadata": {"labels": labels, "annotations": notes}, "spec": pod}


def is_accelerated(resources: Resource) -> bool:
    """Whether a pod takes a device, which is rarely free twice."""
    return any("/" in name for name in resources.get("limits") or {})


def _program(spec: ClusterSpec, component: str, autoscaler_args: tuple[str, ...]) -> _Program:
    ports = ports_of(spec, component)
    config = ["--config", CONFIG_FILE]
    if component == ROUTER:
        scheme = "HTTPS" if spec.tls.doors_secret else "HTTP"
        live, ready = (
            {"httpGet": {"path": path, "port": "http", "scheme": scheme}}
            for path in ("/health", "/ready")
        )
        env = {"ISTHMUS_ROUTER__ROUTER_ID": "$(POD_NAME)"}
        if not spec.router.bind_host:
            env |= {f"ISTHMUS_ROUTER__{key.upper()}": "$(POD_IP)" for key in DOOR_HOSTS}
        return _Program("router", config, ports, env, (ready, live))
    if component == AUTOSCALER:
        args = [*config, "--policy", POLICY_FILE, *autoscaler_args]
        health: Resource = {"grpc": {"port": ports["health"]}}
        return _Program("autoscaler", args, ports, {}, (health, health))
    env = {"ISTHMUS_WORKER__WORKER_ID": "$(POD_NAME)", "ISTHMUS_WORKER__BIND_HOST": "$(POD_IP)"}
    probes = _worker_probes(spec)
    return _Program("worker", ["--role", component, *config], ports, env, probes)


def _worker_probes(spec: ClusterSpec) -> _Actions:
    ports = spec.worker_ports
    if spec.tls.worker_secret:  # kubelet's gRPC probes speak no TLS; /metrics is plain HTTP
        return _page("/ready"), _page("/live")
    return _health(ports.grpc, "readiness"), _health(ports.grpc, "liveness")


def _page(path: str) -> Resource:
    return {"httpGet": {"path": path, "port": "metrics"}}


def _health(port: int, service: str) -> Resource:
    return {"grpc": {"port": port, "service": service}}


def _container(
    spec: ClusterSpec,
    component: str,
    pods: PodSettings,
    program: _Program,
    files: dict[str, Resource],
    policy_map: str,
) -> Resource:
    ready, live = program.probes
    # The router's start is over when it runs: without workers it is not ready, and not broken.
    starts = live if component == ROUTER else ready
    container: Resource = {
        "name": program.name,
        "image": image_name(pods.image, _REPOSITORIES.get(component, "isthmus")),
        "imagePullPolicy": pods.image.pull_policy.value,
        "command": ["isthmus", program.name],
        "args": program.args,
        "ports": [{"name": name, "containerPort": port} for name, port in program.ports.items()],
        "env": [*_env(spec), *_plain(program.env), *pods.extra_env],
        "startupProbe": _probe("startup", starts, pods.probes),
        "readinessProbe": _probe("readiness", ready, pods.probes),
        "livenessProbe": _probe("liveness", live, pods.probes),
        "resources": pods.resources,
        "securityContext": _SECURITY,
        "volumeMounts": _mounts(spec, pods, files, policy_map),
    }
    if pods.pre_stop_seconds:
        # Kubernetes' own `sleep` action came after 1.29.
        command = ["sleep", str(pods.pre_stop_seconds)]
        container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    return container


def image_name(image: Image, repository: str) -> str:
    """Write an image's reference."""
    name = "/".join(filter(None, (image.registry, image.repository or repository)))
    if image.digest:
        return f"{name}@{image.digest}"
    return f"{name}:{image.tag or installed_version()}"


def _probe(kind: str, action: Resource, numbers: Probes) -> Resource:
    return {**_PROBES[kind], **getattr(numbers, kind), **action}


def _env(spec: ClusterSpec) -> list[Resource]:
    redis = spec.redis
    env: list[Resource] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *_plain({"HOME": "/tmp", "XDG_RUNTIME_DIR": "/run/isthmus"}),
    ]
    if not redis.existing_secret:
        return env + _plain({"ISTHMUS_STORE__URL": redis.url})
    own: Resource = {"name": redis.existing_secret, "key": redis.url_key}
    env.append({"name": "ISTHMUS_STORE__URL", "valueFrom": {"secretKeyRef": own}})
    if redis.loader_url_key:
        loader = {"name": redis.existing_secret, "key": redis.loader_url_key, "optional": True}
        env.append({"name": "ISTHMUS_STORE__LOADER_URL", "valueFrom": {"secretKeyRef": loader}})
    return env


def _plain(variables: dict[str, str]) -> list[Resource]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _files(spec: ClusterSpec, component: str) -> dict[str, Resource]:
    """Return the secrets of a component, by the name of their volume."""
    auth, tls = spec.auth, spec.tls
    is_worker = component not in (ROUTER, AUTOSCALER)
    names: dict[str, str] = {}
    if component == ROUTER:
        names = {
            "keys": auth.existing_secret,
            "tenants": auth.tenants_secret,
            "doors": tls.doors_secret,
        }
    names["cluster"] = tls.worker_secret if is_worker else tls.router_secret
    if is_worker:
        names["kv"] = spec.transfer.existing_secret
        names["metrics"] = auth.metrics_token_secret
    files: dict[str, Resource] = {
        name: {"secretName": secret, "defaultMode": 0o440}
        for name, secret in names.items()
        if secret
    }
    if spec.redis.ca_key:
        items = [{"key": spec.redis.ca_key, "path": "ca.crt"}]
        name = spec.redis.existing_secret
        files["store"] = {"secretName": name, "defaultMode": 0o440, "items": items}
    return files


def _volumes(
    spec: ClusterSpec,
    component: str,
    pods: PodSettings,
    files: dict[str, Resource],
    config_map: str,
    policy_map: str,
) -> list[Resource]:
    items = [{"key": f"{component}.yaml", "path": "isthmus.yaml"}]
    volumes: list[Resource] = [
        {"name": "config", "configMap": {"name": config_map, "items": items}},
        {"name": "tmp", "emptyDir": {"sizeLimit": pods.tmp_size}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]
    if isinstance(pods, WorkerPool):
        volumes.append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shm_size}}
        )
    volumes += _model_volume(spec)
    if policy_map:
        volumes.append({"name": "policy", "configMap": {"name": policy_map}})
    return [*volumes, *({"name": name, "secret": secret} for name, secret in files.items())]


def _model_volume(spec: ClusterSpec) -> list[Resource]:
    volume = spec.model.volume
    kinds: dict[VolumeType, Resource] = {
        VolumeType.EMPTY_DIR: {"emptyDir": {"sizeLimit": volume.size}},
        VolumeType.EXISTING_CLAIM: {
            "persistentVolumeClaim": {
                "claimName": volume.existing_claim,
                "readOnly": volume.read_only,
            }
        },
        VolumeType.IMAGE: {
            "image": {"reference": volume.image_reference, "pullPolicy": "IfNotPresent"}
        },
    }
    return [{"name": "models", **kinds[volume.type]}] if volume.type in kinds else []


def _mounts(
    spec: ClusterSpec, pods: PodSettings, files: dict[str, Resource], policy_map: str
) -> list[Resource]:
    mounts: list[Resource] = [
        {"name": "config", "mountPath": "/etc/isthmus", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "run", "mountPath": "/run/isthmus"},
    ]
    if isinstance(pods, WorkerPool):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    kind = spec.model.volume.type
    if kind is not VolumeType.NONE:
        is_fixed = spec.model.volume.read_only and kind is not VolumeType.EMPTY_DIR
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": is_fixed})
    if policy_map:
        mounts.append({"name": "policy", "mountPath": "/etc/isthmus-policy", "readOnly": True})
    mounts += ({"name": name, "mountPath": f"{SECRETS}/{name}", "readOnly": True} for name in files)
    return mounts


def _placement(pods: PodSettings, labels: dict[str, str]) -> dict[str, Any]:
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]
    found = {
        "nodeSelector": pods.node_selector,
        "tolerations": list(pods.tolerations),
        "affinity": pods.affinity,
        "priorityClassName": pods.priority_class_name,
        "runtimeClassName": pods.runtime_class_name,
        "topologySpreadConstraints": spread if pods.spread_over_nodes else [],
    }
    return {key: value for key, value in found.items() if value}
