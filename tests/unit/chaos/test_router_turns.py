"""The plan of `isthmus chaos router`: everyone, every fault, in a drawn order."""

from __future__ import annotations

from itertools import islice

from services.chaos.router import ACTIONS, STORE, turns

NAMES = ["prefill-0", "decode-0", "router-0", STORE]


def test_a_round_is_everyone_with_every_action_once() -> None:
    size = len(NAMES) * len(ACTIONS)
    drawn = list(islice(turns(3, NAMES), 2 * size))
    wanted = sorted((name, action) for name in NAMES for action in ACTIONS)
    for half in (drawn[:size], drawn[size:]):
        assert sorted((turn.name, turn.action) for turn in half) == wanted
    assert drawn[:size] != drawn[size:]


def test_the_plan_depends_on_the_seed_alone() -> None:
    first, again, other = (list(islice(turns(seed, NAMES), 20)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_only_workers_are_frozen_past_the_silence_that_costs_them_their_work() -> None:
    drawn = list(islice(turns(0, NAMES), 600))
    assert max(turn.hold_s for turn in drawn if turn.name == "decode-0") > 2.4
    assert max(turn.hold_s for turn in drawn if turn.name in ("router-0", STORE)) <= 2.0
