"""Limits of tenants over several routers: the script, and what happens without a store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import redis

from services.common.clock import ManualClock, SystemClock
from services.common.config import AuthSettings, IsthmusConfig
from services.common.errors import StoreUnavailable
from services.common.ids import Incarnation
from services.common.secret import Secret
from services.gateway.main import _RouterProcess
from services.gateway.namespaces import Namespaces
from services.gateway.rate_limits import RateLimited, RateLimits
from services.registry.embedded import EmbeddedStore
from services.registry.limits import LimitStore, limits_call, parse_limits
from services.registry.reader import RedisRegistryReader
from services.registry.schema import Keys
from services.registry.store_client import StoreAddress
from services.resilience.tenant_limiter import Claim, Shared, TenantLimits
from tests.support.limits_twin import LimitsTwin
from tests.support.store import running_store
from tests.support.toy_model import make_toy_model

pytestmark = pytest.mark.integration

SECRET = Secret(b"s" * 32)
NAMES = Namespaces(SECRET)
LIFE = Incarnation(7)
TENANTS = """
default: {requests_per_s: 0.001, request_burst: 20, tokens_per_min: 6000, max_streams: 6}
tenants:
  big: {requests_per_s: 1000}
"""


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    with running_store() as handle:
        yield handle


@pytest.mark.parametrize("seed", range(10))
def test_script_and_twin_agree(store: EmbeddedStore, seed: int) -> None:
    rng, twin, keys = random.Random(seed), LimitsTwin(), Keys(f"twin{seed}")
    now_ms = 1_000_000
    shapes = [TenantLimits(3, 7, 600, 4), TenantLimits(0.1, 0, 0, 2), TenantLimits(0, 0, 7e6, 0)]
    with closing(redis.Redis.from_url(store.url, protocol=2)) as client:
        for _ in range(120):
            now_ms += rng.choice([-500, 0, 1, 200, 3000, 59_000, 61_000])
            router = rng.choice(["r0", "r1", "r2"])
            claims = [
                (
                    f"t{i}",
                    Claim(
                        "x", rng.randrange(2), rng.randrange(5), rng.randrange(-200, 900),
                        rng.randrange(3), rng.randrange(-100, 100), rng.randrange(4), shape,
                    ),
                )
                for i, shape in enumerate(shapes)
                if rng.random() < 0.7
            ]  # fmt: skip
            call = limits_call(keys, (router, LIFE), claims, now_ms)
            raw = client.eval(call.script.text, len(call.keys), *call.keys, *call.args)
            expected = tuple(twin.share(router, name, claim, now_ms) for name, claim in claims)
            assert parse_limits(raw, len(claims)) == expected
        for key in client.scan_iter(match=f"{keys.prefix}*"):
            assert 0 < client.pttl(key) <= 300_000


@pytest.mark.parametrize(
    "answer", [None, 7, [], [b"x"], [b"1 2 3"], ["1 2 3 4"], [b"nan 1 0 1"], [b"1 2 -3 1"], [[]]]
)
def test_an_answer_that_is_none_counts_as_none(answer: object) -> None:
    with pytest.raises(StoreUnavailable):
        parse_limits(answer, 1)


class Routers:
    """Two routers of one cluster."""

    def __init__(
        self,
        store: EmbeddedStore,
        tenants: Path,
        namespace: str,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        clock, address = SystemClock(), StoreAddress(store.url)
        self.readers = [RedisRegistryReader(address, namespace, clock) for _ in range(2)]
        self.stores = [
            LimitStore(f"r{i}", reader.run, timeout_s=5.0, keys=Keys(namespace))
            for i, reader in enumerate(self.readers)
        ]
        self.clock = ManualClock()
        names = Namespaces(SECRET, shared)
        self.limits = [RateLimits(tenants, names, self.clock) for _ in range(2)]

    async def share(self) -> None:
        for limits, store in zip(self.limits, self.stores, strict=True):
            await limits.share_once(store)

    async def close(self) -> None:
        for reader in self.readers:
            await reader.close()

    def let_in(self, router: int, count: int, tenant: str = "acme") -> int:
        """Requests of one tenant that a router lets in at once."""
        passed = 0
        for _ in range(count):
            try:
                with self.limits[router].admitted(tenant):
                    passed += 1
            except RateLimited:
                continue
        return passed


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


async def test_two_routers_spend_one_budget(store: EmbeddedStore, tenants_file: Path) -> None:
    routers = Routers(store, tenants_file, "shared")
    try:
        assert routers.let_in(0, 15) == 15
        await routers.share()
        assert routers.let_in(1, 1) == 1  # the first request here: only now it asks for the tenant
        await routers.share()
        assert routers.let_in(1, 100) == 4  # twenty are all there is
        await routers.share()
        await routers.share()  # the first has asked before the second told
        assert routers.let_in(0, 100) == 0  # it has heard of what the other one spent
        with routers.limits[0].admitted("big"), routers.limits[1].admitted("big"):
            await routers.share()
    finally:
        await routers.close()


async def test_streams_are_counted_over_all_routers(
    store: EmbeddedStore, tenants_file: Path
) -> None:
    routers = Routers(store, tenants_file, "streams")
    try:
        contexts = [routers.limits[0].admitted("acme") for _ in range(5)]
        for context in contexts:
            context.__enter__()
        with routers.limits[1].admitted("acme"):
            await routers.share()
            await routers.share()
            with pytest.raises(RateLimited) as caught, routers.limits[1].admitted("acme"):
                pass
            assert caught.value.verdict.reason == "streams"
        for context in contexts:
            context.__exit__(None, None, None)
        await routers.share()
        assert routers.let_in(1, 1) == 1
    finally:
        await routers.close()


async def test_without_a_store_each_router_goes_on_alone(
    tenants_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        async def share(self, claims: object) -> tuple[()]:
            raise StoreUnavailable("no answer within 250 ms")

    clock = ManualClock()
    limits = RateLimits(tenants_file, NAMES, clock)
    for _ in range(3):
        for _ in range(5):
            with limits.admitted("acme"):
                limits.charge("acme", 10)
        await limits.share_once(Silent())
    assert [r.message for r in caplog.records] == ["gateway.limits_not_shared"]
    (claim,) = limits._limiter.claims(10, clock.now())
    assert (claim.requests, claim.tokens, claim.told_requests, claim.told_tokens) == (15, 150, 0, 0)
    refused = 0
    for _ in range(20):
        try:
            with limits.admitted("acme"):
                pass
        except RateLimited:
            refused += 1
    assert refused == 15


async def test_what_came_although_its_answer_was_lost_is_not_told_twice(
    store: EmbeddedStore, tenants_file: Path
) -> None:
    routers = Routers(store, tenants_file, "lost")

    class Deaf:
        async def share(self, claims: Sequence[tuple[str, Claim]]) -> tuple[Shared, ...]:
            await routers.stores[0].share(claims)
            raise StoreUnavailable("no answer within 250 ms")

    try:
        for _ in range(3):
            assert routers.let_in(0, 5) == 5
            await routers.limits[0].share_once(Deaf())
        assert routers.let_in(1, 1) == 1
        await routers.limits[1].share_once(routers.stores[1])
        assert routers.let_in(1, 100) == 4  # fifteen of twenty are gone, and not thirty
        await routers.share()
        await routers.share()
        assert routers.let_in(0, 100) == 0
    finally:
        await routers.close()


async def test_tenants_that_share_prefixes_do_not_share_a_budget(
    store: EmbeddedStore, tenants_file: Path
) -> None:
    routers = Routers(store, tenants_file, "prefixes", frozenset({"acme", "other"}))
    try:
        assert routers.let_in(0, 20) == 20  # all that acme has
        await routers.share()
        assert routers.let_in(1, 1, "other") == 1
        await routers.share()
        assert routers.let_in(1, 100, "other") == 19
    finally:
        await routers.close()


async def test_the_store_learns_no_tenant(store: EmbeddedStore, tenants_file: Path) -> None:
    """RB-040: names in the store tell nobody who asked."""
    routers = Routers(store, tenants_file, "hidden")
    try:
        routers.let_in(0, 1)
        await routers.share()
        with closing(redis.Redis.from_url(store.url)) as client:
            keys = [key.decode() for key in client.scan_iter(match="isthmus:{hidden}:lim:*")]
        assert keys == [f"isthmus:{{hidden}}:lim:{NAMES.budget('acme')}"]
    finally:
        await routers.close()


def test_routers_that_list_models_in_another_order_share_a_budget(
    tmp_path: Path, tenants_file: Path
) -> None:
    models = [(name, make_toy_model(tmp_path / name, seed=i)) for i, name in enumerate("ab")]
    config = IsthmusConfig(auth=AuthSettings(tenants_file=str(tenants_file)))
    budgets = set()
    for order in (models, models[::-1]):
        process = _RouterProcess(config, order, SystemClock())
        store = process._gateway._accounting.store
        assert isinstance(store, LimitStore)
        budgets.add(store.keys)
    assert len(budgets) == 1
