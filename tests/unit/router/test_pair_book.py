from __future__ import annotations

import pytest

from services.common.ids import WorkerId
from services.router.pair_book import PairBook

P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))


def test_two_failures_break_a_pair_and_no_other() -> None:
    """A link may be bad while both its ends are healthy."""
    book = PairBook()
    book.failed((P0, D0), 10.0)
    assert book.links(10.0).broken == frozenset()
    book.failed((P0, D0), 11.0)
    assert book.links(11.0).broken == {(P0, D0)}


def test_a_broken_pair_is_tried_again_by_one_request() -> None:
    book = PairBook()
    for now in (10.0, 11.0):
        book.failed((P0, D0), now)
    assert book.links(20.9).broken == {(P0, D0)}
    assert book.links(21.0).broken == frozenset()
    book.sent((P0, D0), 21.0)
    assert book.links(21.1).broken == {(P0, D0)}
    book.exchanged((P0, D0), 640, 0.01, 21.5)
    assert book.links(21.6).broken == frozenset()


def test_single_failures_among_successes_break_nothing() -> None:
    book = PairBook()
    for i in range(40):
        book.exchanged((P0, D0), 640, 0.01, float(i))
        if i % 4 == 0:
            book.failed((P0, D0), float(i))
    assert book.links(40.0).broken == frozenset()


def test_first_handoffs_are_no_measure() -> None:
    book = PairBook()
    for slow in (9.0, 9.0):
        book.exchanged((P0, D0), 1000, slow, 1.0)
    assert book.links(1.0).token_s == 0.0
    book.exchanged((P0, D0), 1000, 0.5, 1.0)
    assert book.links(1.0).token_s == 0.0005


def test_small_handoffs_are_no_measure() -> None:
    book = PairBook()
    for _ in range(5):
        book.exchanged((P0, D0), 32, 0.5, 1.0)
    assert book.links(1.0).token_s == 0.0


def test_only_unlike_pairs_have_a_price_of_their_own() -> None:
    book = PairBook()
    for pair, handoff_s in (((P0, D0), 1.0), ((P0, D1), 1.1), ((P1, D0), 0.9), ((P1, D1), 8.0)):
        for _ in range(3):
            book.exchanged(pair, 1000, handoff_s, 1.0)
    links = book.links(1.0)
    assert links.token_s == pytest.approx(0.00105)
    assert links.pairs == {(P1, D1): 0.008}


def test_a_worker_that_went_is_forgotten_and_the_book_is_bounded() -> None:
    book = PairBook(max_pairs=2)
    for pair in ((P0, D0), (P0, D1), (P1, D0)):
        book.failed(pair, 1.0)
    assert len(book) == 2
    book.forget(P0)
    assert len(book) == 1
