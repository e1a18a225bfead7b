"""The configuration file of each kind of pod, from a cluster's spec. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from services.common.config import IsthmusConfig
from services.operator.cluster import ClusterSpec, VolumeType, fault_lines
from services.operator.observed import AUTOSCALER, DECODE, PREFILL, ROUTER, SERVING

SECRETS = "/etc/isthmus-secrets"
MODELS = "/models"
DOOR_HOSTS = ("grpc_host", "http_host", "metrics_host")
_SOME_HOST = "192.0.2.1"  # of documentation; any that is not loopback

# Any: sections of settings, nested mappings of whatever they hold.
Settings = dict[str, Any]

# What both ends of a handoff have to agree on besides the weights.
_KV_FORM = (("worker", "dtype"), ("transfer", "wire_dtype"))


def configuration(spec: ClusterSpec, component: str) -> Settings:
    """Return isthmus.yaml of a component; nothing in it is secret."""
    own = {ROUTER: _router, PREFILL: _worker, DECODE: _worker}.get(component)
    settings = _common(spec)
    if own is not None:
        settings = merged(settings, own(spec, component))
    pods = {ROUTER: spec.router, PREFILL: spec.pools.prefill, DECODE: spec.pools.decode}
    given = pods[component].config if component in pods else {}
    return merged(merged(settings, spec.config), given)


def kv_form(spec: ClusterSpec) -> list[str]:
    """Return what workers of two revisions could differ in, so that no KV could pass."""
    told = (configuration(spec, component) for component in (PREFILL, DECODE))
    return [str(one.get(part, {}).get(key, "")) for one in told for part, key in _KV_FORM]


def configuration_faults(spec: ClusterSpec) -> Iterator[str]:
    """Judge the file of every component by the model of all settings."""
    for component in (*SERVING, AUTOSCALER):
        settings = configuration(spec, component)
        # The pod's own address comes from the environment.
        if component in (PREFILL, DECODE):
            settings = merged(settings, {"worker": {"bind_host": _SOME_HOST}})
        elif component == ROUTER and not spec.router.bind_host:
            settings = merged(settings, {"router": dict.fromkeys(DOOR_HOSTS, _SOME_HOST)})
        try:
            IsthmusConfig.model_validate_json(json.dumps(settings), strict=True)
        except ValidationError as error:
            yield from fault_lines(f"isthmus.yaml of {component}: ", error)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Lay mappings over one another; anything else is replaced."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = merged(old, value) if both else value  # type: ignore[arg-type]  # both are
    return found


def _common(spec: ClusterSpec) -> Settings:
    model = {
        "name": spec.model.name,
        "served_name": spec.model.served_name,
        "max_model_len": spec.model.max_model_len,
        "weights_digest": spec.model.weights_digest,
    }
    if spec.model.volume.type is not VolumeType.NONE:
        model["cache_dir"] = MODELS
    auth = {
        "allow_unauthenticated": spec.auth.allow_unauthenticated,
        "allow_plaintext": spec.auth.allow_plaintext,
    }
    settings: Settings = {"model": {k: v for k, v in model.items() if v}, "auth": auth}
    if spec.redis.ca_key:
        settings["store"] = {"ca_file": f"{SECRETS}/store/ca.crt"}
    if spec.tls.router_secret:
        at = f"{SECRETS}/cluster"
        settings["tls"] = {
            "cluster_cert_file": f"{at}/tls.crt",
            "cluster_key_file": f"{at}/tls.key",
            "cluster_ca_file": f"{at}/ca.crt",
        }
    return settings


def _router(spec: ClusterSpec, _component: str) -> Settings:
    pods = spec.router
    settings: Settings = {
        "router": {
            "grpc_port": pods.grpc_port,
            "http_port": pods.http_port,
            "metrics_port": pods.metrics_port,
            "drain_s": pods.drain_seconds,
        },
        "auth": {},
    }
    if pods.bind_host:
        settings["router"] |= dict.fromkeys(DOOR_HOSTS, pods.bind_host)
    if spec.auth.existing_secret:
        settings["auth"]["keys_file"] = f"{SECRETS}/keys"
        settings["auth"]["tenant_secret_file"] = f"{SECRETS}/keys/tenant.secret"
    if spec.auth.tenants_secret:
        settings["auth"]["tenants_file"] = f"{SECRETS}/tenants/tenants.yaml"
    if spec.tls.doors_secret:
        at = f"{SECRETS}/doors"
        settings["tls"] = {"cert_file": f"{at}/tls.crt", "key_file": f"{at}/tls.key"}
    return settings


def _worker(spec: ClusterSpec, component: str) -> Settings:
    pods = spec.pools.prefill if component == PREFILL else spec.pools.decode
    worker: Settings = {
        "role": component,
        "grpc_port": spec.worker_ports.grpc,
        "metrics_port": spec.worker_ports.metrics,
        "drain_s": pods.drain_seconds,
    }
    if spec.auth.metrics_token_secret:
        worker["metrics_token_file"] = f"{SECRETS}/metrics/token"
    transfer: Settings = {
        "planes": list(spec.transfer.planes),
        "wire_dtype": spec.transfer.wire_dtype,
        "allow_plaintext_kv": spec.transfer.allow_plaintext_kv,
        "zmq_port": spec.worker_ports.transfer,
    }
    if spec.transfer.existing_secret:
        transfer["curve_key_file"] = f"{SECRETS}/kv/cluster.keys"
    return {"worker": worker, "transfer": transfer}
