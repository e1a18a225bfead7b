"""Blocks of a peer's pool read in place: right tokens, moved home in time, not counted as ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.ids import BlockId
from services.engine.api import AttachReleased, FirstToken, MigrateRefused, RequestKey, WorkKind
from services.engine.attachment import Attachment, num_to_move, will_move
from services.kv.attached import AttachedKv
from tests.support.attached_peer import SIZE, AttachedPeer, receive_attached
from tests.support.engine_rig import EngineRig, Output, greedy, make_config, make_request, prompt_of
from tests.support.fake_model import reference_tokens


def receive(
    rig: EngineRig, key: str, kv: AttachedKv, first: tuple[FirstToken, ...] | None = None
) -> None:
    """Finish a receive, with the right first token unless told otherwise."""
    token = reference_tokens(rig.prompts[key], greedy(1))[0]
    receive_attached(rig, key, kv, first or (FirstToken(0, token),))


def submit(rig: EngineRig, key: str, prompt: Any, max_tokens: int) -> Output:
    """Submit a work item that continues elsewhere's prefill, and let it reserve its blocks."""
    output = rig.submit(make_request(key, prompt, greedy(max_tokens), WorkKind.CONTINUE))
    rig.step()
    return output


def released(output: Output) -> list[bool]:
    return [event.is_intact for event in output.of(AttachReleased)]


@pytest.mark.parametrize("length", [16, 17, 47, 100])
@pytest.mark.parametrize("max_tokens", [2, 12, 40])
def test_gives_the_tokens_of_a_whole_prefill(length: int, max_tokens: int) -> None:
    rig, peer = EngineRig(attach_move_after_tokens=16, attach_move_blocks=2), AttachedPeer()
    prompt = prompt_of(length)
    output = submit(rig, "r", prompt, max_tokens)
    receive(rig, "r", peer.attach(prompt))
    rig.run()
    expected = reference_tokens(prompt, greedy(max_tokens))
    assert output.tokens[0] == expected[1:]
    assert released(output) == [True]
    rig.assert_at_rest()


def test_a_short_answer_moves_nothing_and_takes_no_memory() -> None:
    """The memory of the prompt is the peer's alone, and none of it is cached here."""
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(100)
    submit(rig, "r", prompt, 10)
    receive(rig, "r", peer.attach(prompt))
    for _ in range(5):
        rig.step()
        load = rig.scheduler.load()
        assert (load.blocks_in_use, load.blocks_attached) == (1, 6)  # the tail; the full ones
    rig.run()
    assert rig.scheduler.load().attach_moved == 0
    assert rig.scheduler.load().blocks_cached == 0
    assert len(rig.pool.cache) == 0
    rig.assert_at_rest()


def test_a_long_answer_moves_some_blocks_a_step_and_then_lets_go() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=4, attach_move_blocks=2), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 40)
    receive(rig, "r", peer.attach(prompt))
    left = []
    for _ in range(8):
        rig.step()
        left.append(rig.scheduler.load().blocks_attached)
    assert left == [6, 6, 6, 6, 4, 2, 0, 0]
    assert released(output) == [True]
    peer.cells[:] = np.nan  # nothing reads it any more
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(40))[1:]
    rig.assert_at_rest()


def test_moved_blocks_enter_the_prefix_cache_and_serve_others() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=1), AttachedPeer()
    prompt = prompt_of(100)
    submit(rig, "r", prompt, 30)
    receive(rig, "r", peer.attach(prompt))
    rig.run()
    again = rig.submit(make_request("s", prompt, greedy(5)))
    rig.run()
    assert again.end.cached_tokens == 96
    assert again.tokens[0] == reference_tokens(prompt, greedy(5))
    rig.assert_at_rest()


def test_blocks_that_are_here_already_are_shared_and_not_copied() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=1, attach_move_blocks=8), AttachedPeer()
    prompt = prompt_of(100)
    first, second = submit(rig, "a", prompt, 30), submit(rig, "b", prompt, 30)
    receive(rig, "a", peer.attach(prompt))
    receive(rig, "b", peer.attach(prompt))
    rig.run()
    assert first.tokens == second.tokens
    assert rig.pool.counts().cached == 8  # six of the prompt, two of the answer, once
    rig.assert_at_rest()


def test_a_cached_prefix_stays_ours_and_the_rest_is_attached() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=3), AttachedPeer()
    prompt = prompt_of(100)
    rig.submit(make_request("w", prompt[:40], greedy(1)))
    rig.run()
    output = submit(rig, "r", prompt, 30)
    receive(rig, "r", peer.attach(prompt, range(2, 6)))
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(30))[1:]
    rig.assert_at_rest()


def test_blocks_copied_among_attached_ones_are_sealed_in_their_turn() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=3), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 40)
    receive(rig, "r", peer.attach(prompt, [0, 1, 4, 5]))
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(40))[1:]
    rig.assert_at_rest()


def test_a_block_that_changes_while_a_step_reads_it_gives_no_token() -> None:
    """RB-010, RB-015: KV overwritten under its reader never becomes a token."""
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 12)
    kv = peer.attach(prompt)
    receive(rig, "r", kv)
    rig.step()
    before = list(output.tokens[0])
    rig.step(between=lambda: None)
    rig.on_step = lambda _plan: peer.reuse(kv, 3)
    rig.step()
    rig.on_step = None
    assert len(output.tokens[0]) == len(before) + 1
    assert released(output) == [False]
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(12))[1:]
    assert rig.scheduler.load().attach_changed == 1
    rig.assert_at_rest()


@pytest.mark.parametrize("how", ["generation", "content"])
def test_a_changed_block_is_not_moved(how: str) -> None:
    rig, peer = EngineRig(attach_move_after_tokens=1), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 12)
    kv = peer.attach(prompt)
    receive(rig, "r", kv)
    rig.step()
    if how == "generation":
        peer.reuse(kv)
    else:
        peer.cells[kv.blocks[0], 0, 3] += 1  # K only: the fake model reads V
    rig.step()
    assert released(output) == [False]
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(12))[1:]
    assert len(rig.pool.cache) > 0
    rig.assert_at_rest()


def test_move_at_once_when_the_owner_wants_them_back() -> None:
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 12)
    receive(rig, "r", peer.attach(prompt))
    rig.step()
    rig.scheduler.move_attached(RequestKey("r"))
    rig.step()
    assert rig.scheduler.load().blocks_attached == 0
    assert released(output) == [True]
    peer.cells[:] = np.nan
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(12))[1:]


def test_without_room_to_move_it_gives_way_and_is_computed_again() -> None:
    rig, peer = EngineRig(num_blocks=16), AttachedPeer()
    prompt, other = prompt_of(100), prompt_of(130, seed=9)
    output = submit(rig, "r", prompt, 12)
    receive(rig, "r", peer.attach(prompt))
    rig.step()
    rig.submit(make_request("big", other, greedy(60)))
    rig.step()
    rig.scheduler.move_attached(RequestKey("r"))
    rig.run()
    assert released(output) == [True]
    assert output.tokens[0] == reference_tokens(prompt, greedy(12))[1:]
    assert rig.outputs["big"].tokens[0] == reference_tokens(other, greedy(60))
    rig.assert_at_rest()


@pytest.mark.parametrize("when", ["before", "first", "moving", "moved"])
def test_cancel_lets_go_once(when: str) -> None:
    rig, peer = EngineRig(attach_move_after_tokens=4, attach_move_blocks=1), AttachedPeer()
    prompt = prompt_of(100)
    output = submit(rig, "r", prompt, 100)
    if when == "before":
        rig.cancel("r")  # the receiver finishes anyway
    receive(rig, "r", peer.attach(prompt))
    if when != "before":
        for _ in range({"first": 1, "moving": 7, "moved": 20}[when]):
            rig.step()
        rig.cancel("r")
    assert released(output) == [True]
    assert output.num_ends == 1
    rig.assert_at_rest()


def test_a_receive_nobody_waits_for_any_more_lets_go() -> None:
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(32)
    output = rig.outputs["gone"] = Output()
    rig.scheduler.received(RequestKey("gone"), (), rig.now, "", peer.attach(prompt))
    rig.collect()
    assert released(output) == [True]


@pytest.mark.parametrize("first", [FirstToken(7, 1), FirstToken(0, 1 << 31)])
def test_a_final_that_does_not_fit_lets_go(first: FirstToken) -> None:
    """A choice that was not asked for, or a token that would end the step of a whole batch."""
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(50)
    output = submit(rig, "r", prompt, 5)
    receive(rig, "r", peer.attach(prompt), (first,))
    assert released(output) == [True]
    assert output.end.error_code == "internal"
    rig.assert_at_rest()


def test_several_choices_copy_first() -> None:
    """Forks share blocks, and a peer's block is nobody's to share."""
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(40)
    sampling = replace(greedy(6), n=3, temperature=0.8, seed=4)
    output = rig.submit(make_request("r", prompt, sampling, WorkKind.CONTINUE))
    rig.step()
    firsts = tuple(
        FirstToken(choice, reference_tokens(prompt, sampling, choice=choice)[0])
        for choice in range(3)
    )
    receive(rig, "r", peer.attach(prompt), firsts)
    assert released(output) == [True]
    rig.run()
    for choice in range(3):
        assert output.tokens[choice] == reference_tokens(prompt, sampling, choice=choice)[1:]
    rig.assert_at_rest()


def test_migration_moves_everything_in_first() -> None:
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(50)
    output = submit(rig, "r", prompt, 30)
    receive(rig, "r", peer.attach(prompt))
    rig.step()
    rig.migrate("r")
    assert released(output) == [True]
    assert all(block < rig.pool.num_blocks for block in rig.lent_blocks("r"))
    assert not output.of(MigrateRefused)
    rig.release("r")
    rig.assert_at_rest()


def test_migration_is_refused_when_a_block_has_changed() -> None:
    rig, peer = EngineRig(), AttachedPeer()
    prompt = prompt_of(50)
    output = submit(rig, "r", prompt, 6)
    kv = peer.attach(prompt)
    receive(rig, "r", kv)
    rig.step()
    peer.reuse(kv)
    rig.migrate("r")
    assert len(output.of(MigrateRefused)) == 1
    assert released(output) == [False]
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(6))[1:]
    rig.assert_at_rest()


def test_tokens_are_never_written_to_a_peers_block() -> None:
    rig, peer = EngineRig(attach_move_after_tokens=4, attach_move_blocks=1), AttachedPeer()
    prompt = prompt_of(48)  # no tail: the next token begins a block of ours
    kv = peer.attach(prompt)
    before = peer.memory.blocks.copy()
    output = submit(rig, "r", prompt, 40)
    receive(rig, "r", kv)
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, greedy(40))[1:]
    assert (peer.memory.blocks == before).all()


def test_seven_peers_at_once() -> None:
    rig = EngineRig(num_blocks=128, attach_move_after_tokens=6)
    outputs, prompts = {}, {}
    for pool_id in range(1, 8):
        key = f"r{pool_id}"
        prompts[key] = prompt_of(20 + 9 * pool_id, seed=pool_id)
        outputs[key] = submit(rig, key, prompts[key], 12)
        receive(rig, key, AttachedPeer(pool_id=pool_id).attach(prompts[key]))
    rig.run()
    for key, output in outputs.items():
        assert output.tokens[0] == reference_tokens(prompts[key], greedy(12))[1:], key
    rig.assert_at_rest()


def test_a_number_may_come_to_mean_another_pool() -> None:
    rig = EngineRig()
    for seed in range(3):
        prompt = prompt_of(40, seed=seed)
        output = submit(rig, f"r{seed}", prompt, 5)
        receive(rig, f"r{seed}", AttachedPeer().attach(prompt))
        rig.run()
        assert output.tokens[0] == reference_tokens(prompt, greedy(5))[1:]


def test_when_blocks_move() -> None:
    config = make_config(
        attach_move_after_tokens=10, attach_move_blocks=3, attach_move_blocks_urgent=5
    )
    attached = Attachment(AttachedPeer().attach(prompt_of(7 * SIZE)))
    assert [num_to_move(attached, n, config) for n in (1, 10, 11, 99)] == [0, 0, 3, 3]
    assert [will_move(attached, n, config) for n in (10, 11)] == [0, 7]
    attached.num_moved = 6
    assert num_to_move(attached, 11, config) == 1
    attached.num_moved, attached.is_urgent = 1, True
    assert num_to_move(attached, 1, config) == 5
    assert will_move(attached, 1, config) == 6


def test_unused_reserved_blocks_go_back_at_once() -> None:
    rig, peer = EngineRig(num_blocks=12), AttachedPeer()
    prompt = prompt_of(150)
    submit(rig, "r", prompt, 3)
    assert rig.scheduler.load().blocks_in_use == 10
    receive(rig, "r", peer.attach(prompt))
    assert rig.scheduler.load().blocks_in_use == 1
    assert rig.pool.num_refs(BlockId(0)) <= 1
