"""Policies for tests of the autoscaler's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.autoscaler.policy import PoolAutoscalingPolicy
from services.autoscaler.policy_file import parse_policy

METRICS = {
    "Prefill": {"type": "QueuedTokens", "target": {"type": "AverageValue", "averageValue": "1000"}},
    "Decode": {
        "type": "KVUtilization",
        "target": {"type": "Utilization", "averageUtilization": 50},
    },
}


def make_policy(
    pools: Mapping[str, Mapping[str, Any]] | None = None, **spec: Any
) -> PoolAutoscalingPolicy:
    """Build a policy that grows at once and shrinks after twenty seconds; `pools` by name."""
    return parse_policy(policy_values(pools, **spec), "test")


def policy_values(
    pools: Mapping[str, Mapping[str, Any]] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return what the file of such a policy holds."""
    changes = pools or {}
    return {
        "apiVersion": "autoscaling.isthmus.dev/v1alpha1",
        "kind": "PoolAutoscalingPolicy",
        "metadata": {"name": "test"},
        "spec": {
            "clusterRef": {"name": "test"},
            "pools": [
                _pool("prefill", "Prefill", changes.get("prefill", {})),
                _pool("decode", "Decode", changes.get("decode", {})),
            ],
            **spec,
        },
    }


def _pool(name: str, role: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "minReplicas": 1,
        "maxReplicas": 4,
        "metrics": [METRICS[role]],
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": 20,
                "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}],
                "consolidationCheck": {"enabled": False},
            }
        },
        **changes,
    }
