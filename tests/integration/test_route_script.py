"""`route.lua` against its Python twin on a real store: same worker, same terms, to the last bit.

300 random views by default; ISTHMUS_ROUTE_VIEWS=10000 runs the full count.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator

import pytest

from services.common.ids import BlockHash
from services.registry.base import LoadReport
from services.registry.cost import DECODE, FORBIDDEN, LOCAL, REMOTE, STAY, Ask, Candidate, Weights
from services.registry.embedded import EmbeddedStore
from services.registry.schema import pack_fields
from services.registry.scripts import RouteAsk
from tests.support.registry_pair import Both, both
from tests.support.store import running_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_VIEWS = int(os.environ.get("ISTHMUS_ROUTE_VIEWS", "300"))
VIEWS_PER_SEED = 20
CHAINS = [
    [
        BlockHash(struct.pack("<HHI", chain * 4099 + 77 * depth, chain, depth))
        for depth in range(400)
    ]
    for chain in range(3)
]
KINDS = (0, 0, 0, 0, REMOTE, LOCAL, STAY, DECODE)


@pytest.fixture(scope="module")
def shared_store() -> Iterator[EmbeddedStore]:
    """One store for all seeds."""
    with running_store() as handle:
        yield handle


def f32(value: float) -> float:
    """Round as a packed record does."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def random_load(rng: random.Random) -> LoadReport:
    """Draw a load; ties are as likely as differences."""
    total = rng.choice((0, 10, 1000, 100_000))
    return LoadReport(
        queued_uncached_tokens=rng.choice((0, 0, rng.randrange(5000))),
        resident_tokens=rng.choice((0, rng.randrange(100_000))),
        kv_free=rng.randrange(total + 1),
        kv_total=total,
        rate_tok_s=rng.choice((0.0, 1e-30, 2000.0, f32(rng.uniform(1, 50_000)))),
        tbt_a_us=rng.choice((0.0, 5000.0, f32(rng.uniform(1, 50_000)))),
        tbt_b_us=f32(rng.uniform(0, 3)),
        running=rng.choice((0, rng.randrange(60))),
        waiting=rng.choice((0, rng.randrange(9))),
        kv_cached=rng.choice((0, rng.randrange(total + 1), 2 * total)),
    )


def random_ask(rng: random.Random, rid: str, slots: list[int]) -> RouteAsk:
    """Draw a request."""
    chain, depth = (
        rng.choice(CHAINS),
        rng.choice((0, 1, 7, 8, rng.randrange(80), rng.randrange(401))),
    )
    tokens = max(1, depth * 64 + rng.randrange(64))
    out = rng.choice((0, 1, 20, 256))
    return RouteAsk(
        Ask(
            num_tokens=tokens,
            decode_tokens=out,
            need_tokens=tokens + out,
            bypass_tokens=rng.choice((0, 256, 100_000)),
            max_tbt_s=rng.choice((0.0, 0.02)),
            root=rng.getrandbits(32),
            force=rng.choice(KINDS),
            source=rng.choice((-1, *slots)),
            excluded=frozenset(s for s in slots if rng.random() < 0.1),
        ),
        pack_fields(chain[:depth]),
        rid if rng.random() < 0.9 else "",
    )


def change_workers(pair: Both, rng: random.Random, names: list[str]) -> None:
    """Let some workers join, report, publish, evict and leave."""
    joined = len(pair.held)
    for name in names if joined < len(names) else rng.sample(names, min(14, len(names))):
        action = rng.random()
        if name not in pair.held or action < 0.05:
            pair.join(name, rng.choice((1, 2)), random_load(rng), False)
        elif action < 0.4:
            pair.renew(name, random_load(rng), rng.choice(("live", "live", "live", "draining")))
        elif action < 0.8:
            chain, deep = rng.choice(CHAINS), rng.choice((rng.randrange(60), rng.randrange(401)))
            if rng.random() < 0.3:  # a hole is possible: it may mislead, alike on both sides
                pair.publish(name, [], chain[deep : deep + 40], 1)
            else:
                pair.publish(name, chain[:deep], [], 1, tier=rng.choice((0, 0, 0, 1, 2)))
        elif action < 0.82:
            pair.leave(name)


def compare_views(pair: Both, rng: random.Random, num_views: int, num_workers: int) -> None:
    """Decide about random requests in a cluster that changes, on both sides."""
    names = [f"{rng.choice('pd')}{i}" for i in range(num_workers)]
    rids: list[str] = []
    for view in range(num_views):
        pair.now_ms += rng.choice((0, 1, 40, 160, 700, 2500, 4_000_000))
        change_workers(pair, rng, names)
        holders = {slot: (name, gen) for name, (slot, gen, _) in pair.held.items()}
        candidates = [
            Candidate(
                slot, gen if rng.random() < 0.97 else gen + 1, name[0] == "p",
                rng.choice((7, rng.getrandbits(32))), rng.choice((0.0, 0.0, rng.random())),
            )
            for slot, (name, gen) in holders.items()
        ]  # fmt: skip
        slots = [c.slot for c in candidates]
        pairs = {
            (rng.choice(slots), rng.choice(slots)): rng.choice((FORBIDDEN, 0.0, 1e-5))
            for _ in range(rng.choice((0, 3, 40)))
        }
        weights = Weights(
            displacement=rng.choice((0.0, 2.0)), link_token_s=rng.choice((0.0, 1e-6)),
            hold=rng.choice((0.0, 0.25)), tie_ratio=rng.choice((0.0, 0.1)),
        )  # fmt: skip
        # A few ids come again and again: held still, released, run out and swept, or not yet swept.
        asks = [
            random_ask(rng, rng.choice((f"v{view}-{i}", f"again{rng.randrange(4)}")), slots)
            for i in range(rng.choice((1, 1, 4)))
        ]
        pair.route(weights, candidates, pairs, asks)
        rids += [ask.rid for ask in asks if ask.rid]
        for rid in rng.sample(rids, min(len(rids), rng.randrange(3))):
            if rng.random() < 0.3:
                pair.hold(rid)
            else:
                lies = rng.choice((b"", pack_fields(rng.choice(CHAINS)[5:9])))
                pair.release(rid, lies)
        assert pair.num_hints() == pair.twin.num_hints()
        pair.compare_bookings()


@pytest.mark.parametrize("seed", range(max(1, NUM_VIEWS // VIEWS_PER_SEED)))
def test_script_and_twin_choose_alike_on_random_views(
    shared_store: EmbeddedStore, seed: int
) -> None:
    """Same worker, same terms, same reservations: the simulator may stand for the store."""
    rng = random.Random(seed)
    # Of 80 only the shortlist is priced.
    num_workers = 80 if seed % 10 == 9 else rng.randrange(2, 14)
    with both(shared_store.url, f"route{seed}") as pair:
        compare_views(pair, rng, VIEWS_PER_SEED, num_workers)


def reserve_at(pair: Both, rid: str, name: str) -> None:
    """Reserve one of the decode workers that have joined."""
    slots = {held: slot for held, (slot, _, _) in pair.held.items()}
    others = frozenset(slot for held, slot in slots.items() if held != name)
    candidates = [
        Candidate(slot, gen, is_prefill=False, seed=1) for slot, gen, _ in pair.held.values()
    ]
    ask = Ask(64, 8, 72, force=DECODE, excluded=others)
    (verdict,) = pair.route(Weights(), candidates, {}, [RouteAsk(ask, rid=rid)])
    assert verdict is not None
    assert verdict.chosen.slot == slots[name]


def in_flight(pair: Both) -> dict[str, float]:
    """Count what the store has open at each worker."""
    booked = pair.booked()
    return {name: booked[slot][1] for name, (slot, _, _) in pair.held.items() if slot in booked}


def test_an_id_reserved_again_counts_once(shared_store: EmbeddedStore) -> None:
    """A request begun anew: what its first attempt held ends, at the same worker or another."""
    with both(shared_store.url, "again") as pair:
        for name in ("d0", "d1"):
            pair.join(name, 1, LoadReport(), False)
        for name, expected in (
            ("d0", {"d0": 1}),
            ("d0", {"d0": 1}),
            ("d1", {"d0": 0, "d1": 1}),
        ):
            reserve_at(pair, "r", name)
            assert in_flight(pair) == expected
            pair.compare_bookings()
        pair.release("r")
        assert in_flight(pair) == {"d0": 0, "d1": 0}
        pair.compare_bookings()


def test_an_id_whose_key_ran_out_before_the_sweep_counts_once(shared_store: EmbeddedStore) -> None:
    """The store drops the key by itself; the sweep, a few a call, may come to it much later."""
    with both(shared_store.url, "late") as pair:
        for name in ("d0", "d1"):
            pair.join(name, 1, LoadReport(), False)
        key = f"{pair.calls.keys.prefix}r:r"
        reserve_at(pair, "r", "d0")
        pair.client.delete(key)
        reserve_at(pair, "r", "d0")
        assert in_flight(pair) == {"d0": 1}
        pair.client.delete(key)
        pair.now_ms += 1000
        reserve_at(pair, "r", "d1")
        assert in_flight(pair) == {"d0": 1, "d1": 1}
        pair.now_ms += pair.calls.reserve_ms - 1000
        pair.route(Weights(), [], {}, [RouteAsk(Ask(1, 1, 1))])  # sweeps d0's
        assert in_flight(pair) == {"d0": 0, "d1": 1}
        pair.release("r")
        assert in_flight(pair) == {"d0": 0, "d1": 0}
        assert not pair.client.exists(key)
