"""The cluster as a router sees it now, from the store's records and its own Links. Pure.

A Link is the better witness: it shows a killed worker in milliseconds and a frozen one in two
seconds, and it goes on while the store is down. The store is for finding workers and prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from services.common.ids import Incarnation, WorkerId
from services.common.light_value import light_value
from services.common.model_manifest import ModelManifest
from services.kv.hashing import HASH_SCHEME
from services.kv.layout import first_mismatch
from services.registry.base import LoadReport, WorkerInfo, WorkerRecord
from services.registry.cost import Booked

LIVE, DRAINING, SUSPECT, INCOMPATIBLE, GONE = (
    "live", "draining", "suspect", "incompatible", "gone",
)  # fmt: skip
# A lease that runs out changes what is said of a worker without a Link; of another only its age.
_JUDGED_FOR_S, _LINKED_FOR_S = 0.02, 0.25
_NOT_BOOKED = Booked()


class LinkStatus(Enum):
    """What a Link is doing."""

    CONNECTING = "connecting"
    UP = "up"
    LAGGING = "lagging"  # up, but the worker has been silent for a while
    DOWN = "down"


@light_value
class LinkState:
    """One Link as the view needs it. `info` is what the worker registered with."""

    info: WorkerInfo
    status: LinkStatus
    since: float
    incarnation: Incarnation | None = None  # of the last Welcome
    slot_gen: int = 0
    is_draining: bool = False
    load: LoadReport | None = None
    load_at: float = 0.0
    detail: str = ""


@light_value
class WorkerView:
    """One worker: whether it may be used, why not, and how loaded it is."""

    worker_id: WorkerId
    role: str
    state: str
    reason: str
    info: WorkerInfo
    incarnation: Incarnation
    slot: int | None
    slot_gen: int
    lease_left_ms: int | None
    load: LoadReport
    booked: Booked
    up_since: float | None  # of its Link


@light_value
class ClusterView:
    """All workers at one moment."""

    workers: tuple[WorkerView, ...]
    at: float

    def usable(self, role: str) -> tuple[WorkerView, ...]:
        """Return the live workers of a role."""
        return tuple([w for w in self.workers if w.role == role and w.state == LIVE])

    def find(self, worker_id: WorkerId) -> WorkerView | None:
        """Return one worker."""
        return next((w for w in self.workers if w.worker_id == worker_id), None)

    @property
    def has_suspect(self) -> bool:
        """Whether a worker may be back in a moment."""
        return any(w.state == SUSPECT for w in self.workers)

    def why_unusable(self) -> str:
        """Say in words why workers are not used; empty when all are."""
        reasons = [f"{w.worker_id} is {w.state}: {w.reason}" for w in self.workers if w.reason]
        return "; ".join(reasons[:4])


@light_value
class ViewInputs:
    """What a view is made from."""

    records: Mapping[WorkerId, WorkerRecord]
    records_at: float
    links: Mapping[WorkerId, LinkState]
    booked: Mapping[WorkerId, Booked]
    expected: Mapping[str, str]  # identity fields every worker must have
    broken: frozenset[WorkerId] = frozenset()  # whose breaker is open


def expected_identity(manifest: ModelManifest) -> dict[str, str]:
    """Return the identity fields that follow from the router's own copy of the model."""
    return {
        "weights_digest": manifest.weights_digest,
        "tokenizer_digest": manifest.tokenizer_digest,
        "num_layers": str(manifest.num_layers),
        "num_kv_heads": str(manifest.num_kv_heads),
        "head_dim": str(manifest.head_dim),
        "rope": manifest.rope,
        "hash_scheme": HASH_SCHEME,
    }


class _Judged(NamedTuple):
    """What a worker was judged by, and when; values are never changed, so `is` tells them apart."""

    record: WorkerRecord | None
    link: LinkState | None
    booked: Booked
    is_broken: bool
    at: float
    holds_s: float  # from then on
    worker: WorkerView


class ViewMaker:
    """Builds one view after another, judging only workers of which something is new.

    A request needs several views, and little happens between two of them.
    """

    def __init__(self) -> None:
        self._judged: dict[WorkerId, _Judged] = {}

    def build(self, inputs: ViewInputs, now: float) -> ClusterView:
        """Judge every worker that the store or a Link knows."""
        judged = {w: self._judge(w, inputs, now) for w in sorted({*inputs.records, *inputs.links})}
        self._judged = judged
        return ClusterView(tuple([each.worker for each in judged.values()]), now)

    def _judge(self, worker_id: WorkerId, inputs: ViewInputs, now: float) -> _Judged:
        was = self._judged.get(worker_id)
        record, link = inputs.records.get(worker_id), inputs.links.get(worker_id)
        booked = inputs.booked.get(worker_id, _NOT_BOOKED)
        is_broken = worker_id in inputs.broken
        if (
            was is not None
            and was.record is record
            and was.link is link
            and was.is_broken is is_broken
            and 0 <= now - was.at < was.holds_s
        ):
            if was.booked is booked:
                return was
            worker, at = replace(was.worker, booked=booked), was.at
        else:
            worker, at = _judge(worker_id, inputs, now), now
        holds_s = _LINKED_FOR_S if _is_up(link) else _JUDGED_FOR_S
        return _Judged(record, link, booked, is_broken, at, holds_s, worker)


def pair_mismatch(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Say why this pair must not exchange KV, naming the field; None when it may."""
    if prefill.kv_identity_fp == decode.kv_identity_fp:
        return None
    found = first_mismatch(prefill.identity_fields, decode.identity_fields)
    if found is None:
        return (
            f"{prefill.worker_id} and {decode.worker_id} have different identity fingerprints "
            "but equal fields"
        )
    name, ours, theirs = found
    return (
        f"{name} differs: {ours!r} of prefill worker {prefill.worker_id}, "
        f"{theirs!r} of decode worker {decode.worker_id}"
    )


def _judge(worker_id: WorkerId, inputs: ViewInputs, now: float) -> WorkerView:
    record, link = inputs.records.get(worker_id), inputs.links.get(worker_id)
    info = record.info if record is not None else _info_of(link)
    state, reason = _state_of(info, record, link, inputs, now)
    # A record of another life says nothing about the worker behind the Link.
    incarnation = link.incarnation if link and link.incarnation else info.incarnation
    own_record = record if record is not None and record.info.incarnation == incarnation else None
    lease_left = None
    if record is not None:
        lease_left = record.lease_left_ms - round((now - inputs.records_at) * 1000)
    return WorkerView(
        worker_id=worker_id,
        role=info.role,
        state=state,
        reason=reason,
        info=info,
        incarnation=incarnation,
        slot=own_record.slot if own_record else None,
        slot_gen=own_record.slot_gen if own_record else (link.slot_gen if link else 0),
        lease_left_ms=lease_left,
        load=_newest_load(own_record, link, inputs.records_at),
        booked=inputs.booked.get(worker_id, _NOT_BOOKED),
        up_since=link.since if link and _is_up(link) else None,
    )


def _state_of(
    info: WorkerInfo,
    record: WorkerRecord | None,
    link: LinkState | None,
    inputs: ViewInputs,
    now: float,
) -> tuple[str, str]:
    mismatch = _identity_mismatch(info, inputs.expected)
    if mismatch is not None:
        return INCOMPATIBLE, mismatch
    if link is None or link.status in (LinkStatus.DOWN, LinkStatus.CONNECTING):
        return _state_without_link(record, link, inputs, now)
    if link.status is LinkStatus.LAGGING:
        return SUSPECT, "no sign of life on its Link for a second"
    if link.is_draining or (record is not None and record.state == DRAINING):
        return DRAINING, "it takes no new work"
    if info.worker_id in inputs.broken:
        return SUSPECT, "too many of its recent work items failed"
    return LIVE, ""


def _state_without_link(
    record: WorkerRecord | None, link: LinkState | None, inputs: ViewInputs, now: float
) -> tuple[str, str]:
    lease_left = 0.0
    if record is not None:
        lease_left = record.lease_left_ms - (now - inputs.records_at) * 1000
    if lease_left <= 0:
        return GONE, "its lease ran out and its Link is down"
    if link is None:
        return SUSPECT, "no Link to it yet"
    return SUSPECT, link.detail or f"its Link is {link.status.value}"


def _is_up(link: LinkState | None) -> bool:
    return link is not None and link.status is LinkStatus.UP


def _identity_mismatch(info: WorkerInfo, expected: Mapping[str, str]) -> str | None:
    if expected.items() <= info.identity_fields.items():
        return None  # at once: every worker is asked many times a second
    theirs = {name: info.identity_fields.get(name, "<absent>") for name in expected}
    found = first_mismatch(expected, theirs)
    if found is None:
        return None
    name, ours, their = found
    return f"{name} is {their!r}, this router serves {ours!r}"


def _newest_load(
    record: WorkerRecord | None, link: LinkState | None, records_at: float
) -> LoadReport:
    if (
        link is not None
        and link.load is not None
        and (record is None or link.load_at >= records_at)
    ):
        return link.load
    if record is not None:
        return record.load
    return link.load if link is not None and link.load is not None else LoadReport()


def _info_of(link: LinkState | None) -> WorkerInfo:
    assert link is not None, "a worker in the view comes from a record or a Link"
    return link.info
