"""The scheduler drives a fake model to the right tokens, whatever happens in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    EndReason,
    FirstToken,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    TokensOut,
    WorkKind,
)
from tests.support.engine_rig import EngineRig, greedy, make_request, prompt_of
from tests.support.fake_model import FakeModel, fake_values, reference_tokens

LENGTHS = (1, 15, 16, 17, 32, 50, 100)


@pytest.mark.parametrize("length", LENGTHS)
def test_generates_the_reference_tokens(length: int) -> None:
    rig = EngineRig()
    prompt = prompt_of(length)
    output = rig.submit(make_request("a", prompt, greedy(20)))
    rig.run()
    assert output.tokens == {0: reference_tokens(prompt, greedy(20))}
    assert output.end.reason is EndReason.LENGTH
    assert output.end.computed_tokens == length
    rig.assert_at_rest()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 128])
def test_tokens_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    """RB-086: also over memory that is NaN until written."""
    prompt = prompt_of(200)
    rig = EngineRig(max_chunk_tokens=chunk, initial_chunk_tokens=chunk)
    output = rig.submit(make_request("a", prompt))
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy())


def test_tokens_do_not_depend_on_the_batch() -> None:
    rig = EngineRig(num_blocks=128)
    lengths = [1, 5, 16, 33, 70, 129]
    outputs = {}
    for idx, length in enumerate(lengths):
        outputs[idx] = rig.submit(make_request(str(idx), prompt_of(length, idx), greedy(12)))
        rig.step()
    rig.run()
    for idx, length in enumerate(lengths):
        assert outputs[idx].tokens[0] == reference_tokens(prompt_of(length, idx), greedy(12))
    assert max(rig.model.batch_sizes) > 3
    rig.assert_at_rest()


def test_second_request_reuses_the_prefix_and_computes_at_least_one_token() -> None:
    rig = EngineRig()
    prompt = prompt_of(48)
    first = rig.submit(make_request("a", prompt))
    rig.run()
    second = rig.submit(make_request("b", prompt))
    rig.run()
    assert first.end.cached_tokens == 0
    assert second.end.cached_tokens == 32  # the third block holds the token to compute
    assert second.end.computed_tokens == 16
    assert second.tokens == first.tokens
    rig.assert_at_rest()


def test_a_prefix_that_many_wait_for_counts_once_in_the_queue() -> None:
    """Routers would see a queue many times too long, and send its prefix elsewhere."""
    rig = EngineRig(num_blocks=128)
    shared = prompt_of(160)
    for idx in range(4):
        prompt = np.concatenate((shared, prompt_of(20, 50 + idx)))
        rig.submit(make_request(str(idx), prompt, greedy(4)))
    assert rig.scheduler.load().queued_uncached_tokens == 180 + 3 * 20
    rig.submit(make_request("other", prompt_of(100, 99), greedy(4)))
    assert rig.scheduler.load().queued_uncached_tokens == 180 + 3 * 20 + 100
    rig.run()
    assert rig.scheduler.load().queued_uncached_tokens == 0
    rig.assert_at_rest()


def test_generated_blocks_are_cached_for_the_next_turn() -> None:
    rig = EngineRig()
    prompt = prompt_of(16)
    first = rig.submit(make_request("a", prompt, greedy(33)))
    rig.run()
    longer = np.concatenate((prompt, np.array(first.tokens[0], dtype=np.uint32)))
    second = rig.submit(make_request("b", longer))
    rig.run()
    assert second.end.cached_tokens == 48
    assert second.tokens[0] == reference_tokens(longer, greedy())


def test_tenants_never_share_blocks() -> None:
    rig = EngineRig()
    prompt = prompt_of(64)
    rig.submit(make_request("a", prompt, tenant="one"))
    rig.run()
    other = rig.submit(make_request("b", prompt, tenant="two"))
    rig.run()
    assert other.end.cached_tokens == 0


def test_equal_prompts_at_once_end_up_sharing_one_chain() -> None:
    rig = EngineRig(num_blocks=32)
    prompt = prompt_of(64)
    outputs = [rig.submit(make_request(key, prompt)) for key in "abc"]
    rig.run()
    assert {tuple(output.tokens[0]) for output in outputs} == {
        tuple(reference_tokens(prompt, greedy()))
    }
    assert rig.scheduler.load().blocks_cached == 4
    rig.assert_at_rest()


def test_stops_at_eos_and_stop_ids_and_respects_ignore_eos_and_min_tokens() -> None:
    prompt = prompt_of(20)
    free = reference_tokens(prompt, greedy(30))
    eos = free[6]
    first_at = free.index(eos)
    for params, expected_reason in (
        (greedy(30), EndReason.STOP),
        (greedy(30, ignore_eos=True), EndReason.LENGTH),
        (greedy(30, ignore_eos=True, stop_token_ids=(eos,)), EndReason.STOP),
        (greedy(first_at + 1), EndReason.STOP),
        (greedy(30, min_tokens=30), EndReason.LENGTH),
    ):
        rig = EngineRig(eos_token_ids=(eos,))
        output = rig.submit(make_request("a", prompt, params))
        rig.run()
        assert output.end.reason is expected_reason
        assert output.tokens[0] == reference_tokens(prompt, params, eos_token_ids=(eos,))
        if params.min_tokens:
            assert eos not in output.tokens[0][:-1]
            assert len(output.tokens[0]) == 30


@pytest.mark.parametrize("length", [5, 16, 40])
def test_choices_share_the_prompt_and_draw_their_own_tokens(length: int) -> None:
    """RB-036, RB-076."""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24, n=3)
    prompt = prompt_of(length)
    rig = EngineRig()
    output = rig.submit(make_request("a", prompt, params))
    rig.step()
    in_use = rig.scheduler.load().blocks_in_use
    assert in_use == length // 16 + (3 if length % 16 else 0)
    rig.run()
    expected = {c: reference_tokens(prompt, params, choice=c) for c in range(3)}
    assert output.tokens == expected
    assert len({tuple(ids) for ids in expected.values()}) > 1
    assert [done.all_choices for done in output.dones] == [False, False, True]
    rig.assert_at_rest()


def test_stage_times_sum_to_the_time_in_the_engine() -> None:
    rig = EngineRig(max_chunk_tokens=16, initial_chunk_tokens=16)
    start = rig.now
    output = rig.submit(make_request("a", prompt_of(50)))
    rig.now += 0.5
    rig.run()
    times = output.end.times
    assert times.queue_us == pytest.approx(500_000, abs=2)
    assert times.prefill_chunks == 4
    # The last step's end, less the millisecond the rig adds after each of two steps.
    total = times.queue_us + times.prefill_us + times.handoff_us + times.decode_us
    assert total == pytest.approx((rig.now - 0.002 - start) * 1e6, abs=2)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_changes", "code"),
    [
        ({"prompt": prompt_of(0)}, "empty_prompt"),
        ({"prompt": prompt_of(8) + 60}, "token_out_of_range"),
        ({"prompt": prompt_of(200)}, "prompt_too_large_for_pool"),
        ({"prompt": prompt_of(100), "sampling": greedy(500)}, "context_length_exceeded"),
        ({"prompt": prompt_of(9), "sampling": greedy(0)}, "invalid_argument"),
        ({"prompt": prompt_of(9), "sampling": greedy(5, n=10**7)}, "invalid_argument"),
        ({"prompt": prompt_of(9), "deadline": 5.0}, "deadline_exceeded"),
    ],
)
def test_refuses_what_can_never_run(request_changes: dict[str, Any], code: str) -> None:
    """RB-068, RB-071, RB-072, RB-073, RB-080: and the next request is served."""
    rig = EngineRig(num_blocks=8, max_model_len=300)
    refused = rig.submit(make_request("bad", **request_changes))
    assert refused.refused is not None
    assert refused.refused.code == code
    good = rig.submit(make_request("good", prompt_of(9)))
    rig.run()
    assert good.tokens[0] == reference_tokens(prompt_of(9), greedy())
    rig.assert_at_rest()


def test_refusal_names_the_limit() -> None:
    rig = EngineRig(num_blocks=8)
    refused = rig.submit(make_request("a", prompt_of(200))).refused
    assert refused is not None
    assert "207" in refused.message
    assert "128" in refused.message


def test_refuses_when_too_many_are_open() -> None:
    rig = EngineRig(max_open_requests=2)
    for key in "ab":
        rig.submit(make_request(key, prompt_of(9)))
    refused = rig.submit(make_request("c", prompt_of(9))).refused
    assert refused is not None
    assert refused.code == "overloaded"


def test_deadline_ends_a_request_that_only_waits() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit(make_request("a", prompt_of(9), greedy(200)))
    rig.step()
    waiting = rig.submit(make_request("b", prompt_of(9), deadline=rig.now + 0.5))
    assert rig.scheduler.next_deadline() == rig.now + 0.5
    rig.now += 0.5
    rig.step()
    assert waiting.end.error_code == "deadline_exceeded"
    assert waiting.end.reason is EndReason.ERROR


# -- routers that lag ---------------------------------------------------------------------------


def test_paused_item_makes_no_tokens_keeps_its_blocks_and_goes_on_as_it_would_have() -> None:
    rig = EngineRig(num_blocks=20)
    lagging = rig.submit(make_request("a", prompt_of(20), greedy(30)))
    other = rig.submit(make_request("b", prompt_of(20, 1), greedy(30)))
    for _ in range(5):
        rig.step()
    rig.pause("a")
    num_tokens, in_use = len(lagging.tokens[0]), rig.scheduler.load().blocks_in_use
    assert num_tokens > 0
    rig.run()
    assert other.tokens[0] == reference_tokens(prompt_of(20, 1), greedy(30))
    assert len(lagging.tokens[0]) == num_tokens
    assert 0 < rig.scheduler.load().blocks_in_use < in_use
    rig.resume("a")
    rig.run()
    assert lagging.tokens[0] == reference_tokens(prompt_of(20), greedy(30))
    rig.assert_at_rest()


def test_paused_item_still_ends_by_cancel_and_by_deadline() -> None:
    rig = EngineRig(num_blocks=20)
    cancelled = rig.submit(make_request("a", prompt_of(20), greedy(30)))
    late = rig.submit(make_request("b", prompt_of(20, 1), greedy(30), deadline=rig.now + 5.0))
    for _ in range(5):
        rig.step()
    rig.pause("a")
    rig.pause("b")
    rig.cancel("a")
    rig.now += 6.0
    rig.run()
    assert cancelled.end.reason is EndReason.CANCELLED
    assert late.end.error_code == "deadline_exceeded"
    rig.assert_at_rest()


# -- memory pressure ----------------------------------------------------------------------------


def expect_short_outputs(rig: EngineRig) -> None:
    """Teach the engine that outputs are short, so that it lets too many in."""
    for _ in range(16):
        rig.scheduler.stats.ended(2)


def test_preempted_decodes_resume_with_the_same_tokens() -> None:
    """RB-014, RB-019: a pool for 2.5 requests, eight of them, nobody waits for ever."""
    rig = EngineRig(num_blocks=11, max_num_seqs=4)
    expect_short_outputs(rig)
    outputs = {}
    for idx in range(8):
        outputs[idx] = rig.submit(make_request(str(idx), prompt_of(20, idx), greedy(45)))
    rig.run()
    for idx, output in outputs.items():
        assert output.tokens[0] == reference_tokens(prompt_of(20, idx), greedy(45))
    assert rig.scheduler.stats.preemptions > 0
    rig.assert_at_rest()


def test_preempted_choices_resume_with_the_same_tokens() -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, n=3)
    rig = EngineRig(num_blocks=9)
    expect_short_outputs(rig)
    output = rig.submit(make_request("a", prompt_of(20), params))
    rig.run()
    assert rig.scheduler.stats.preemptions > 0
    assert output.tokens == {c: reference_tokens(prompt_of(20), params, choice=c) for c in range(3)}
    rig.assert_at_rest()


def test_only_blocks_computed_after_the_resume_are_published() -> None:
    """RB-016: chunks of 32, preempted after the first, resumed with a chunk of 40."""
    prompt = prompt_of(50)
    rig = EngineRig(num_blocks=4, max_chunk_tokens=32, initial_chunk_tokens=32)
    low = rig.submit(make_request("low", prompt, greedy(8)))
    rig.step()
    other = rig.submit(make_request("high", prompt_of(40, 1), greedy(8), priority=1))
    while not other.num_ends:
        rig.step()
    assert rig.scheduler.stats.preemptions == 1
    rig.run()
    second = rig.submit(make_request("second", prompt, greedy(8)))
    rig.run()
    reference = reference_tokens(prompt, greedy(8))
    assert low.tokens[0] == second.tokens[0] == reference
    for block_hash, values in zip(
        make_request("x", prompt).block_hashes,
        fake_values(prompt).reshape(-1)[:48].reshape(3, 16),
        strict=True,
    ):
        block_id = rig.pool.cache.get(block_hash)
        if block_id is not None:
            assert rig.cells[block_id, 1].tolist() == values.tolist()


def test_prefill_preempted_in_its_last_chunk_is_computed_again_before_the_handoff() -> None:
    """RB-013: no hand-off ever starts with an empty block list."""
    rig = EngineRig(num_blocks=5, max_chunk_tokens=32, initial_chunk_tokens=32)
    prompt = prompt_of(60)
    high = make_request("high", prompt_of(40, 1), greedy(4), priority=1)
    output = rig.submit(make_request("p", prompt, greedy(1, n=2), WorkKind.PREFILL))
    rig.step()
    rig.submit(high)
    rig.run()
    assert rig.scheduler.stats.preemptions == 1
    assert output.tokens[0] == output.tokens[1] == reference_tokens(prompt, greedy(1))
    rig.assert_at_rest()


def test_a_lent_prefill_is_never_preempted() -> None:
    rig = EngineRig(num_blocks=5, max_chunk_tokens=32, initial_chunk_tokens=32)
    output = rig.submit(make_request("p", prompt_of(60), greedy(4), WorkKind.PREFILL))
    rig.step()
    assert output.of(OfferReady)
    high = rig.submit(make_request("high", prompt_of(40, 1), greedy(4), priority=5))
    rig.run()
    assert rig.scheduler.stats.preemptions == 0
    assert not high.num_ends
    rig.release("p")
    rig.run()
    assert high.tokens[0] == reference_tokens(prompt_of(40, 1), greedy(4))
    rig.assert_at_rest()


def test_high_priority_takes_the_place_of_low() -> None:
    """RB-084: the victim goes on later with the same tokens."""
    rig = EngineRig(max_num_seqs=2)
    low = [rig.submit(make_request(k, prompt_of(9, i), greedy(60))) for i, k in enumerate("ab")]
    for _ in range(5):
        rig.step()
    high = rig.submit(make_request("h", prompt_of(20, 9), greedy(4), priority=1))
    rig.step()
    assert high.tokens[0]
    rig.run()
    for idx, output in enumerate(low):
        assert output.tokens[0] == reference_tokens(prompt_of(9, idx), greedy(60))


def test_blocks_a_victim_shares_with_its_successor_do_not_count_as_gain() -> None:
    """RB-085: preempting one whose blocks would be kept anyway frees nothing."""
    rig = EngineRig(num_blocks=9)
    rig.submit(make_request("other", prompt_of(20, 8), greedy(12), priority=1))
    low = rig.submit(make_request("low", prompt_of(64), greedy(12)))
    while rig.scheduler.load().blocks_in_use < 7:
        rig.step()
    high = rig.submit(make_request("high", prompt_of(128), greedy(2), priority=1))
    rig.step()
    assert rig.scheduler.stats.preemptions == 0
    rig.run()
    assert low.tokens[0] == reference_tokens(prompt_of(64), greedy(12))
    assert high.tokens[0] == reference_tokens(prompt_of(128), greedy(2))


def test_a_preempted_request_is_not_overtaken_for_ever() -> None:
    """RB-083: a stream of short requests does not starve a long one."""
    rig = EngineRig(num_blocks=14, max_num_seqs=4)
    long = rig.submit(make_request("long", prompt_of(30, 99), greedy(120)))
    for idx in range(60):
        rig.submit(make_request(f"s{idx}", prompt_of(17, idx), greedy(6)))
        rig.step()
    ended_after = 0
    while not long.num_ends:
        rig.step()
        ended_after += 1
    assert ended_after < 120
    rig.run()
    assert long.tokens[0] == reference_tokens(prompt_of(30, 99), greedy(120))


def test_small_requests_pass_a_blocked_head_but_not_for_ever() -> None:
    rig = EngineRig(num_blocks=8, head_grace_s=1.0)
    rig.submit(make_request("busy", prompt_of(30), greedy(60)))
    rig.step()
    big = rig.submit(make_request("big", prompt_of(100, 1), greedy(4), priority=0))
    rig.now += 0.1
    small = rig.submit(make_request("small", prompt_of(5, 2), greedy(2)))
    rig.step()
    assert small.tokens
    assert not big.tokens
    rig.now += 2.0
    late = rig.submit(make_request("late", prompt_of(5, 3), greedy(2)))
    rig.step()
    assert not late.tokens
    rig.run()
    assert big.tokens[0] == reference_tokens(prompt_of(100, 1), greedy(4))


# -- handing off --------------------------------------------------------------------------------


def test_prefill_offers_after_the_first_chunk_and_lends_until_released() -> None:
    rig = EngineRig(max_chunk_tokens=32, initial_chunk_tokens=32)
    prompt = prompt_of(72)
    output = rig.submit(make_request("p", prompt, greedy(8), WorkKind.PREFILL))
    rig.run()
    kinds = [type(event) for event in output.events]
    assert kinds == [
        OfferReady,
        BlocksSealed,
        BlocksSealed,
        TokensOut,
        PrefillFinished,
        ChoiceDone,
    ]
    sealed = output.of(BlocksSealed)
    assert [(event.lo, len(event.block_ids)) for event in sealed] == [(0, 2), (2, 2)]
    finished = output.of(PrefillFinished)[0]
    assert finished.tail_valid_tokens == 8
    assert finished.tail_block is not None
    assert rig.pool.is_sealed(finished.tail_block)
    assert finished.first == (FirstToken(0, reference_tokens(prompt, greedy(1))[0]),)
    assert output.end.handed_off
    assert rig.scheduler.load().blocks_in_use == 5
    rig.release("p")
    rig.assert_at_rest()
    assert rig.scheduler.load().blocks_cached == 4


def test_prefix_hits_are_lent_too() -> None:
    rig = EngineRig()
    prompt = prompt_of(64)
    rig.submit(make_request("a", prompt))
    rig.run()
    output = rig.submit(make_request("p", prompt, greedy(8), WorkKind.PREFILL))
    rig.run()
    (sealed,) = output.of(BlocksSealed)
    assert (sealed.lo, len(sealed.block_ids)) == (0, 4)
    assert output.of(PrefillFinished)[0].tail_block is None
    assert output.end.cached_tokens == 48


def test_nothing_is_offered_for_one_token() -> None:
    """RB-071: exactly one token from the prefill leg, no KV left pinned."""
    rig = EngineRig(max_chunk_tokens=32, initial_chunk_tokens=32)
    output = rig.submit(make_request("p", prompt_of(72), greedy(1), WorkKind.PREFILL))
    rig.run()
    assert not output.of(OfferReady)
    assert output.end.reason is EndReason.LENGTH
    assert not output.end.handed_off
    assert len(output.tokens[0]) == 1
    rig.assert_at_rest()


def test_prefill_whose_choices_all_end_at_once_withdraws_the_offer() -> None:
    prompt = prompt_of(72)
    eos = reference_tokens(prompt, greedy(1))[0]
    rig = EngineRig(max_chunk_tokens=32, initial_chunk_tokens=32, eos_token_ids=(eos,))
    output = rig.submit(make_request("p", prompt, greedy(8, n=2), WorkKind.PREFILL))
    rig.run()
    assert [(d.choice, d.reason, d.all_choices) for d in output.dones] == [
        (0, EndReason.STOP, False),
        (1, EndReason.STOP, True),
    ]
    assert not output.of(PrefillFinished)
    assert output.of(CancelSource)
    assert rig.scheduler.load().blocks_in_use == 5
    rig.release("p")
    rig.assert_at_rest()


def test_only_choices_that_go_on_are_handed_off() -> None:
    prompt = prompt_of(20)
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=8, n=4)
    firsts = [reference_tokens(prompt, params, choice=c)[0] for c in range(4)]
    eos = firsts[1]
    going_on = [c for c in range(4) if firsts[c] != eos]
    rig = EngineRig(eos_token_ids=(eos,))
    output = rig.submit(make_request("p", prompt, params, WorkKind.PREFILL))
    rig.run()
    finished = output.of(PrefillFinished)[0]
    assert [token.choice for token in finished.first] == going_on
    assert output.end.handed_off
    assert output.num_ends == 1
    rig.release("p")
    rig.assert_at_rest()


def test_source_lost_before_the_end_of_prefill_still_gives_the_first_token() -> None:
    rig = EngineRig(max_chunk_tokens=32, initial_chunk_tokens=32)
    prompt = prompt_of(72)
    output = rig.submit(make_request("p", prompt, greedy(8), WorkKind.PREFILL))
    rig.step()
    rig.release("p")
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(1))
    assert not output.of(PrefillFinished)
    assert output.end.handed_off
    rig.assert_at_rest()


# -- receiving ----------------------------------------------------------------------------------


def _first(
    prompt: npt.NDArray[np.uint32], params: SamplingParams, choices: tuple[int, ...] = (0,)
) -> tuple[FirstToken, ...]:
    return tuple(FirstToken(c, reference_tokens(prompt, params, choice=c)[0]) for c in choices)


@pytest.mark.parametrize("length", LENGTHS)
def test_continue_decodes_from_the_second_token(length: int) -> None:
    rig = EngineRig()
    prompt, params = prompt_of(length), greedy(20)
    output = rig.submit(make_request("d", prompt, params, WorkKind.CONTINUE))
    rig.step()
    assert [type(event) for event in output.events] == [ReceiveWanted, BlocksReserved]
    rig.receive("d", _first(prompt, params))
    rig.run()
    assert output.first_index == {0: 1}
    assert output.tokens[0] == reference_tokens(prompt, params)[1:]
    assert output.end.computed_tokens == 0
    rig.assert_at_rest()


def test_continue_receives_only_what_it_lacks() -> None:
    rig = EngineRig()
    params = greedy(10)
    rig.submit(make_request("a", prompt_of(40), params))
    rig.run()
    prompt = prompt_of(72)
    prompt[:40] = prompt_of(40)
    output = rig.submit(make_request("d", prompt, params, WorkKind.CONTINUE))
    rig.step()
    (wanted,), (reserved,) = output.of(ReceiveWanted), output.of(BlocksReserved)
    assert wanted.have == (True, True, False, False)
    assert [block_id is None for block_id in reserved.block_ids] == [True, True, False, False]
    assert reserved.tail_block is not None
    rig.receive("d", _first(prompt, params))
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, params)[1:]
    assert output.end.cached_tokens == 32


def test_received_blocks_join_the_cache_and_equal_receives_share_them() -> None:
    rig = EngineRig()
    prompt, params = prompt_of(40), greedy(6)
    outputs = [rig.submit(make_request(k, prompt, params, WorkKind.CONTINUE)) for k in "ab"]
    rig.step()
    for key in "ab":
        rig.receive(key, _first(prompt, params))
    rig.run()
    for output in outputs:
        assert output.tokens[0] == reference_tokens(prompt, params)[1:]
    assert rig.scheduler.load().blocks_cached == 2
    rig.assert_at_rest()


def test_continue_with_choices() -> None:
    """RB-036: the three choices of one hand-off equal those of a single worker."""
    rig = EngineRig()
    prompt = prompt_of(40)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=4)
    output = rig.submit(make_request("d", prompt, params, WorkKind.CONTINUE))
    rig.step()
    rig.receive("d", _first(prompt, params, (1, 2, 3)))  # choice 0 ended on the other side
    rig.run()
    assert output.tokens == {c: reference_tokens(prompt, params, choice=c)[1:] for c in (1, 2, 3)}
    assert output.num_ends == 1
    rig.assert_at_rest()


@pytest.mark.parametrize("is_reserved", [False, True])
def test_failed_receive_is_recomputed_from_the_first_token(is_reserved: bool) -> None:
    rig = EngineRig()
    prompt, params = prompt_of(40), SamplingParams(temperature=1.0, seed=2, max_tokens=9, n=2)
    output = rig.submit(make_request("d", prompt, params, WorkKind.CONTINUE))
    if is_reserved:
        rig.step()
        rig.cells[:] = np.nan  # what was half received is not to be used
    rig.fail_receive("d", recompute=True)
    rig.run()
    assert output.tokens == {c: reference_tokens(prompt, params, choice=c) for c in range(2)}
    rig.assert_at_rest()


@pytest.mark.parametrize("failed", range(10))
@pytest.mark.parametrize("is_cached", [False, True])
def test_recompute_after_any_block_failed_to_come_gives_the_same_tokens(
    failed: int, is_cached: bool
) -> None:
    """RB-015: blocks before it came right, it came wrong, and the rest did not come at all."""
    rig = EngineRig()
    prompt, params = prompt_of(160), greedy(32)
    if is_cached:
        rig.submit(make_request("before", prompt[:64], greedy(1)))
        rig.run()
    output = rig.submit(make_request("d", prompt, params, WorkKind.CONTINUE))
    rig.step()
    reserved = rig.reserved["d"]
    rig.write_kv("d", reserved)
    for idx, block_id in enumerate((*reserved.block_ids, reserved.tail_block)):
        if block_id is not None and idx >= failed:
            rig.cells[block_id] = 7.5 if idx == failed else np.nan
    rig.fail_receive("d", recompute=True)
    rig.run()
    assert output.tokens == {0: reference_tokens(prompt, params)}
    # What came of it is not in the prefix cache either.
    again = rig.submit(make_request("again", prompt, params))
    rig.run()
    assert again.tokens == output.tokens
    rig.assert_at_rest()


def test_lent_blocks_keep_their_request_open_until_they_come_back() -> None:
    """RB-108: a worker that leaves counts what decode still has to pull."""
    rig = EngineRig()
    rig.submit(make_request("p", prompt_of(40), greedy(), WorkKind.PREFILL))
    rig.run()
    assert "p" in rig.lent
    assert rig.scheduler.load().requests_open == 1
    rig.release("p")
    assert rig.scheduler.load().requests_open == 0
    rig.assert_at_rest()


def test_failed_receive_without_recompute_ends_with_its_code() -> None:
    rig = EngineRig()
    output = rig.submit(make_request("d", prompt_of(40), greedy(), WorkKind.CONTINUE))
    rig.step()
    rig.fail_receive("d", recompute=False)
    assert output.end.error_code == "handoff_failed"
    rig.assert_at_rest()


def test_several_receives_cannot_block_each_other() -> None:
    """RB-017: 40 blocks, four receives of 16: each gets all or nothing, all four finish."""
    rig = EngineRig(num_blocks=40)
    params = greedy(4)
    outputs = {
        key: rig.submit(make_request(key, prompt_of(250, i), params, WorkKind.CONTINUE))
        for i, key in enumerate("abcd")
    }
    rig.step()
    assert len(rig.reserved) == 2
    for i, key in enumerate("abcd"):
        rig.step()
        rig.receive(key, _first(prompt_of(250, i), params))
        rig.run()
    for i, output in enumerate(outputs.values()):
        assert output.tokens[0] == reference_tokens(prompt_of(250, i), params)[1:]
    rig.assert_at_rest()


def test_waiting_receives_that_share_cached_blocks_cannot_block_each_other() -> None:
    """RB-017: held prefixes are bounded so that one of them can always go on."""
    rig = EngineRig(num_blocks=10)
    params = greedy(2)
    for seed in (1, 2):
        rig.submit(make_request(f"warm{seed}", prompt_of(80, seed), params))
        rig.run()
    prompts = [np.concatenate((prompt_of(80, seed), prompt_of(48, 50 + seed))) for seed in (1, 2)]
    outputs = [
        rig.submit(make_request(str(i), prompt, params, WorkKind.CONTINUE))
        for i, prompt in enumerate(prompts)
    ]
    rig.step()
    order = list(rig.reserved)
    assert len(order) == 1
    rig.receive(order[0], _first(prompts[int(order[0])], params))
    rig.run()
    (other,) = rig.reserved
    rig.receive(other, _first(prompts[int(other)], params))
    rig.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_tokens(prompt, params)[1:]
    rig.assert_at_rest()


# -- cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(WorkKind))
@pytest.mark.parametrize("when", range(7))
@pytest.mark.parametrize("mid_step", [False, True])
def test_cancel_at_every_step_boundary(kind: WorkKind, when: int, mid_step: bool) -> None:
    """RB-004: abort is legal in every state, ends once, and every block comes back."""
    rig = EngineRig(max_chunk_tokens=32, initial_chunk_tokens=32)
    prompt, params = prompt_of(72), greedy(3)
    output = rig.submit(make_request("a", prompt, params, kind))
    for idx in range(when + 1):
        if idx == 2 and kind is WorkKind.CONTINUE and "a" in rig.reserved:
            rig.receive("a", _first(prompt, params))
        is_last = idx == when
        rig.step(between=(lambda: rig.cancel("a")) if mid_step and is_last else None)
    rig.cancel("a")
    rig.cancel("a")
    assert output.num_ends == 1
    if "a" in rig.lent:
        assert output.of(CancelSource)
        assert rig.scheduler.load().blocks_in_use > 0
        rig.release("a")
    if "a" in rig.opened:
        assert output.of(CancelReceive)
        rig.fail_receive("a", recompute=True)
    rig.run()
    rig.assert_at_rest()


def test_received_after_cancel_only_gives_the_blocks_back() -> None:
    rig = EngineRig()
    prompt = prompt_of(40)
    output = rig.submit(make_request("d", prompt, greedy(), WorkKind.CONTINUE))
    rig.step()
    rig.cancel("d")
    assert rig.scheduler.load().blocks_in_use == 3
    rig.receive("d", _first(prompt, greedy()))
    rig.assert_at_rest()
    assert not output.tokens


def test_cancel_of_one_leaves_others_alone() -> None:
    rig = EngineRig()
    prompt = prompt_of(50)
    keep = rig.submit(make_request("keep", prompt, greedy(20)))
    rig.submit(make_request("gone", prompt, greedy(20)))
    rig.step()
    rig.cancel("gone")
    rig.run()
    assert keep.tokens[0] == reference_tokens(prompt, greedy(20))


# -- faults -------------------------------------------------------------------------------------


def test_a_request_that_breaks_the_model_fails_alone() -> None:
    """I10: a fault in one request never fails another."""
    rig = EngineRig(model=FakeModel(poison=2))
    good = rig.submit(make_request("good", prompt_of(30), greedy(10)))
    bad_prompt = prompt_of(30, 5)
    bad_prompt[7] = 2
    bad = rig.submit(make_request("bad", bad_prompt))
    rig.run()
    assert bad.end.error_code == "internal"
    assert good.tokens[0] == reference_tokens(prompt_of(30), greedy(10))
    rig.assert_at_rest()
