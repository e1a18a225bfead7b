"""Whether what is there is what was last applied. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from services.operator.observed import Resource

APPLIED = "isthmus.dev/applied"
# The API server writes quantities its own way: 1000m becomes 1.
_QUANTITIES = ("resources", "sizeLimit")


def digest_of(value: object, num_chars: int = 16) -> str:
    """Return how the SHA-256 of a value's JSON begins."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:num_chars]


def stamped(resource: Resource) -> Resource:
    """Note in a resource what it was made as: what is left out later cannot be seen otherwise."""
    metadata = resource["metadata"]
    notes = {**metadata.get("annotations", {}), APPLIED: digest_of(resource)}
    return {**resource, "metadata": {**metadata, "annotations": notes}}


def has_drifted(wanted: Resource, seen: Resource | None) -> bool:
    """Say whether a stamped resource has to be applied (again)."""
    return seen is None or not _holds(seen, wanted)


def _holds(seen: object, wanted: object) -> bool:
    """Everything wanted is there; what the API server adds as defaults may be there as well."""
    if isinstance(wanted, Mapping):
        return isinstance(seen, Mapping) and all(
            key in _QUANTITIES or _holds(seen.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(seen, list)
            and len(seen) == len(wanted)
            and all(_holds(s, w) for s, w in zip(seen, wanted, strict=True))
        ) or (not wanted and seen is None)
    return seen == wanted or (not wanted and seen is None)
