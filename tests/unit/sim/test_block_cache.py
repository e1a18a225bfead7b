from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.sim.block_cache import BlockCache

UNIT = 512


def test_evicts_the_end_of_the_least_recently_used_prompt_first() -> None:
    cache = BlockCache(4)
    assert cache.insert((1, 2), 2 * UNIT, UNIT) == ([(1, UNIT), (2, UNIT)], [])
    cache.insert((5, 6), 2 * UNIT, UNIT)
    cache.insert((1, 2), 2 * UNIT, UNIT)
    assert cache.insert((7,), 100, UNIT) == ([(7, 100)], [(6, UNIT)])
    assert (cache.match((1, 2)), cache.match((5, 6)), cache.match((7,))) == (2, 1, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6)), max_size=40))
def test_stays_within_its_size_and_closed_under_parents(
    uses: list[tuple[int, int, int]],
) -> None:
    """Prompts are a shared root and one of four branches that end at different depths."""
    cache = BlockCache(7)
    prompts: dict[tuple[int, ...], None] = {}
    for branch, shared, own in uses:
        units = (
            *range(shared),
            *range(100 * (branch + 1) + 10 * shared, 100 * (branch + 1) + 10 * shared + own),
        )
        prompts[units] = None
        cache.insert(units, len(units) * UNIT, UNIT)
        assert len(cache) <= 7
        for prompt in prompts:
            held = [cache.match((unit,)) == 1 for unit in prompt]
            assert held == sorted(held, reverse=True)
