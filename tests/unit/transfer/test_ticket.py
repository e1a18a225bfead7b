"""Tickets: only their issuer's life takes them, and only unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pb import transfer_pb2 as pb
from services.transfer.ticket import (
    MAX_TICKET_BYTES,
    Ticket,
    TicketError,
    TicketSigner,
    read_unverified,
)
from tests.support.transfer_ends import hashes

TICKET = Ticket(
    xfer_id=7,
    worker_id="prefill-0",
    zmq_endpoint="tcp://127.0.0.1:1",
    uds_path="/run/x.sock",
    incarnation=99,
    kv_identity_fp="f" * 64,
    num_tokens=33,
    block_hashes=hashes(2),
    tenant="t",
    expires_unix_ms=1_700_000_000_000,
    request_id="req-1",
)


def test_issuer_takes_its_own_ticket() -> None:
    signer = TicketSigner()
    signed = signer.issue(TICKET)
    assert signer.verify(signed) == read_unverified(signed) == TICKET


def test_another_life_refuses_it() -> None:
    with pytest.raises(TicketError, match="signature"):
        TicketSigner().verify(TicketSigner().issue(TICKET))


@given(st.data())
def test_a_changed_ticket_is_refused(data: st.DataObject) -> None:
    signer = TicketSigner(b"k" * 32)
    signed = bytearray(signer.issue(TICKET))
    position = data.draw(st.integers(0, 8 * len(signed) - 1))
    signed[position // 8] ^= 1 << position % 8
    with pytest.raises(TicketError):
        signer.verify(bytes(signed))


def test_a_forged_field_is_refused() -> None:
    signer = TicketSigner()
    outer = pb.SignedTicket.FromString(signer.issue(TICKET))
    forged = pb.Ticket.FromString(outer.ticket)
    forged.xfer_id = 8
    outer.ticket = forged.SerializeToString()
    with pytest.raises(TicketError, match="signature"):
        signer.verify(outer.SerializeToString())


@pytest.mark.parametrize(
    "ticket",
    [
        replace(TICKET, worker_id=""),
        replace(TICKET, incarnation=0),
        replace(TICKET, tenant="t" * 600),
    ],
)
def test_senseless_fields_are_refused(ticket: Ticket) -> None:
    with pytest.raises(TicketError):
        read_unverified(TicketSigner().issue(ticket))


def test_an_oversized_ticket_is_not_parsed() -> None:
    with pytest.raises(TicketError, match="longer"):
        read_unverified(bytes(MAX_TICKET_BYTES + 1))


@given(st.binary(max_size=200))
def test_random_bytes_are_no_ticket(raw: bytes) -> None:
    with pytest.raises(TicketError):
        read_unverified(raw)
