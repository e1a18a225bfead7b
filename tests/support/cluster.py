"""The cluster tests start: the real `isthmus up` with its real processes."""

from __future__ import annotations

from services.bench.local_cluster import ClusterFailed, LocalCluster

Cluster = LocalCluster

__all__ = ["Cluster", "ClusterFailed"]
