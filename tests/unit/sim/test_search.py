from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from services.sim.search import PairSearch, least_pool

LIMIT = 24


@given(st.integers(1, 40), st.integers(1, 60))
def test_the_least_pool_is_found_from_any_guess(enough: int, guess: int) -> None:
    asked: list[int] = []

    def is_enough(n: int) -> bool:
        asked.append(n)
        return n >= enough

    found = least_pool(is_enough, guess, LIMIT)
    assert found == (enough if enough <= LIMIT else None)
    assert len(asked) <= 11
    assert max(asked) <= LIMIT


@given(
    st.lists(st.integers(1, LIMIT + 6), min_size=1, max_size=LIMIT),
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
@example(line=[1] * 22 + [2, 2], prices=(0.25, 1.0), guess=(1, 2))
def test_the_cheapest_pair_of_a_falling_frontier_is_found(
    line: list[int], prices: tuple[float, float], guess: tuple[int, int]
) -> None:
    """Whatever is enough stays enough with more; the line says how many the second pool needs."""
    need = sorted(line, reverse=True)
    first = LIMIT - len(need) + 1

    def is_enough(p: int, d: int) -> bool:
        assert 1 <= p <= LIMIT
        assert 1 <= d <= LIMIT
        return p >= first and d >= need[p - first]

    def cost(p: int, d: int) -> float:
        return prices[0] * p + prices[1] * d

    every = itertools.product(range(1, LIMIT + 1), repeat=2)
    best = min((cost(p, d) for p, d in every if is_enough(p, d)), default=None)
    found = PairSearch(is_enough, cost, LIMIT).run(guess)
    assert (found is None) == (best is None)
    if found is not None:
        assert is_enough(*found)
        assert cost(*found) == best


def test_few_pairs_are_tried() -> None:
    asked = set()

    def is_enough(p: int, d: int) -> bool:
        asked.add((p, d))
        return p >= 37 and d >= 11

    assert PairSearch(is_enough, lambda p, d: p + d, 200).run((20, 20)) == (37, 11)
    assert len(asked) < 25
