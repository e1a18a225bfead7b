from __future__ import annotations

import asyncio
import json
from typing import Any

from services.common.clock import ManualClock
from services.registry.brief import AutoscalerBrief, Hold, PoolBrief, decode_brief, encode_brief
from services.router.config import RouterConfig
from services.router.scaling_link import KEEP_S, ScalingLink
from services.router.signals import RouterSignals, Waits
from tests.support.scaling_twin import ScalingTwin

POOL = PoolBrief("decode", 1, 2, 3, 4, "budget", "why")
BRIEF = AutoscalerBrief("chat", "Auto", 7, (POOL,), ("Stale",), Hold(9, 60.0))


class RouterTwin:
    """The part of Router that is told and asked."""

    def __init__(self) -> None:
        self.config = RouterConfig(router_id="r0")
        self.signals = RouterSignals(0.0)
        self.held: list[Hold | None] = []

    def waits(self) -> Waits:
        return Waits(num_open=2)

    def hold(self, hold: Hold | None) -> None:
        self.held.append(hold)


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = ScalingTwin(self.clock)
        self.router = RouterTwin()
        router: Any = self.router
        store: Any = self.store
        self.link = ScalingLink(router, store, self.clock)

    async def lead(self, lease_s: int, brief: AutoscalerBrief = BRIEF) -> None:
        await self.store.lead("a", lease_s * 1000, 0)
        await self.store.keep("a", self.store.token, {"brief": encode_brief(brief)})


async def test_router_tells_its_word_and_takes_what_is_to_be_held() -> None:
    rig = Rig()
    await rig.lead(10)
    await rig.link.tell_once()
    (word,) = await rig.store.told()
    assert (word.router_id, json.loads(word.text)["open"]) == ("r0", 2)
    assert rig.router.held == [Hold(9, 60.0)]
    assert rig.link.brief == BRIEF


async def test_requests_are_held_on_while_an_autoscaler_is_restarted_and_no_longer() -> None:
    rig = Rig()
    await rig.lead(1)
    await rig.link.tell_once()
    rig.clock.advance(KEEP_S)
    await rig.link.tell_once()
    assert rig.router.held[-1] == Hold(9, 60.0)
    rig.clock.advance(1.0)
    await rig.link.tell_once()
    assert rig.router.held[-1] is None
    assert rig.link.brief is None


async def test_nothing_is_held_by_an_autoscaler_that_does_not_say_so() -> None:
    rig = Rig()
    await rig.lead(10, AutoscalerBrief("chat", "Auto", 7))
    await rig.link.tell_once()
    assert rig.router.held == [None]


async def test_link_without_a_store_starts_all_the_same_and_router_that_ends_says_so() -> None:
    rig = Rig()
    rig.store.is_down = True
    await rig.link.start()
    await rig.link.stop()
    rig.store.is_down = False
    await rig.link.start()
    await asyncio.sleep(0)
    assert len(await rig.store.told()) == 1
    await rig.link.stop()
    assert await rig.store.told() == ()


def test_brief_of_a_store_that_lies_is_none() -> None:
    good = json.loads(encode_brief(BRIEF))
    assert decode_brief(json.dumps(good)) == BRIEF
    bad_pool = {**good["pools"][0], "ready": -1}
    bad: tuple[dict[str, object], ...] = (
        {"pools": [bad_pool]}, {"hold": {}}, {"pools": 7}, {"conditions": None}
    )  # fmt: skip
    for changed in bad:
        assert decode_brief(json.dumps({**good, **changed})) is None
    assert decode_brief("") is None
    assert decode_brief("[" * 100_000) is None
