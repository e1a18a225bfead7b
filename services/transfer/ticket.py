"""Tickets: signed by the prefill worker for itself, opaque to everyone else.

The key is drawn for each incarnation, so a ticket dies with the process that issued it. Expiry
is judged by the issuer's own monotonic clock (the sender's ttl), never by the wall clock in it.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from services.common.ids import BlockHash
from services.kv.hashing import HASH_BYTES, pack_hashes
from services.kv.layout import BLOCK_TOKENS, MAX_BLOCK_TOKENS
from services.pb import transfer_pb2 as pb
from services.transfer.pairing import Range

TICKET_VERSION = 1
MAX_TICKET_BYTES = 768 * 1024  # 48k blocks of hashes; a longer prompt is no use to anyone
_MAX_TEXT = 512


class TicketError(Exception):
    """The ticket is not one of ours, or damaged, or of another version."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says; no decode worker is named in it."""

    xfer_id: int
    worker_id: str
    zmq_endpoint: str
    uds_path: str
    incarnation: int
    kv_identity_fp: str
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]
    tenant: str
    expires_unix_ms: int
    request_id: str
    block_size: int = BLOCK_TOKENS  # of the issuer's pool
    kv_dtype: str = ""  # what its KV was computed in; "" = rounded since, or not said
    layers: Range = (0, 0)  # [lo, hi) of the issuer's pool in the model's numbers; hi 0 = all
    heads: Range = (0, 0)


class TicketSigner:
    """Signs and checks this incarnation's tickets (any thread: it holds no changing state)."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key if key is not None else secrets.token_bytes(32)

    def issue(self, ticket: Ticket) -> bytes:
        """Serialise and sign."""
        body = pb.Ticket(
            version=TICKET_VERSION,
            xfer_id=ticket.xfer_id,
            worker_id=ticket.worker_id,
            zmq_endpoint=ticket.zmq_endpoint,
            uds_path=ticket.uds_path,
            incarnation=ticket.incarnation,
            kv_identity_fp=ticket.kv_identity_fp,
            num_tokens=ticket.num_tokens,
            block_hashes=pack_hashes(ticket.block_hashes),
            tenant=ticket.tenant,
            expires_unix_ms=ticket.expires_unix_ms,
            request_id=ticket.request_id,
            block_size=ticket.block_size,
            kv_dtype=ticket.kv_dtype,
            layer_lo=ticket.layers[0],
            layer_hi=ticket.layers[1],
            head_lo=ticket.heads[0],
            head_hi=ticket.heads[1],
        ).SerializeToString()
        return pb.SignedTicket(ticket=body, hmac=self._mac(body)).SerializeToString()

    def verify(self, signed: bytes) -> Ticket:
        """Return the ticket if this incarnation signed exactly these bytes."""
        outer = _parse_outer(signed)
        if not hmac.compare_digest(outer.hmac, self._mac(outer.ticket)):
            raise TicketError("signature does not match")
        return _parse_inner(outer.ticket)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


def read_unverified(signed: bytes) -> Ticket:
    """Read where a ticket leads; only its issuer can say whether it is true."""
    return _parse_inner(_parse_outer(signed).ticket)


def _parse_outer(signed: bytes) -> pb.SignedTicket:
    if len(signed) > MAX_TICKET_BYTES:
        raise TicketError("longer than the limit")
    try:
        return pb.SignedTicket.FromString(signed)
    except DecodeError as error:
        raise TicketError("not a ticket") from error


def _parse_inner(body: bytes) -> Ticket:
    try:
        raw = pb.Ticket.FromString(body)
    except DecodeError as error:
        raise TicketError("not a ticket") from error
    if raw.version != TICKET_VERSION:
        raise TicketError(f"version {raw.version}, this worker reads {TICKET_VERSION}")
    packed = raw.block_hashes  # once: every look at the field copies it
    if len(packed) % HASH_BYTES:
        raise TicketError("block hashes are cut")
    texts = (raw.worker_id, raw.zmq_endpoint, raw.uds_path, raw.kv_identity_fp, raw.tenant)
    if any(len(text) > _MAX_TEXT for text in (*texts, raw.request_id, raw.kv_dtype)):
        raise TicketError("a field is longer than the limit")
    if not raw.worker_id or not raw.incarnation or not raw.zmq_endpoint:
        raise TicketError("a field is missing")
    block_size = raw.block_size or BLOCK_TOKENS
    if block_size % BLOCK_TOKENS or block_size > MAX_BLOCK_TOKENS:
        raise TicketError("the block size is none")
    hashes = tuple(BlockHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES))
    return Ticket(
        raw.xfer_id, raw.worker_id, raw.zmq_endpoint, raw.uds_path, raw.incarnation,
        raw.kv_identity_fp, raw.num_tokens, hashes, raw.tenant, raw.expires_unix_ms,
        raw.request_id, block_size, raw.kv_dtype,
        (raw.layer_lo, raw.layer_hi), (raw.head_lo, raw.head_hi),
    )  # fmt: skip
