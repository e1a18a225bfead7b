"""RouterSession: nothing a router has not acknowledged is lost, nothing is kept for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.api import ChoiceDone, EndReason, RequestKey, TokensOut
from services.worker.session import (
    ENDED_KEPT_S,
    MAX_PAUSE_S,
    MAX_UNACKED_TOKENS,
    RESUME_GRACE_S,
    DoneOut,
    RouterSession,
    TicketOut,
    after_index,
)


def make_session(*requests: int, attempt: int = 0) -> RouterSession:
    session = RouterSession("router", 7)
    session.attach({})
    for request in requests:
        session.admit(key_of(request, attempt), request, attempt)
    return session


def key_of(request: int, attempt: int = 0) -> RequestKey:
    return RequestKey(f"7/{request}/{attempt}")


def tokens(request: int, first: int, count: int, choice: int = 0, attempt: int = 0) -> TokensOut:
    ids = tuple(range(first * 10, first * 10 + count))
    return TokensOut(key_of(request, attempt), choice, first, ids)


def done(request: int, choice: int = 0, *, last: bool = True) -> DoneOut:
    event = ChoiceDone(key_of(request), choice, EndReason.STOP, all_choices=last)
    return DoneOut(key_of(request), event, is_receiver=False, stats=None)


def test_resume_replays_only_what_comes_after_next_index() -> None:
    session = make_session(1)
    session.record(tokens(1, 0, 3), now=0.0)
    session.record(tokens(1, 3, 2), now=0.0)
    session.detach(now=0.0)

    result = session.attach({(1, 0): (2,)})

    assert result.resend == (
        TokensOut(key_of(1), 0, 2, (2,)),
        tokens(1, 3, 2),
    )
    assert result.cancel == ()
    assert result.lost == ()
    session.check_integrity()


def test_resume_replays_ticket_before_tokens_and_end_last() -> None:
    session = make_session(1)
    ticket = TicketOut(key_of(1), b"t")
    for item in (ticket, tokens(1, 0, 1), done(1)):
        session.record(item, now=0.0)
    session.detach(now=0.0)

    assert session.attach({(1, 0): (0,)}).resend == (ticket, tokens(1, 0, 1), done(1))


def test_attach_without_resume_cancels_open_requests_and_names_lost_ones() -> None:
    session = make_session(1, 2)
    session.record(done(2), now=0.0)
    session.detach(now=0.0)

    result = session.attach({(9, 0): (0,)})

    assert result.cancel == (key_of(1),)
    assert result.lost == (9,)


def test_a_higher_attempt_that_never_came_is_lost_though_a_lower_one_is_known() -> None:
    """The router sent attempt 1 on a Link that broke; it used to wait for it to its deadline."""
    session = make_session(1, 2)
    session.record(done(1), now=0.0)
    session.detach(now=0.0)

    result = session.attach({(1, 1): (0,), (2, 1): (0,)})

    assert result.lost == (1, 2)
    assert result.resend == ()
    assert result.cancel == (key_of(2),)


def test_request_is_given_up_only_after_the_grace() -> None:
    session = make_session(1)
    session.detach(now=10.0)

    assert session.sweep(10.0 + RESUME_GRACE_S) == ()
    assert [key for key, _ in session.sweep(10.1 + RESUME_GRACE_S)] == [key_of(1)]


def test_resumed_request_is_not_given_up() -> None:
    session = make_session(1)
    session.detach(now=10.0)
    session.attach({(1, 0): (0,)})
    session.detach(now=100.0)

    assert session.sweep(101.0) == ()


def test_router_that_lags_past_the_replay_buffer_pauses_its_request_once() -> None:
    session = make_session(1)
    assert session.record(tokens(1, 0, MAX_UNACKED_TOKENS), now=0.0) is True
    assert session.record(tokens(1, MAX_UNACKED_TOKENS, 1), now=0.0) is False
    assert session.record(tokens(1, MAX_UNACKED_TOKENS + 1, 1), now=0.0) is True
    session.acknowledge(1, 0, 0)
    assert session.take_resumable() == ()
    session.acknowledge(1, 0, MAX_UNACKED_TOKENS // 2 + 1)
    assert session.take_resumable() == (key_of(1),)
    assert session.take_resumable() == ()
    session.check_integrity()


def test_paused_request_that_ended_is_not_given_up() -> None:
    session = make_session(1)
    session.record(tokens(1, 0, MAX_UNACKED_TOKENS + 1), now=0.0)
    session.record(done(1), now=0.0)

    assert session.sweep(MAX_PAUSE_S + 0.1) == ()


def test_each_choice_brings_room_of_its_own() -> None:
    """Sixteen choices make sixteen tokens a step: they may lag as many steps as one."""
    session = make_session(1)
    for choice in range(16):
        assert session.record(tokens(1, 0, 1, choice), now=0.0) is True
    for choice in range(16):
        assert session.record(tokens(1, 1, MAX_UNACKED_TOKENS - 1, choice), now=0.0) is True
    assert session.record(tokens(1, MAX_UNACKED_TOKENS, 1, 15), now=0.0) is False
    session.check_integrity()


def test_higher_attempt_fences_the_lower_one() -> None:
    session = make_session(1)

    assert session.admit(key_of(1, 3), 1, 3) == key_of(1, 0)
    assert session.is_fenced(1, 3)
    assert session.is_fenced(1, 2)
    assert not session.is_fenced(1, 4)
    assert session.entry(key_of(1, 0)) is None


def test_ended_requests_are_forgotten_after_a_while() -> None:
    session = make_session(1)
    session.record(done(1), now=5.0)
    session.detach(now=5.0)

    session.sweep(5.0 + ENDED_KEPT_S)
    assert session.entry(key_of(1)) is not None
    session.sweep(5.1 + ENDED_KEPT_S)
    assert session.entry(key_of(1)) is None
    assert session.is_idle()


def test_after_index_splits_ids() -> None:
    event = tokens(1, 4, 3)
    assert after_index(event, 3) is event
    assert after_index(event, 4) == TokensOut(key_of(1), 0, 5, event.token_ids[1:])
    assert after_index(event, 6) is None


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
    st.lists(st.integers(-1, 60), max_size=20),
    st.integers(0, 60),
)
def test_any_acks_then_resume_gives_every_token_once(
    sizes: list[int], acks: list[int], next_index: int
) -> None:
    session = make_session(1)
    total = 0
    sent: list[int] = []
    for size in sizes:
        ids = tuple(range(total, total + size))
        sent.extend(ids)
        session.record(TokensOut(key_of(1), 0, total, ids), now=0.0)
        total += size
    for index in acks:
        session.acknowledge(1, 0, index)
        session.check_integrity()
    session.detach(now=0.0)

    # A router never asks for less than it has acknowledged.
    start = max([next_index, *(index + 1 for index in acks)])
    replayed = [t for item in session.attach({(1, 0): (start,)}).resend for t in item.token_ids]  # type: ignore[union-attr]  # all are tokens

    assert replayed == sent[start:]
