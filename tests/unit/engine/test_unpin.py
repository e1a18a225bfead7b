"""Blocks of a hand-off that its reader has pulled come back early when memory is short."""

from __future__ import annotations

import pytest

from services.engine.api import RequestKey, UnpinWanted, WorkKind
from tests.support.engine_rig import EngineRig, greedy, make_request, prompt_of
from tests.support.fake_model import reference_tokens


def _handed_off(num_blocks: int, length: int) -> EngineRig:
    rig = EngineRig(num_blocks=num_blocks)
    rig.submit(make_request("p", prompt_of(length), greedy(8), WorkKind.PREFILL))
    rig.run()
    return rig


def test_nothing_is_asked_back_while_memory_lasts() -> None:
    rig = _handed_off(64, 100)
    rig.submit(make_request("q", prompt_of(50, 1), greedy(8)))
    rig.run()
    assert rig.outputs["p"].of(UnpinWanted) == []
    rig.release("p")
    rig.assert_at_rest()


def test_a_waiting_request_gets_the_blocks_that_were_pulled() -> None:
    """Chunk-wise release: the reader is slow, the queue behind it need not wait for its end."""
    rig = _handed_off(10, 130)  # 8 full blocks and a tail
    prompt = prompt_of(70, 1)
    output = rig.submit(make_request("q", prompt, greedy(8)))
    assert rig.run() == 0, "no room yet"
    assert len(rig.outputs["p"].of(UnpinWanted)) == 1
    lent = rig.lent_blocks("p")
    rig.unpin("p", lent[:2])
    assert rig.run() == 0
    rig.unpin("p", lent[2:5])
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(8))
    assert all(rig.pool.num_refs(block_id) for block_id in lent[5:])
    assert rig.scheduler.load().blocks_in_use == 3 + 1
    assert len(rig.outputs["p"].of(UnpinWanted)) == 1, "asked once is enough"
    rig.release("p")
    rig.assert_at_rest()


def test_unpinned_blocks_stay_cached_until_they_are_needed() -> None:
    rig = _handed_off(64, 130)
    rig.unpin("p", rig.lent_blocks("p")[:5])
    load = rig.scheduler.load()
    assert (load.blocks_cached, load.blocks_in_use) == (5, 3 + 1)
    again = rig.submit(make_request("q", prompt_of(90), greedy(8)))
    rig.run()
    assert again.end.cached_tokens == 5 * 16
    rig.release("p")
    rig.assert_at_rest()


def test_a_block_others_have_built_on_keeps_those_before_it_pinned() -> None:
    """No cached block may outlive the one before it."""
    rig = _handed_off(64, 64)
    longer = prompt_of(200, 0)
    longer[:64] = prompt_of(64)
    rig.submit(make_request("q", longer, greedy(8)))
    rig.run()  # its blocks are cached now, after the lent ones
    lent = rig.lent_blocks("p")
    rig.unpin("p", lent[:2])
    assert [rig.pool.num_refs(block_id) for block_id in lent] == [1, 1, 1, 1]
    rig.unpin("p", lent)
    assert [rig.pool.num_refs(block_id) for block_id in lent] == [0, 0, 0, 0]
    rig.release("p")
    rig.assert_at_rest()


def test_a_lent_block_keeps_its_generation_until_it_comes_back() -> None:
    rig = _handed_off(10, 130)
    lent = rig.lent_blocks("p")
    gens = [rig.pool.gen(block_id) for block_id in lent]
    rig.unpin("p", lent[:6])
    for index in range(4):
        rig.submit(make_request(f"q{index}", prompt_of(80, index + 1), greedy(8)))
        rig.run()
    assert [rig.pool.gen(block_id) for block_id in lent[6:]] == gens[6:]
    assert all(
        rig.pool.gen(block_id) != gen for block_id, gen in zip(lent[:6], gens[:6], strict=True)
    ), "whoever reads one of these late sees another generation"
    rig.release("p")
    rig.assert_at_rest()


def test_while_prefill_runs_nothing_may_be_given_back() -> None:
    rig = EngineRig(max_chunk_tokens=16, initial_chunk_tokens=16)
    rig.submit(make_request("p", prompt_of(100), greedy(8), WorkKind.PREFILL))
    rig.step()
    rig.step()
    with pytest.raises(RuntimeError, match="running"):
        rig.scheduler.source_unpinned(RequestKey("p"), rig.lent_blocks("p"))
    rig.scheduler.source_unpinned(RequestKey("nobody"), ())
    rig.run()
    rig.release("p")
    rig.assert_at_rest()


def test_a_cancelled_hand_off_takes_what_is_left() -> None:
    rig = _handed_off(10, 130)
    rig.cancel("p")
    rig.unpin("p", rig.lent_blocks("p")[:3])
    assert rig.scheduler.load().blocks_in_use == 6
    rig.release("p")
    rig.assert_at_rest()


def test_a_block_two_hand_offs_share_keeps_those_before_it_pinned() -> None:
    """Found by the transfer simulator: both let go of the parents, and the child stayed cached."""
    rig = EngineRig(num_blocks=16)
    for key in ("p", "q"):
        rig.submit(make_request(key, prompt_of(64), greedy(8), WorkKind.PREFILL))
        rig.run()
    shared = rig.lent_blocks("p")
    assert rig.lent_blocks("q") == shared
    for key in ("p", "q"):
        rig.unpin(key, shared[:1])
    assert rig.pool.num_refs(shared[0]), "its child is in use and cached"
    rig.pool.check_integrity()
    rig.release("p")
    rig.release("q")
    rig.assert_at_rest()
