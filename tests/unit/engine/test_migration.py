"""A running request moves to another engine and goes on as if it had never moved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CancelSource,
    EndReason,
    MigrateRefused,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    RequestKey,
    ResumedChoice,
    WorkKind,
)
from services.kv.hashing import HashScope, chain_hashes
from tests.support.engine_rig import MODEL_DIGEST, EngineRig, Output, make_request, prompt_of
from tests.support.fake_model import FAKE_LAYOUT, reference_tokens

SIZE = FAKE_LAYOUT.block_size
PENALISED = SamplingParams(
    temperature=0.9,
    seed=7,
    max_tokens=40,
    top_p=0.9,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    min_tokens=12,
)


def _decode_until(rig: EngineRig, output: Output, count: int) -> None:
    while len(output.tokens.get(0, ())) < count:
        rig.step()


def _move(source: EngineRig, target: EngineRig, key: str) -> Output:
    """Stop a decoding work item and carry it over."""
    source.migrate(key)
    return _carry(source, target, key)


def _carry(source: EngineRig, target: EngineRig, key: str) -> Output:
    """Carry what is offered over as the transfer layer does: block by block, then FINAL."""
    events = source.outputs[key]
    offer, final = events.of(OfferReady)[-1], events.of(PrefillFinished)[-1]
    lent = events.of(BlocksSealed)[-1].block_ids if events.of(BlocksSealed) else ()
    request = source.scheduler._requests[RequestKey(key)]
    output = target.submit(
        make_request(
            key,
            request.prompt,
            request.source.sampling,
            WorkKind.CONTINUE,
            generated=offer.generated,
        )
    )
    target.step()
    assert output.of(ReceiveWanted)[0].block_hashes == offer.block_hashes
    reserved = target.reserved.pop(key)
    assert isinstance(reserved, BlocksReserved)
    del target.opened[key]
    tails = (final.tail_block, reserved.tail_block)
    for ours, theirs in zip((*lent, tails[0]), (*reserved.block_ids, tails[1]), strict=True):
        assert ours is None or source.pool.is_sealed(ours)
        if ours is not None and theirs is not None:
            target.cells[theirs] = source.cells[ours]
    target.scheduler.received(RequestKey(key), final.first, target.now)
    target.collect()
    source.release(key)
    source.assert_at_rest()
    return output


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 39])
def test_a_moved_request_gives_the_tokens_of_one_that_stayed(length: int, count: int) -> None:
    """RB-086: over every position of the block's edge, with penalties and a seed."""
    source, target = EngineRig(), EngineRig()
    prompt = prompt_of(length)
    before = source.submit(make_request("m", prompt, PENALISED))
    _decode_until(source, before, count)
    after = _move(source, target, "m")
    target.run()
    expected = reference_tokens(prompt, PENALISED)
    assert before.end.handed_off
    assert before.tokens[0] == expected[:count]
    assert after.first_index == {0: count}
    assert after.tokens[0] == expected[count:]
    assert after.end.reason is EndReason.LENGTH
    assert after.end.computed_tokens == 0, "KV was carried, not computed again"
    target.assert_at_rest()


def test_a_request_moves_again_and_again() -> None:
    rigs = [EngineRig() for _ in range(4)]
    prompt = prompt_of(30)
    output = rigs[0].submit(make_request("m", prompt, PENALISED))
    got: list[int] = []
    for source, target in pairwise(rigs):
        _decode_until(source, output, 9)
        got += output.tokens[0]
        output = _move(source, target, "m")
    rigs[-1].run()
    assert got + output.tokens[0] == reference_tokens(prompt, PENALISED)


def test_the_offer_names_the_hashes_of_prompt_and_output() -> None:
    rig = EngineRig()
    prompt = prompt_of(20)
    output = rig.submit(make_request("m", prompt, PENALISED))
    _decode_until(rig, output, 30)
    rig.migrate("m")
    (offer,) = output.of(OfferReady)
    known = [*prompt.tolist(), *offer.generated][: offer.num_tokens]
    scope = HashScope(MODEL_DIGEST)
    whole = prompt_of(len(known))
    whole[:] = known
    assert offer.block_hashes == chain_hashes(scope, whole)
    assert len(offer.block_hashes) == (20 + 29) // SIZE


def test_a_failed_receive_computes_prompt_and_output_again() -> None:
    target = EngineRig()
    prompt = prompt_of(40)
    expected = reference_tokens(prompt, PENALISED)
    request = make_request(
        "m", prompt, PENALISED, WorkKind.CONTINUE, generated=tuple(expected[:11])
    )
    output = target.submit(request)
    target.step()
    target.fail_receive("m", recompute=True)
    target.run()
    assert output.first_index == {0: 11}
    assert output.tokens[0] == expected[11:]
    assert output.end.computed_tokens == 40 + 11
    target.assert_at_rest()


def test_a_whole_item_goes_on_from_tokens_made_elsewhere() -> None:
    """The way on when the KV is lost: nothing the client has is drawn again."""
    rig = EngineRig()
    prompt = prompt_of(33)
    expected = reference_tokens(prompt, PENALISED)
    output = rig.submit(make_request("w", prompt, PENALISED, generated=tuple(expected[:17])))
    rig.run()
    assert output.first_index == {0: 17}
    assert output.tokens[0] == expected[17:]
    assert output.end.times.decode_us > 0
    rig.assert_at_rest()


@pytest.mark.parametrize("length", [1, 15, 16, 50])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 38])
def test_a_request_under_way_is_prefilled_again_and_handed_on(length: int, count: int) -> None:
    """Its decode worker died: another prefill worker makes one more token and offers the rest."""
    source, target = EngineRig(max_chunk_tokens=16), EngineRig()
    prompt = prompt_of(length)
    expected = reference_tokens(prompt, PENALISED)
    before = source.submit(
        make_request("m", prompt, PENALISED, WorkKind.PREFILL, generated=tuple(expected[:count]))
    )
    source.run()
    assert (before.first_index, before.tokens) == ({0: count}, {0: [expected[count]]})
    assert before.end.handed_off
    (offer,) = before.of(OfferReady)
    assert offer.generated == tuple(expected[: count + 1])
    after = _carry(source, target, "m")
    target.run()
    assert after.tokens[0] == expected[count + 1 :]
    target.assert_at_rest()


def test_a_request_that_lacks_one_token_is_not_handed_on() -> None:
    rig = EngineRig()
    prompt = prompt_of(20)
    expected = reference_tokens(prompt, PENALISED)
    output = rig.submit(
        make_request("m", prompt, PENALISED, WorkKind.PREFILL, generated=tuple(expected[:39]))
    )
    rig.run()
    assert output.tokens == {0: expected[39:]}
    assert (output.end.reason, output.end.handed_off) == (EndReason.LENGTH, False)
    assert not output.of(OfferReady)
    rig.assert_at_rest()


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_choices_under_way_go_on_where_each_of_them_was(num_blocks: int) -> None:
    """One is over, one has no token yet; with few blocks they take turns."""
    rig = EngineRig(num_blocks)
    prompt = prompt_of(37)
    params = replace(PENALISED, n=4)
    expected = [reference_tokens(prompt, params, choice=choice) for choice in range(4)]
    counts = {0: 17, 1: 0, 3: 39}
    resumed = tuple(ResumedChoice(c, tuple(expected[c][:count])) for c, count in counts.items())
    output = rig.submit(make_request("m", prompt, params, resumed=resumed))
    rig.run()
    assert output.first_index == counts
    assert output.tokens == {c: expected[c][count:] for c, count in counts.items()}
    assert sorted(done.choice for done in output.dones) == sorted(counts)
    assert [done.all_choices for done in output.dones] == [False, False, True]
    rig.assert_at_rest()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": WorkKind.PREFILL, "resumed": (ResumedChoice(0, (1,)),)},
        {"resumed": (ResumedChoice(0, (1,)), ResumedChoice(0, (2,)))},
        {"resumed": (ResumedChoice(2, (1,)),)},
        {"resumed": (ResumedChoice(1, tuple(range(40))),)},
        {"generated": (1, 2)},
    ],
)
def test_nonsense_about_choices_under_way_is_refused(fields: dict[str, Any]) -> None:
    rig = EngineRig()
    output = rig.submit(make_request("m", prompt_of(5), replace(PENALISED, n=2), **fields))
    assert output.refused is not None
    assert output.refused.code == "invalid_argument"
    rig.assert_at_rest()


def test_another_newest_token_than_the_work_items_ends_it() -> None:
    source, target = EngineRig(), EngineRig()
    prompt = prompt_of(20)
    expected = reference_tokens(prompt, PENALISED)
    wrong = (*expected[:4], (expected[4] + 1) % 61)
    output = target.submit(make_request("m", prompt, PENALISED, WorkKind.CONTINUE, generated=wrong))
    target.step()
    before = source.submit(make_request("m", prompt, PENALISED))
    _decode_until(source, before, 5)
    source.migrate("m")
    target.receive("m", before.of(PrefillFinished)[0].first)
    assert output.end.error_code == "internal"
    target.assert_at_rest()


@pytest.mark.parametrize("state", ["unknown", "prefilling", "choices", "handoff", "moved"])
def test_what_cannot_move_goes_on(state: str) -> None:
    rig = EngineRig(max_chunk_tokens=16, initial_chunk_tokens=16)
    prompt = prompt_of(40)
    params = SamplingParams(temperature=0.0, max_tokens=9, n=2 if state == "choices" else 1)
    kind = WorkKind.PREFILL if state == "handoff" else WorkKind.WHOLE
    output = rig.submit(make_request("m", prompt, params, kind))
    if state == "unknown":
        rig.scheduler.migrate(RequestKey("nobody"), rig.now)
        (refused,) = rig.scheduler.take_events()
        assert isinstance(refused, MigrateRefused)
        return
    rig.step()
    if state in ("choices", "moved"):
        _decode_until(rig, output, 3)
    if state == "moved":
        rig.migrate("m")
    num_ends = output.num_ends
    rig.migrate("m")
    assert len(output.of(MigrateRefused)) == 1
    assert output.num_ends == num_ends
    if state == "moved":
        rig.release("m")
    rig.run()
    if state == "handoff":
        rig.release("m")
    elif state != "moved":
        assert output.tokens[0] == reference_tokens(prompt, params)
    rig.assert_at_rest()


def test_cancel_after_the_move_withdraws_the_offer_without_a_second_end() -> None:
    rig = EngineRig()
    output = rig.submit(make_request("m", prompt_of(40), PENALISED))
    _decode_until(rig, output, 5)
    rig.migrate("m")
    rig.cancel("m")
    assert output.num_ends == 1
    assert len(output.of(CancelSource)) == 1
    rig.release("m")
    rig.assert_at_rest()
