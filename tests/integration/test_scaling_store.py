"""What routers and the autoscaler tell each other, and the autoscaler's lease, in a store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator

import pytest

from services.common.clock import SystemClock
from services.registry.embedded import EmbeddedStore
from services.registry.reader import RedisRegistryReader
from services.registry.scaling import WORD_MS, Follower, Leadership, ScalingStore
from services.registry.schema import Keys
from services.registry.store_client import StoreAddress
from tests.support.scaling_twin import ScalingTwin
from tests.support.store import running_store

pytestmark = pytest.mark.integration

NOW = 1_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedStore]:
    with running_store() as handle:
        yield handle


@pytest.fixture
async def scaling(
    server: EmbeddedStore, request: pytest.FixtureRequest
) -> AsyncIterator[ScalingStore]:
    """A namespace of its own for each test."""
    reader = RedisRegistryReader(StoreAddress(server.url), "scaling", SystemClock())
    yield ScalingStore(Keys(request.node.name), reader.run, timeout_s=10.0)
    await reader.close()


@pytest.mark.parametrize("seed", range(5))
async def test_scripts_and_twin_agree(scaling: ScalingStore, seed: int) -> None:
    rng, twin, now = random.Random(seed), ScalingTwin(), NOW
    for _ in range(150):
        now += rng.choice([0, 1, 400, 2_000, WORD_MS + 1])
        owner = rng.choice(["a", "b", "c"])
        what = rng.choice(["tell", "told", "lead", "lead", "keep"])
        if what == "tell":
            text = rng.choice(["", "one", "two words"])
            assert await scaling.tell(owner, text, now) == await twin.tell(owner, text, now)
        elif what == "told":
            told = sorted(await scaling.told(now), key=lambda word: word.router_id)
            assert told == sorted(await twin.told(now), key=lambda word: word.router_id)
        elif what == "lead":
            args = (owner, rng.choice([0, 1_000, 3_000]), rng.choice([0, 0, 7]), now)
            assert await scaling.lead(*args) == await twin.lead(*args)
        else:
            token = rng.choice([twin.token, twin.token - 1])
            fields = {"state": f"s{now}", "brief": f"b{now}"}
            args2 = (owner, token, fields, now)
            assert await scaling.keep(*args2) == await twin.keep(*args2)


async def test_one_owner_at_a_time_and_a_token_that_grows(scaling: ScalingStore) -> None:
    """RB-107."""
    first = await scaling.lead("a", 1_000, 0, NOW)
    assert first == Leadership(1, None)
    assert await scaling.lead("b", 1_000, 0, NOW + 600) == Follower("a", 0.4)
    assert await scaling.keep("a", 1, {"state": "windows"}, NOW + 900)
    assert await scaling.lead("b", 1_000, 0, NOW + 1_001) == Leadership(2, "windows")
    assert not await scaling.keep("a", 1, {"state": "late"}, NOW + 1_002)
    assert await scaling.lead("a", 1_000, 1, NOW + 1_003) == Follower("b", 0.998)


async def test_lease_that_ran_out_is_no_license_to_write(scaling: ScalingStore) -> None:
    """Nobody else has it yet, but what its owner began may still be under way."""
    await scaling.lead("a", 1_000, 0, NOW)
    assert not await scaling.keep("a", 1, {"state": "late"}, NOW + 1_001)
    assert await scaling.lead("a", 1_000, 1, NOW + 1_002) == Leadership(2, None)


async def test_owner_takes_its_token_to_a_store_that_was_restarted_empty(
    scaling: ScalingStore,
) -> None:
    assert await scaling.lead("a", 1_000, 41, NOW) == Leadership(42, None)


async def test_lease_given_back_is_free_at_once(scaling: ScalingStore) -> None:
    await scaling.lead("a", 60_000, 0, NOW)
    await scaling.lead("a", 0, 1, NOW + 1)
    assert await scaling.lead("b", 1_000, 0, NOW + 2) == Leadership(2, None)


async def test_routers_hear_whether_an_autoscaler_is_at_work(scaling: ScalingStore) -> None:
    assert not (await scaling.tell("r0", "word", NOW)).is_led
    await scaling.lead("a", 1_000, 0, NOW)
    await scaling.keep("a", 1, {"brief": "sizes"}, NOW)
    brief = await scaling.tell("r0", "word", NOW + 500)
    assert (brief.text, brief.is_led) == ("sizes", True)
    assert not (await scaling.tell("r0", "word", NOW + 1_001)).is_led
    (word,) = await scaling.told(NOW + 2_001)
    assert (word.router_id, word.text, word.age_s) == ("r0", "word", 1.0)


async def test_router_that_goes_is_not_waited_for(scaling: ScalingStore) -> None:
    await scaling.tell("r0", "word", NOW)
    await scaling.tell("r1", "word", NOW)
    await scaling.tell("r0", "", NOW)
    assert [word.router_id for word in await scaling.told(NOW)] == ["r1"]


async def test_status_is_what_the_owner_kept_last(scaling: ScalingStore) -> None:
    assert await scaling.status() == ""
    await scaling.lead("a", 1_000, 0, NOW)
    await scaling.keep("a", 1, {"status": "sizes"}, NOW)
    assert await scaling.status() == "sizes"
