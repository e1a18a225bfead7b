"""The Lua scripts against their Python twin, on a real store."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.common.ids import BlockHash
from services.registry.answers import parse_join, parse_snapshot
from services.registry.base import LoadReport
from services.registry.embedded import EmbeddedStore
from services.registry.schema import encode_info, pack_record
from tests.support.registry_pair import Both, both, make_info
from tests.support.store import running_store, store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

STEPS = 60
CHAINS = [[BlockHash(bytes([chain, depth]) * 8) for depth in range(24)] for chain in range(3)]


@pytest.fixture(scope="module")
def shared_store() -> Iterator[EmbeddedStore]:
    """One store for all seeds of a property test."""
    with running_store() as handle:
        yield handle


def random_step(pair: Both, rng: random.Random) -> None:
    """Do one random thing to both."""
    pair.now_ms += rng.choice((0, 1, 300, 900, 2500, 6000))
    name = rng.choice(("a", "b", "c", "d"))
    load = LoadReport(rng.randrange(1000), rng.randrange(1000), 5, 9, 0.5, 0.25, 2.0, 3, 4)
    chain = rng.choice(CHAINS)
    lo, hi = sorted((rng.randrange(25), rng.randrange(25)))
    if name not in pair.held or rng.random() < 0.15:
        pair.join(name, rng.choice((1, 2)), load, rng.random() < 0.5)
        return
    action = rng.randrange(10)
    if action < 5:
        pair.publish(name, chain[:hi], [], rng.choice((1, 1, 1, 1, 0, 2)))
    elif action < 7:
        pair.publish(name, [], chain[lo:hi], 1)  # holes too: hints may be wrong, never a crash
    elif action < 9:
        pair.renew(name, load, rng.choice(("live", "draining")))
    else:
        pair.leave(name)


@pytest.mark.parametrize("seed", range(25))
def test_scripts_and_twin_agree_on_random_histories(shared_store: EmbeddedStore, seed: int) -> None:
    """RB-044, RB-046: restarts, expiry and reuse of slots void old hints on both sides alike."""
    rng = random.Random(seed)
    with both(shared_store.url, f"seed{seed}") as pair:
        for _ in range(STEPS):
            random_step(pair, rng)
            pair.compare(rng.choice(CHAINS)[: rng.randrange(25)])
            assert pair.num_hints() == pair.twin.num_hints()


def test_lease_is_judged_by_the_stores_clock(store_url: str) -> None:
    """RB-101, RB-102: without `now_ms` the store's TIME decides, not a client's clock."""
    with both(store_url, "clock") as pair:
        load = LoadReport()
        call = pair.calls.join(
            worker_id="w", incarnation=1, info=encode_info(make_info("w", 1)),
            record=pack_record("decode", "live", load), proposed_gen=0, is_rejoin=False,
        )  # fmt: skip
        assert parse_join(pair.run(call)).outcome == "OK"
        (record,) = parse_snapshot(pair.run(pair.calls.snapshot("")), {}, "").records
        assert 1000 < record.lease_left_ms <= 2000


def test_join_refuses_another_schema(store_url: str) -> None:
    """A cluster of two hash schemes would silently never hit."""
    with both(store_url, "ver") as pair:
        pair.client.set(pair.calls.keys.prefix + "ver", "0;other")
        call = pair.calls.join(
            worker_id="w", incarnation=1, info=encode_info(make_info("w", 1)),
            record=pack_record("decode", "live", LoadReport()), proposed_gen=0, is_rejoin=False,
        )  # fmt: skip
        answer = parse_join(pair.run(call))
        assert (answer.outcome, answer.detail) == ("VERSION", "0;other")


def test_infos_are_sent_only_when_they_changed(store_url: str) -> None:
    """A snapshot of a quiet cluster carries 64 bytes a worker, not its whole description."""
    with both(store_url, "infos") as pair:
        pair.join("a", 1, LoadReport(), False)
        first = pair.run(pair.calls.snapshot(""))
        assert isinstance(first, list)
        version = first[1].decode()
        again = pair.run(pair.calls.snapshot(version))
        assert isinstance(again, list)
        assert len(first[3]) == 2
        assert again[3] == []
