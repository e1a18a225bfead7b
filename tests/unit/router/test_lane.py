"""The short way of a plain answer's tokens: the same as the long way, or not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Incarnation, WorkerId
from services.router.api import ChoiceDelta, RouterOutput, TextWriter
from services.router.booking import Booking
from services.router.lane import Lane
from services.router.legs import WHOLE, Leg, Progress
from services.router.open_request import OpenRequest
from services.router.output_buffer import OutputBuffer
from services.router.policy import RequestFacts
from services.router.request import LogicalRequest, TokensIn
from services.router.timing import Marks
from services.text.detokenizer import whole_text
from tests.support.cluster import make_call

W0 = WorkerId("w0")
SPECIAL = 0  # adds nothing to an answer
RAW = "aé🫠\n".encode()  # tokens are its bytes, and the text "<N>" beyond them


class Vocabulary:
    """Tokens that are text, parts of characters, or special."""

    def token_bytes(self, token_id: int) -> bytes:
        return RAW[token_id - 1 : token_id] if token_id <= len(RAW) else b"<%d>" % token_id

    def text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == SPECIAL else self.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        return whole_text(self.text_bytes(token_id))


class Client:
    """A sink that writes down everything, and who said when it came."""

    def __init__(self) -> None:
        self.text = ""
        self.times: list[float] = []
        self.num_short = 0
        self.lags = False

    def push(self, output: ChoiceDelta) -> bool:
        self.text += output.text
        return True

    def writer(self) -> TextWriter | None:
        return self.write

    def write(self, text: str) -> bool:
        if self.lags:
            return False
        self.text += text
        self.num_short += 1
        return True

    def note(self, times: Sequence[float]) -> None:
        self.times += times


def make_leg() -> Leg:
    return Leg(WHOLE, W0, Incarnation(1), 1, Booking(W0, 0.0, 0, 0), [0], 0.0)


def make_request(client: Client, leg: Leg, max_tokens: int = 100, n: int = 1) -> OpenRequest:
    call = make_call(max_tokens=max_tokens, n=n)
    facts = RequestFacts(call.request_id, 100, max_tokens)
    logical = LogicalRequest(call, Vocabulary())
    progress = Progress(1, call, facts, (), logical, Marks(0.0), legs=[leg])
    return OpenRequest(progress, OutputBuffer(1000, client))


def take_long(request: OpenRequest, leg: Leg, index: int, token_id: int) -> None:
    """Take a token as without a lane."""
    request.close_lane()
    outputs = request.progress.logical.take_tokens(TokensIn(0, index, (token_id,)))
    leg.note_tokens(0, index + 1)
    if outputs:
        request.buffer.put(outputs)
    request.open_lane(leg)


def take(request: OpenRequest, leg: Leg, index: int, token_id: int) -> None:
    """Take a token by the shortest way it can go."""
    if request.lane is None or not request.lane.take(W0, 1, index, token_id, float(index)):
        take_long(request, leg, index, token_id)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(RAW) + 3), min_size=1, max_size=61),
    swaps=st.sets(st.integers(0, 60)),
    twice=st.sets(st.integers(0, 60)),
)
def test_both_ways_give_the_same(ids: list[int], swaps: set[int], twice: set[int]) -> None:
    """Whole characters and parts of them, out of order and repeated, up to the limit."""
    order = list(range(len(ids)))
    for at in swaps:
        if at + 1 < len(order):
            order[at], order[at + 1] = order[at + 1], order[at]
    order += [index for index in twice if index < len(ids)]
    short, long = Client(), Client()
    legs = make_leg(), make_leg()
    by_lane, plain = make_request(short, legs[0], 60), make_request(long, legs[1], 60)
    for index in order:
        take(by_lane, legs[0], index, ids[index])
        take_long(plain, legs[1], index, ids[index])
    for request in (by_lane, plain):
        request.close_lane()

    assert long.num_short == 0
    assert len(short.times) == short.num_short
    assert short.text == long.text
    assert by_lane.progress.logical.so_far == plain.progress.logical.so_far
    assert by_lane.progress.logical.completion_tokens == min(len(ids), 60)
    assert legs[0].next_index == legs[1].next_index
    ends = [_finish(request) for request in (by_lane, plain)]
    assert ends[0] == ends[1]


def _finish(request: OpenRequest) -> list[RouterOutput]:
    return request.progress.logical.end_choice(0, "length")


def opened(max_tokens: int = 100) -> tuple[Client, Leg, OpenRequest, Lane]:
    """A request whose first token went the long way."""
    client, leg = Client(), make_leg()
    request = make_request(client, leg, max_tokens)
    take_long(request, leg, 0, 11)
    assert request.lane is not None
    return client, leg, request, request.lane


def test_tokens_are_told_of_in_groups_and_the_rest_at_the_end() -> None:
    client, leg, request, lane = opened()
    for index in range(1, 41):
        assert lane.take(W0, 1, index, 11, float(index))
    assert client.num_short == 40
    assert len(client.times) == 32
    request.close_lane()
    assert request.progress.marks.newest_token == 40.0
    assert client.times == [float(index) for index in range(1, 41)]
    assert leg.next_index == [41]
    request.close_lane()
    assert len(client.times) == 40


@pytest.mark.parametrize(
    ("worker", "attempt", "index", "token_id"),
    [
        (WorkerId("w1"), 1, 1, 11),  # another worker's
        (W0, 2, 1, 11),  # of another attempt
        (W0, 1, 2, 11),  # it overtook one
        (W0, 1, 0, 11),  # it was here already
        (W0, 1, 1, SPECIAL),
        (W0, 1, 1, 2),  # half a character
    ],
)
def test_what_is_not_plain_goes_the_long_way(
    worker: WorkerId, attempt: int, index: int, token_id: int
) -> None:
    client, _, request, lane = opened()
    assert not lane.take(worker, attempt, index, token_id, 1.0)
    assert client.num_short == 0
    assert request.progress.logical.next_indexes == (1,)


def test_a_lane_ends_with_its_leg_with_the_budget_and_where_the_client_lags() -> None:
    client, leg, request, lane = opened(max_tokens=3)
    client.lags = True
    assert not lane.take(W0, 1, 1, 11, 1.0)
    client.lags = False
    assert lane.take(W0, 1, 1, 11, 1.0)
    leg.is_open = False
    assert not lane.take(W0, 1, 2, 11, 2.0)
    leg.is_open = True
    assert lane.take(W0, 1, 2, 11, 2.0)
    assert not lane.take(W0, 1, 3, 11, 3.0)
    assert request.progress.logical.next_indexes == (3,)


def test_no_lane_for_several_choices_stop_strings_and_ends_that_wait() -> None:
    client, leg = Client(), make_leg()
    request = make_request(client, leg, n=2)
    take_long(request, leg, 0, 11)
    assert request.lane is None

    call = replace(make_call(max_tokens=9), stop=("x",))
    logical = LogicalRequest(call, Vocabulary())
    logical.take_tokens(TokensIn(0, 0, (11,)))
    assert logical.plain() is None

    _, leg, request, _ = opened()
    take_long(request, leg, 2, 11)  # the one before it is missing
    assert request.lane is None
    assert _finish(request) == []
    take_long(request, leg, 1, 11)
    assert request.lane is None
    assert request.progress.logical.is_over
