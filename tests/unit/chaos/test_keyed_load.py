"""An answer that was disturbed is held against one that was not, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.chaos.client import Heard
from services.chaos.keyed_load import difference, vary
from services.chaos.known_load import LoadShape, make_bodies
from services.text.detokenizer import whole_text


def answer(**changes: Any) -> Heard:
    """One of two choices that stopped by a string, with logprobs."""
    parts: dict[str, Any] = {
        "token_ids": {0: [1, 2, 3], 1: [4]},
        "text": {0: "abc", 1: "d"},
        "ends": {0: (2, ""), 1: (1, "e")},
        "logprobs": {0: [-1.0, -2.0, -3.0], 1: [-4.0]},
        "usage": (9, 4),
    }
    return Heard(**(parts | changes))


def over_http(**changes: Any) -> Heard:
    """The same answer through a door that gives neither ids nor which string it was."""
    parts = {"token_ids": {}, "ends": {0: (2, ""), 1: (1, "")}, "has_ids": False}
    return answer(**(parts | changes))


@pytest.mark.parametrize("through", [answer, over_http])
def test_equal_answers_do_not_differ(through: Callable[..., Heard]) -> None:
    assert difference(answer(), through(), is_whole=True) == ""
    assert difference(answer(), through(), is_whole=False) == ""


@pytest.mark.parametrize("through", [answer, over_http])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("text", {"text": {0: "abx", 1: "d"}}),
        ("text", {"text": {0: "ab", 1: "d"}}),
        ("ends", {"ends": {0: (2, "")}}),
        ("logprobs", {"logprobs": {0: [-1.0, -2.0], 1: [-4.0]}}),
        ("logprobs", {"logprobs": {0: [-1.0, -2.5, -3.0], 1: [-4.0]}}),
        ("usage", {"usage": (9, 5)}),
    ],
)
def test_every_part_of_a_whole_answer_counts(
    through: Callable[..., Heard], name: str, change: dict[str, Any]
) -> None:
    assert difference(answer(), through(**change), is_whole=True) == name


def test_a_part_must_be_how_the_answer_begins() -> None:
    begun = {"token_ids": {0: [1, 2]}, "text": {0: "ab"}, "logprobs": {0: [-1.0]}, "ends": {}}
    assert difference(answer(), answer(**begun, usage=(0, 0)), is_whole=False) == ""
    assert difference(answer(), answer(**begun | {"text": {0: "b"}}), is_whole=False) == "text"
    assert difference(answer(), answer(**begun | {"token_ids": {0: [2]}}), is_whole=False) == (
        "tokens"
    )


class _Letters:
    """Token 97 is "a"; others are no text."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 128 else b"\xff"

    def text_bytes(self, token_ids: Any) -> bytes:
        return b"".join(map(self.token_bytes, token_ids))

    def whole_text(self, token_id: int) -> str | None:
        return whole_text(self.token_bytes(token_id))


def test_stop_strings_are_in_the_answer_and_printable() -> None:
    bodies = make_bodies(0, LoadShape(num_bodies=60), 257)
    letters = [*range(97, 117)]
    vary(bodies, [{0: letters} for _ in bodies], _Letters(), seed=1)
    stops = [body.stop[0] for body in bodies if body.stop]
    assert 5 < len(stops) < 40
    assert all(stop in bytes(letters).decode() for stop in stops)
    assert any(body.sampling.logprobs for body in bodies)
    unspeakable = make_bodies(0, LoadShape(num_bodies=60), 257)
    vary(unspeakable, [{0: [200] * 20} for _ in unspeakable], _Letters(), seed=1)
    assert not any(body.stop for body in unspeakable)
