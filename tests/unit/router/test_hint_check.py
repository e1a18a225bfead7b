from __future__ import annotations

import pytest

from services.router.hint_check import check_hints
from services.router.policy import PolicyConfig, RequestFacts, choose
from tests.support.registry import make_chain
from tests.unit.router.test_policy import make_view, make_worker

HASHES = make_chain(1, 16)  # 256 tokens


def check(strides: int, cached_tokens: int, num_tokens: int = 260) -> tuple[int, list[int]]:
    """Return the error and which hashes would be withdrawn."""
    facts, view = RequestFacts("r", num_tokens, 8), make_view(make_worker("p0"), make_worker("d0"))
    decision = choose(facts, view, {view.workers[0].worker_id: strides}, PolicyConfig())
    found = check_hints(decision, cached_tokens, num_tokens, HASHES)
    return found.error_tokens, [HASHES.index(lie) for lie in found.lies]


@pytest.mark.parametrize(
    ("strides", "cached", "error", "lies"),
    [
        (4, 256, 0, []),
        (4, 192, 64, [15]),
        (4, 100, 156, [7, 11, 15]),
        (4, 0, 256, [3, 7, 11, 15]),
        (2, 240, -112, []),
        (0, 0, 0, []),
    ],
)
def test_hints_beyond_what_was_cached_are_withdrawn(
    strides: int, cached: int, error: int, lies: list[int]
) -> None:
    """I7: a lying hint costs one request some time, and then it is gone."""
    assert check(strides, cached) == (error, lies)


def test_the_block_with_the_last_token_is_no_lie() -> None:
    """It is always computed: a prompt that is cached as a whole shows one block fewer."""
    assert check(4, 240, num_tokens=256) == (0, [])
