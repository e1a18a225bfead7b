from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import RequestError
from services.common.ids import RequestId
from services.common.sampling import SamplingParams
from services.router.api import ChoiceDelta, ChoiceEnd, GenerateCall, RouterOutput
from services.router.request import ChoiceSoFar, LogicalRequest, TokenLogprob, TokensIn
from services.text.detokenizer import whole_text
from tests.support.cluster import DigitText, make_call


class ByteText:
    """Token N is the byte N."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def text_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        return whole_text(self.text_bytes(token_id))


def make_request(*, max_tokens: int = 16, n: int = 1, stop: tuple[str, ...] = ()) -> LogicalRequest:
    """Build a logical request."""
    call = GenerateCall(
        request_id=RequestId("req"), model="toy", token_ids=np.array([1], dtype=np.uint32),
        sampling=SamplingParams(max_tokens=max_tokens, n=n), stop=stop, deadline=10.0,
        received_at=0.0,
    )  # fmt: skip
    return LogicalRequest(call, ByteText())


def tokens(text: str, first: int = 0, choice: int = 0) -> TokensIn:
    """Build tokens of an ASCII text."""
    return TokensIn(choice, first, tuple(text.encode()))


def ids_of(outputs: list[RouterOutput], choice: int = 0) -> list[int]:
    """Collect token ids; checks that no index has a gap or a repeat."""
    ids: list[int] = []
    for output in outputs:
        if isinstance(output, ChoiceDelta) and output.choice == choice:
            assert output.first_index == len(ids)
            ids.extend(output.token_ids)
    return ids


def text_of(outputs: list[RouterOutput]) -> str:
    """Collect text."""
    return "".join(o.text for o in outputs if isinstance(o, ChoiceDelta))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 3))
def test_every_index_is_taken_once_in_order(seed: int, length: int, n: int) -> None:
    """I4: pieces overlap, repeat and overtake one another; ends come early or late."""
    rng = random.Random(seed)
    request = make_request(max_tokens=length, n=n)
    answers = [[rng.randrange(32, 127) for _ in range(length)] for _ in range(n)]
    pieces: list[TokensIn | int] = []
    for choice, answer in enumerate(answers):
        covered = 0
        while covered < length:
            lo = rng.randrange(covered + 1)
            hi = rng.randrange(covered + 1, length + 1)
            pieces.append(TokensIn(choice, lo, tuple(answer[lo:hi])))
            covered = hi
    rng.shuffle(pieces)
    # A worker says that a choice ended only after its last token; a resume repeats all of it.
    pieces += [TokensIn(c, 0, tuple(a)) for c, a in enumerate(answers)]
    outputs: list[RouterOutput] = []
    for piece in pieces:
        assert isinstance(piece, TokensIn)
        outputs += request.take_tokens(piece)
    for choice in range(n):
        outputs += request.end_choice(choice, "length")
        outputs += request.end_choice(choice, "length")
    for choice, answer in enumerate(answers):
        assert ids_of(outputs, choice) == answer
    assert sum(isinstance(o, ChoiceEnd) for o in outputs) == n
    assert request.is_over
    assert request.completion_tokens == n * length


def test_end_waits_for_tokens_that_are_missing() -> None:
    request = make_request()
    assert request.take_tokens(tokens("bc", first=1)) == []
    assert request.end_choice(0, "length") == []
    assert not request.is_over
    assert request.has_all_ends()
    outputs = request.take_tokens(tokens("a"))
    assert text_of(outputs) == "abc"
    assert outputs[-1] == ChoiceEnd(0, "length", None, 3)


def test_stop_string_cuts_text_tokens_and_bill() -> None:
    """api.md rule 6; RB-064: what overshoots is neither sent nor counted."""
    request = make_request(stop=("lo w",))
    outputs = request.take_tokens(tokens("hello world"))
    assert text_of(outputs) == "hel"
    assert outputs[-1] == ChoiceEnd(0, "stop", "lo w", 7)
    assert len(ids_of(outputs)) == request.completion_tokens == 7
    assert request.take_tokens(tokens("more", first=11)) == []
    assert request.end_choice(0, "length") == []


def test_held_back_text_is_released_at_the_end() -> None:
    """RB-065: a proper prefix of a stop string is no stop string."""
    request = make_request(stop=("xyz",))
    outputs = request.take_tokens(tokens("axy"))
    assert text_of(outputs) == "a"
    outputs += request.end_choice(0, "length")
    assert text_of(outputs) == "axy"
    assert outputs[-1] == ChoiceEnd(0, "length", None, 3)


def test_no_more_than_max_tokens_are_delivered() -> None:
    """RB-060: a worker that restarted its budget is cut."""
    request = make_request(max_tokens=4)
    outputs = request.take_tokens(tokens("abcdefgh"))
    outputs += request.take_tokens(tokens("efgh", first=4))
    outputs += request.end_choice(0, "length")
    assert text_of(outputs) == "abcd"
    assert request.completion_tokens == 4


def test_logprobs_keep_the_bytes_of_a_split_character() -> None:
    """RB-067: raw bytes stay exact, the shown text is replaced."""
    request = make_request()
    raw = "é".encode()
    (chunk,) = request.take_tokens(
        TokensIn(0, 0, (raw[0],), (TokenLogprob(raw[0], -1.0, ((raw[1], -2.0),)),))
    )
    assert isinstance(chunk, ChoiceDelta)
    (shown,) = chunk.logprobs
    assert (shown.raw, shown.text, shown.logprob) == (raw[:1], "\ufffd", -1.0)
    assert shown.top == ((raw[1], "\ufffd", raw[1:], -2.0),)


@pytest.mark.parametrize(
    "bad",
    [
        TokensIn(1, 0, (65,)),
        TokensIn(0, 0, (65, 66), (TokenLogprob(65, -1.0),)),
        TokensIn(0, 1000, tuple([65] * 300)),
    ],
)
def test_nonsense_from_a_worker_is_an_error(bad: TokensIn) -> None:
    with pytest.raises(RequestError) as caught:
        make_request().take_tokens(bad)
    assert caught.value.spec.code == "internal"


def test_first_tokens_of_all_choices_are_known() -> None:
    request = make_request(n=2)
    request.take_tokens(tokens("a"))
    assert request.has_output
    assert not request.has_first_tokens
    request.take_tokens(tokens("b", choice=1))
    assert request.has_first_tokens


# -- a worker is lost ----------------------------------------------------------------------------


def test_so_far_is_what_the_client_has_of_choices_that_go_on() -> None:
    logical = LogicalRequest(make_call(n=3, max_tokens=8), DigitText())
    assert not logical.so_far
    logical.take_tokens(TokensIn(0, 0, (5, 6)))
    logical.take_tokens(TokensIn(2, 0, (9,)))
    logical.end_choice(2, "stop")
    logical.take_tokens(TokensIn(0, 4, (7,)))  # overtook what was lost
    assert logical.so_far == (ChoiceSoFar(0, (5, 6)), ChoiceSoFar(1, ()))
    assert logical.next_indexes == (2, 0, 1)


def test_rewind_forgets_what_overtook_and_the_end_that_waited_for_it() -> None:
    logical = LogicalRequest(make_call(max_tokens=8), DigitText())
    logical.take_tokens(TokensIn(0, 0, (5, 6)))
    logical.take_tokens(TokensIn(0, 4, (7,)))
    logical.end_choice(0, "stop")
    assert logical.rewind() == []
    assert not logical.has_all_ends()
    outputs = logical.take_tokens(TokensIn(0, 2, (1, 2, 3)))
    assert [o.token_ids for o in outputs if isinstance(o, ChoiceDelta)] == [(1, 2, 3)]


@pytest.mark.parametrize(
    ("made", "sampling", "reason"),
    [
        ((5, 0), {}, "stop"),
        ((5, 0), {"ignore_eos": True}, None),
        ((5, 0), {"min_tokens": 3}, None),
        ((5, 7), {"stop_token_ids": (7,)}, "stop"),
        ((5, 6, 7, 8), {}, "length"),
        ((5, 6, 7, 0), {}, "stop"),
        ((5, 6), {}, None),
    ],
)
def test_rewind_ends_a_choice_whose_last_token_ended_it(
    made: tuple[int, ...], sampling: dict[str, Any], reason: str | None
) -> None:
    """The worker died with the word on its tongue: going on would write past the end."""
    logical = LogicalRequest(make_call(max_tokens=4, **sampling), DigitText(), eos_token_ids=(0,))
    logical.take_tokens(TokensIn(0, 0, made))
    ends = [o.finish_reason for o in logical.rewind() if isinstance(o, ChoiceEnd)]
    assert ends == ([reason] if reason else [])
    assert logical.is_over == bool(reason)
