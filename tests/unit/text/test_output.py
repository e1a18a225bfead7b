"""Text of one choice: UTF-8 never splits, stop strings never leak, nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text.detokenizer import whole_text
from services.text.output import ChoiceText, TextDelta
from services.text.stop_strings import StopStrings

EOS = 256


class PieceModel:
    """Ids 0..255 are single bytes, EOS is special, further ids are given pieces."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self._pieces = pieces

    def text_bytes(self, token_id: int) -> bytes:
        if token_id == EOS:
            return b""
        return bytes([token_id]) if token_id < 256 else self._pieces[token_id - 257]

    def whole_text(self, token_id: int) -> str | None:
        return whole_text(self.text_bytes(token_id))


def run(
    pieces: Sequence[bytes], stop: Sequence[str], cuts: Sequence[int] = (), min_tokens: int = 0
) -> tuple[list[str], str | None, int]:
    """Feed pieces as tokens, in frames cut at `cuts`; give chunks, stop and counted tokens."""
    choice = ChoiceText(PieceModel(pieces), stop, min_tokens)
    ids = [257 + index for index in range(len(pieces))]
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    frames = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    deltas: list[TextDelta] = []
    for frame in frames:
        deltas.append(choice.push(frame))
        if deltas[-1].stop is not None:
            break
    deltas.append(choice.finish())
    stops = [delta.stop for delta in deltas if delta.stop is not None]
    assert len(stops) <= 1
    counted = sum(delta.num_tokens for delta in deltas)
    return [delta.text for delta in deltas], next(iter(stops), None), counted


def reference(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The match complete first wins; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(set(stop), key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


def test_stop_string_over_four_tokens_leaves_no_text() -> None:
    """RB-064, first case."""
    chunks, stop, counted = run([b"DEF", b"G", b"HI", b"J", b"more"], ["DEFGHIJ"], [1, 2, 3, 4])
    assert (chunks, stop, counted) == ([""] * 5, "DEFGHIJ", 4)


def test_near_miss_of_a_stop_string_is_delivered_whole() -> None:
    """RB-064, second case."""
    chunks, stop, counted = run([b"DEF", b"G", b"HI", b"J"], ["DEFGHIK"], [1, 2, 3])
    assert ("".join(chunks), stop, counted) == ("DEFGHIJ", None, 4)


@given(st.lists(st.integers(1, 6), max_size=7))
def test_stop_string_never_leaks_whatever_the_split(widths: list[int]) -> None:
    """RB-064, every possible split of the text."""
    text = b"ab DEFGHIJ tail"
    pieces, position = [], 0
    for width in [*widths, len(text)]:
        pieces.append(text[position : position + width])
        position += width
    chunks, stop, _ = run([piece for piece in pieces if piece], ["DEFGHIJ"], range(20))
    assert ("".join(chunks), stop) == ("ab ", "DEFGHIJ")


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n日", max_size=3), max_size=12),
    stop=st.lists(st.text("ab\n日", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 12), max_size=6),
)
def test_frames_join_to_the_text_of_one_piece(
    pieces: list[str], stop: list[str], cuts: list[int]
) -> None:
    """RB-065: stream equals non-stream, for any text, stop set and split."""
    encoded = [piece.encode() for piece in pieces]
    chunks, met, _ = run(encoded, stop, cuts)
    assert ("".join(chunks), met) == reference("".join(pieces), stop)


@pytest.mark.parametrize("ending", ["one\nt", "one\ntw"])
def test_held_back_text_comes_out_at_the_end(ending: str) -> None:
    """RB-065: the output ends with a proper prefix of a stop string."""
    chunks, stop, _ = run([ending.encode()], ["\ntwo"])
    assert ("".join(chunks), stop) == (ending, None)
    assert chunks[0] == "one"


def test_characters_split_over_tokens_come_out_whole() -> None:
    """RB-066: one byte a token."""
    source = "dďábel 🫠 龜 ש"
    chunks, _, _ = run([bytes([byte]) for byte in source.encode()], [], range(40))
    assert "".join(chunks) == source
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_cut_emoji_at_the_end_becomes_one_replacement() -> None:
    """RB-067, end: length cuts a four-byte character."""
    chunks, _, _ = run([b"hi ", b"\xf0\x9f\xab"], [])
    assert chunks == ["hi ", "\ufffd"]


def test_invalid_bytes_in_the_middle_replace_only_themselves() -> None:
    """RB-067, middle."""
    chunks, _, _ = run([b"a\xff", b"\xc3", b"\xa9", b"\xf0\x9f", b"b"], [], range(9))
    assert "".join(chunks) == "a\ufffdé\ufffdb"


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_any_bytes_decode_as_the_whole_would(raw: bytes, cuts: list[int]) -> None:
    """RB-067: never an exception, never another text than decoding at once gives."""
    chunks, _, _ = run([bytes([byte]) for byte in raw], [], cuts)
    assert "".join(chunks) == raw.decode("utf-8", errors="replace")


def test_special_tokens_add_no_text_and_count() -> None:
    choice = ChoiceText(PieceModel(), ())
    assert choice.push([ord("a"), EOS]) == TextDelta("a", None, 2)
    assert choice.finish() == TextDelta("")


def test_tokens_after_the_stop_do_not_count() -> None:
    choice = ChoiceText(PieceModel(), ("b",))
    assert choice.push([ord("a"), ord("b"), ord("c")]) == TextDelta("a", "b", 2)
    assert choice.push([ord("d")]) == TextDelta("")
    assert choice.finish() == TextDelta("")


def test_stop_strings_wait_for_min_tokens() -> None:
    chunks, stop, counted = run([b"x", b"x", b"y", b"x"], ["x"], (), min_tokens=2)
    assert ("".join(chunks), stop, counted) == ("xxy", "x", 4)


def test_longest_of_two_stops_ending_together_wins() -> None:
    scan = StopStrings(["b", "ab"]).push("xaby")
    assert (scan.text, scan.stop) == ("x", "ab")


def test_overlapping_start_of_a_stop_string_is_found() -> None:
    matcher = StopStrings(["aab"])
    assert matcher.push("aaa").text == "a"
    scan = matcher.push("b")
    assert (scan.text, scan.stop) == ("", "aab")
