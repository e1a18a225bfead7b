"""Distinct types for distinct ids, and the makers of random ones."""

from __future__ import annotations

import secrets
from typing import NewType

BlockHash = NewType("BlockHash", bytes)  # 16 bytes: SHA-256 of the chain, truncated
BlockId = NewType("BlockId", int)  # index of a block in one worker's pool
Incarnation = NewType("Incarnation", int)  # u64, one life of a process
RequestId = NewType("RequestId", str)  # cluster-wide, made by the router
WorkerId = NewType("WorkerId", str)


def new_incarnation() -> Incarnation:
    """Draw a random non-zero u64; two lives of a process never share one in practice."""
    return Incarnation(secrets.randbits(63) | 1)


def new_request_id() -> RequestId:
    """Draw a cluster-wide request id."""
    return RequestId(f"req-{secrets.token_hex(16)}")
