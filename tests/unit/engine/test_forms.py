"""KV that was rounded on its way is used again only where the same rounding applies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.common.sampling import SamplingParams
from services.engine.api import FirstToken, OfferReady, ReceiveWanted, RequestKey, WorkKind
from services.kv.form import UNKNOWN, cache_key
from tests.support.engine_rig import EngineRig, Output, Values, greedy, make_request, prompt_of
from tests.support.fake_model import continued_tokens, fake_values, reference_tokens

FORM = "float32>int8>float32"
PARAMS = greedy(12)


def _rounded(values: Values) -> Values:
    return values - values % 64


def _rounded_tokens(
    prompt: npt.NDArray[np.uint32], params: SamplingParams = PARAMS, choice: int = 0
) -> list[int]:
    """The answer of a single worker that rounds the KV of its prompt this way."""
    first = reference_tokens(prompt, params, choice=choice)[:1]
    values = _rounded(fake_values(prompt))
    return continued_tokens(prompt, values, first, params, choice=choice)


def _first(prompt: npt.NDArray[np.uint32], params: SamplingParams, choice: int = 0) -> FirstToken:
    return FirstToken(choice, reference_tokens(prompt, params, choice=choice)[0])


def _receive_rounded(
    rig: EngineRig,
    key: str,
    prompt: npt.NDArray[np.uint32],
    params: SamplingParams = PARAMS,
    form: str = FORM,
) -> Output:
    request = make_request(key, prompt, params, WorkKind.CONTINUE, kv_form=form)
    output = rig.submit(request)
    rig.step()
    firsts = tuple(_first(prompt, params, choice) for choice in range(params.n))
    rig.receive(key, firsts, FORM, _rounded)
    return output


def _have(output: Output) -> tuple[bool, ...]:
    return output.of(ReceiveWanted)[0].have


def test_a_local_request_never_sees_rounded_blocks() -> None:
    """RB-027: its tokens are those of the plain worker, its cache hit is none."""
    rig, prompt = EngineRig(), prompt_of(72)
    rounded = _receive_rounded(rig, "d", prompt)
    rig.run()
    assert rounded.tokens[0] == _rounded_tokens(prompt)[1:]
    assert _rounded_tokens(prompt) != reference_tokens(prompt, PARAMS), "else this proves nothing"
    local = rig.submit(make_request("l", prompt, PARAMS))
    rig.run()
    assert local.tokens[0] == reference_tokens(prompt, PARAMS)
    assert local.end.cached_tokens == 0
    rig.assert_at_rest()


def test_the_same_rounding_is_reused() -> None:
    rig, prompt = EngineRig(), prompt_of(72)
    _receive_rounded(rig, "a", prompt)
    rig.run()
    longer = np.concatenate((prompt[:64], prompt_of(40, 9)))
    again = _receive_rounded(rig, "b", longer)
    assert _have(again) == (True, True, True, True, False, False)
    rig.run()
    assert again.tokens[0] == _rounded_tokens(longer)[1:]
    rig.assert_at_rest()


def test_exact_blocks_are_not_mixed_with_rounded_ones() -> None:
    rig, prompt = EngineRig(), prompt_of(72)
    rig.submit(make_request("l", prompt, PARAMS))
    rig.run()
    rounded = _receive_rounded(rig, "d", prompt)
    assert not any(_have(rounded))
    rig.run()
    assert rounded.tokens[0] == _rounded_tokens(prompt)[1:]
    exact = rig.submit(make_request("e", prompt, PARAMS, WorkKind.CONTINUE))
    assert all(_have(exact)), "both are kept beside each other"
    rig.step()
    rig.receive("e", (_first(prompt, PARAMS),))
    rig.run()
    assert exact.tokens[0] == reference_tokens(prompt, PARAMS)[1:]
    rig.assert_at_rest()


def test_what_is_computed_over_rounded_kv_is_not_reused() -> None:
    """Its numbers are neither exact nor those a prompt with these tokens would arrive with."""
    rig, prompt, params = EngineRig(), prompt_of(60), greedy(40)
    rounded = _receive_rounded(rig, "d", prompt, params)
    rig.run()
    whole = np.concatenate((prompt, [*_rounded_tokens(prompt, params)[:1], *rounded.tokens[0]]))
    longer = whole.astype(np.uint32)
    again = _receive_rounded(rig, "b", longer)
    assert _have(again) == (True, True, True, False, False, False)
    rig.run()
    assert again.tokens[0] == _rounded_tokens(longer)[1:]
    rig.assert_at_rest()


def test_kv_nobody_can_name_is_used_once() -> None:
    rig, prompt = EngineRig(), prompt_of(72)
    output = rig.submit(make_request("d", prompt, PARAMS, WorkKind.CONTINUE, kv_form=UNKNOWN))
    rig.step()
    rig.receive("d", (_first(prompt, PARAMS),), UNKNOWN, _rounded)
    rig.run()
    assert output.tokens[0] == _rounded_tokens(prompt)[1:]
    load = rig.scheduler.load()
    assert (load.blocks_cached, load.blocks_free) == (0, load.blocks_total)
    rig.assert_at_rest()


def test_a_form_that_was_not_foretold_is_kept_under_its_own_name() -> None:
    """First contact: nothing counts as had, and what comes is found by the next."""
    rig, prompt = EngineRig(), prompt_of(72)
    first = _receive_rounded(rig, "d", prompt, form=UNKNOWN)
    assert not any(_have(first))
    rig.run()
    assert all(_have(_receive_rounded(rig, "e", prompt)))


def test_blocks_of_two_forms_end_the_work_item() -> None:
    rig, prompt = EngineRig(), prompt_of(72)
    _receive_rounded(rig, "a", prompt)
    rig.run()
    output = rig.submit(make_request("b", prompt, PARAMS, WorkKind.CONTINUE, kv_form=FORM))
    rig.step()
    rig.receive("b", (_first(prompt, PARAMS),), "bfloat16>float32")
    assert output.end.error_code == "internal"
    rig.assert_at_rest()


def test_hints_tell_of_exact_blocks_only() -> None:
    """What a router believes to be here is what a LOCAL request may use."""
    rig, prompt = EngineRig(), prompt_of(72)
    rig.pool.cache.take_delta()
    _receive_rounded(rig, "d", prompt)
    rig.run()
    assert rig.pool.cache.take_delta() == ((), ())
    assert rig.pool.cache.hashes() == ()
    exact = make_request("l", prompt, PARAMS)
    rig.submit(exact)
    rig.run()
    assert set(exact.block_hashes) <= set(rig.pool.cache.hashes())
    salted = {cache_key(block_hash, FORM) for block_hash in exact.block_hashes}
    assert len(rig.pool.cache.match([cache_key(h, FORM) for h in exact.block_hashes])) == 4
    assert salted.isdisjoint(rig.pool.cache.hashes())
    added, removed = rig.pool.cache.take_delta()
    assert added == (exact.block_hashes[3],)
    assert removed == ()


def test_choices_share_rounded_blocks() -> None:
    rig, prompt = EngineRig(), prompt_of(40)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=3)
    output = _receive_rounded(rig, "d", prompt, params)
    rig.run()
    expected = {c: _rounded_tokens(prompt, params, c)[1:] for c in range(3)}
    assert output.tokens == expected
    rig.assert_at_rest()


def test_a_preempted_request_goes_on_with_exact_kv() -> None:
    """Its tail was never cached, so the rounding cannot come back: none of it is used again."""
    rig, prompt, params = EngineRig(num_blocks=8, max_num_seqs=1), prompt_of(40), greedy(30)
    rounded = _receive_rounded(rig, "d", prompt, params)
    for _ in range(4):
        rig.step()
    early = rounded.tokens[0].copy()
    rig.submit(make_request("urgent", prompt_of(40, 3), greedy(4), priority=5))
    rig.run()
    assert rig.scheduler.stats.preemptions == 1
    assert rounded.tokens[0][: len(early)] == early == _rounded_tokens(prompt, params)[1:][:4]
    known = [_first(prompt, params).token_id, *early]
    tokens = np.concatenate((prompt, known[:-1])).astype(np.uint32)
    expected = continued_tokens(prompt, fake_values(tokens), known, params)
    assert [known[0], *rounded.tokens[0]] == expected
    rig.assert_at_rest()


def test_rounded_kv_that_moves_on_is_offered_as_such() -> None:
    rig, prompt = EngineRig(), prompt_of(40)
    output = _receive_rounded(rig, "d", prompt)
    rig.step()
    rig.migrate("d")
    assert [offer.is_exact for offer in output.of(OfferReady)] == [False]
    rig.release("d")
    plain = rig.submit(make_request("p", prompt_of(40, 1), PARAMS))
    rig.step()
    rig.migrate("p")
    assert [offer.is_exact for offer in plain.of(OfferReady)] == [True]
    rig.release("p")
    rig.assert_at_rest()


def test_a_failed_receive_of_rounded_kv_is_computed_exactly() -> None:
    rig, prompt = EngineRig(), prompt_of(72)
    _receive_rounded(rig, "a", prompt)
    rig.run()
    output = rig.submit(make_request("b", prompt, PARAMS, WorkKind.CONTINUE, kv_form=FORM))
    assert all(_have(output))
    rig.fail_receive("b", recompute=True)
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, PARAMS)
    assert RequestKey("b") not in rig.scheduler._requests
    rig.assert_at_rest()
