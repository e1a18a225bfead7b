"""A worker offers a running request to another one, and goes on with one that came from another."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.common.errors import RequestError
from services.engine.api import (
    ChoiceDone,
    EndReason,
    MigrateRefused,
    OfferReady,
    ReceiveWanted,
    Refused,
    RequestKey,
    TokensOut,
    WorkKind,
)
from services.pb import worker_pb2
from services.worker.outputs import add_outputs
from services.worker.session import DoneOut, TicketOut
from tests.support.shell_rig import ROUTER, ShellRig


@pytest.fixture
async def rig() -> ShellRig:
    return ShellRig().start()


def _packed(*tokens: int) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def _moved(key: RequestKey) -> tuple[OfferReady, ChoiceDone]:
    done = ChoiceDone(key, 0, EndReason.LENGTH, all_choices=True, handed_off=True)
    return OfferReady(key, "req-1", 41, (), "", (5, 6, 7)), done


def _ask(rig: ShellRig, request: int, attempt: int) -> None:
    migrate = worker_pb2.Migrate(request=request, attempt=attempt)
    rig.shell.handle(rig.session, worker_pb2.RouterFrame(migrate=[migrate]))


async def test_a_router_asks_and_gets_ticket_and_tokens_so_far(rig: ShellRig) -> None:
    key = rig.work()
    _ask(rig, 1, 0)
    assert rig.engine.migrated == [key]
    offer, done = _moved(key)
    await rig.emit(offer, done)
    ticket, end = rig.sent
    assert isinstance(ticket, TicketOut)
    assert ticket.generated == (5, 6, 7)
    assert isinstance(end, DoneOut)
    assert end.done.handed_off
    frame = worker_pb2.WorkerFrame()
    add_outputs(frame, rig.sent, rig.shell.identity.worker_id)
    assert frame.tickets[0].generated == _packed(5, 6, 7)
    assert frame.tickets[0].ticket == ticket.ticket


@pytest.mark.parametrize(("request_no", "attempt"), [(2, 0), (1, 1)])
async def test_other_requests_and_attempts_are_left_alone(
    rig: ShellRig, request_no: int, attempt: int
) -> None:
    rig.work()
    _ask(rig, request_no, attempt)
    assert rig.engine.migrated == []


async def test_ended_requests_are_left_alone(rig: ShellRig) -> None:
    key = rig.work()
    await rig.emit(ChoiceDone(key, 0, EndReason.STOP, all_choices=True))
    _ask(rig, 1, 0)
    assert rig.engine.migrated == []
    with pytest.raises(RequestError, match="no such request"):
        await rig.shell.migrate(ROUTER, 1, 1.0)


async def test_the_call_gives_the_ticket_its_router_gets_too(rig: ShellRig) -> None:
    key = rig.work()
    call = asyncio.create_task(rig.shell.migrate(ROUTER, 1, 5.0))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="has begun"):
        await rig.shell.migrate(ROUTER, 1, 5.0)
    await rig.emit(*_moved(key))
    (ticket,) = [item for item in rig.sent if isinstance(item, TicketOut)]
    assert await call == ticket.ticket


async def test_the_call_says_why_a_request_stays(rig: ShellRig) -> None:
    key = rig.work()
    call = asyncio.create_task(rig.shell.migrate(ROUTER, 1, 5.0))
    await asyncio.sleep(0)
    await rig.emit(MigrateRefused(key, "it does not decode now"))
    with pytest.raises(RequestError, match="does not decode now"):
        await call
    assert rig.shell.num_open() == 1
    assert rig.sent == []


async def test_a_request_that_ends_first_ends_the_call(rig: ShellRig) -> None:
    key = rig.work()
    call = asyncio.create_task(rig.shell.migrate(ROUTER, 1, 5.0))
    await asyncio.sleep(0)
    await rig.emit(ChoiceDone(key, 0, EndReason.STOP, all_choices=True))
    with pytest.raises(RequestError, match="has ended"):
        await call


async def test_the_call_has_a_deadline(rig: ShellRig) -> None:
    rig.work()
    with pytest.raises(TimeoutError):
        await rig.shell.migrate(ROUTER, 1, 0.02)
    call = asyncio.create_task(rig.shell.migrate(ROUTER, 1, 5.0))  # and leaves nothing behind
    await asyncio.sleep(0)
    assert len(rig.engine.migrated) == 2
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_an_offer_that_fails_ends_without_a_ticket_and_gives_the_blocks_back(
    rig: ShellRig,
) -> None:
    rig.source.refuses = True
    key = rig.work()
    _ask(rig, 1, 0)
    await rig.emit(*_moved(key))
    assert [type(item) for item in rig.sent] == [DoneOut]
    assert rig.engine.cancelled == [key]


async def test_work_goes_on_from_tokens_made_elsewhere(rig: ShellRig) -> None:
    key = rig.work(kind="continue", generated=_packed(5, 6, 7), first_index=3)
    (request,) = rig.engine.requests
    assert (request.kind, request.generated) == (WorkKind.CONTINUE, (5, 6, 7))
    hashes = request.block_hashes
    await rig.emit(ReceiveWanted(key, (False,) * len(hashes), hashes))
    assert [opened[0] for opened in rig.sink.opened] == [key]


async def test_a_draining_worker_takes_back_what_it_offered_and_nothing_else(
    rig: ShellRig,
) -> None:
    """Two workers told to stop at once: what one offers the other refuses."""
    key = rig.work()
    rig.work(request=2)
    rig.shell.begin_drain()
    _ask(rig, 1, 0)
    await rig.emit(*_moved(key))
    again = {"generated": _packed(5, 6, 7), "first_index": 3, "attempt": 1}
    rig.work(request=2, **again)
    rig.work(request=3, **again)
    assert [item.code for item in rig.sent if isinstance(item, Refused)] == ["draining"] * 2
    back = rig.work(request=1, **again)
    assert rig.engine.requests[-1].key == back


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"generated": _packed(5, 6, 7), "first_index": 2}, "invalid_argument"),
        ({"generated": b"abc", "first_index": 1}, "invalid_argument"),
        ({"generated": _packed(5, 100), "first_index": 2}, "token_out_of_range"),
    ],
)
async def test_nonsense_about_earlier_tokens_is_refused(
    rig: ShellRig, fields: dict[str, Any], code: str
) -> None:
    rig.work(**fields)
    (refusal,) = rig.sent
    assert isinstance(refusal, Refused)
    assert refusal.code == code
    assert rig.engine.requests == []


async def test_a_resume_repeats_the_ticket_after_the_tokens_it_follows(rig: ShellRig) -> None:
    key = rig.work()
    tokens = TokensOut(key, 0, 0, (5, 6, 7))
    await rig.emit(tokens, *_moved(key))
    rig.sent.clear()
    rig.attach(r1=(0,))
    assert [type(item) for item in rig.sent] == [TokensOut, TicketOut, DoneOut]
