"""From a router's Work message to a work item the engine takes, or a coded error. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import RequestError
from services.common.ids import BlockHash, Incarnation, WorkerId
from services.common.limits import Limits
from services.common.model_manifest import ModelManifest
from services.engine.api import EngineRequest, RequestKey, TokenArray, WorkKind
from services.kv.hashing import HashScope, chain_hashes, pack_hashes
from services.pb import worker_pb2
from services.prefill.handoff import plan_prefill
from services.transfer.api import TransferStats
from services.worker import convert
from services.worker.session import RouterSession


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is."""

    worker_id: WorkerId
    incarnation: Incarnation
    manifest: ModelManifest
    kv_identity_fp: str


@dataclass(slots=True)
class WorkItem:
    """One open work item; written by the loop before the engine sees it."""

    key: RequestKey
    session: RouterSession
    request: int
    attempt: int
    request_id: str
    kind: WorkKind
    ticket: bytes
    traceparent: str
    stats: TransferStats | None = None  # set by the transfer thread before `received`
    was_recomputed: bool = False  # the KV could not be had


class Intake:
    """Checks work items before anything is held for them."""

    def __init__(
        self, identity: WorkerIdentity, limits: Limits, slot_gens: Callable[[], tuple[int, ...]]
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._slot_gens = slot_gens

    def check_fencing(self, session: RouterSession, work: worker_pb2.Work) -> None:
        """Raise RequestError when the work is for another life of this worker, or outdated."""
        if work.expect_incarnation != self._identity.incarnation:
            raise RequestError("stale_incarnation", "the work is for an earlier life of the worker")
        gens = self._slot_gens()
        if work.slot_gen and gens and work.slot_gen not in gens:
            raise RequestError("stale_incarnation", "the worker's slot has changed hands")
        if session.is_fenced(work.request, work.attempt):
            raise RequestError("fenced", "an equal or higher attempt was already taken")

    def read(
        self, session: RouterSession, key: RequestKey, work: worker_pb2.Work, now: float
    ) -> tuple[WorkItem, EngineRequest]:
        """Return the work item and the engine's view of it.

        Raises:
            RequestError: it is malformed.
        """
        manifest = self._identity.manifest
        tokens = convert.token_array(work.token_ids, manifest.vocab_size)
        hashes = self._verified_hashes(work, tokens)
        sampling = convert.sampling_params(work, self._limits)
        kind = _work_kind(work)
        if kind is WorkKind.PREFILL:
            kind = plan_prefill(sampling).kind
        request = EngineRequest(
            key=key,
            request_id=work.request_id,
            kind=kind,
            token_ids=tokens,
            block_hashes=hashes,
            sampling=sampling,
            deadline=now + (work.deadline_ms or self._limits.default_timeout_ms) / 1000,
            priority=work.priority,
            tenant=work.tenant,
            generated=convert.generated_tokens(work, manifest.vocab_size),
            resumed=convert.resumed_choices(work, manifest.vocab_size),
        )
        item = WorkItem(
            key=key,
            session=session,
            request=work.request,
            attempt=work.attempt,
            request_id=work.request_id,
            kind=kind,
            ticket=work.continue_from.ticket,
            traceparent=work.traceparent,
        )
        return item, request

    def _verified_hashes(self, work: worker_pb2.Work, tokens: TokenArray) -> tuple[BlockHash, ...]:
        """Hash the prompt here: what the router sent is checked, never trusted."""
        scope = HashScope(self._identity.manifest.weights_digest, work.adapter_digest, work.tenant)
        hashes = chain_hashes(scope, tokens)
        if work.block_hashes and work.block_hashes != pack_hashes(hashes):
            raise RequestError("hash_mismatch", "block_hashes are not those of token_ids")
        return hashes


def _work_kind(work: worker_pb2.Work) -> WorkKind:
    which = work.WhichOneof("kind")
    if which == "prefill":
        return WorkKind.PREFILL
    if which == "continue_from":
        return WorkKind.CONTINUE
    if which == "whole":
        return WorkKind.WHOLE
    raise RequestError("invalid_argument", "the work item names no kind", param="kind")
