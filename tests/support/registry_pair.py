"""A store and its Python twin, driven by the same actions and held to the same answers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import redis

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.registry.answers import parse_join, parse_route, parse_snapshot, parse_status
from services.registry.base import HintChange, LoadReport, WorkerInfo
from services.registry.cost import Ask, Candidate, Pairs, Verdict, Weights
from services.registry.reservations import Reservations
from services.registry.schema import Keys, encode_info, pack_fields, pack_record, stride_hashes
from services.registry.scripts import Invocation, RouteAsk, ScriptCalls
from services.registry.twin import RegistryTwin


def make_info(name: str, incarnation: int) -> WorkerInfo:
    """Build a worker's facts."""
    return WorkerInfo(
        worker_id=WorkerId(name), incarnation=Incarnation(incarnation), address="127.0.0.1:1",
        role="decode", model="toy", kv_identity_fp="fp", identity_fields={"model": "toy"},
        weights_digest="d", block_size=16, max_model_len=2048, started_unix_ms=1,
    )  # fmt: skip


class Both:
    """Runs every action on the store and on the twin, and compares the answers."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.client = client
        # Long, since the store ends a reservation by its own clock too, and a test may be slow.
        reserve_ms = 3_600_000
        self.calls = ScriptCalls(
            Keys(namespace), reclaim_ms=5000, sweep_buckets=4096, reserve_ms=reserve_ms
        )
        self.twin = RegistryTwin(
            reclaim_ms=5000, sweep_buckets=4096, reservations=Reservations(reserve_ms)
        )
        self.now_ms = 1_000_000
        self.held: dict[str, tuple[int, int, int]] = {}  # name -> slot, gen, seq

    def run(self, call: Invocation) -> object:
        """Run a script as the clients do."""
        sha, args = call.script.sha, (*call.keys, *call.args)
        try:
            return self.client.evalsha(sha, len(call.keys), *args)
        except redis.exceptions.NoScriptError:
            self.client.script_load(call.script.text)
            return self.client.evalsha(sha, len(call.keys), *args)

    def join(self, name: str, incarnation: int, load: LoadReport, is_rejoin: bool) -> None:
        """Join under a name that may be held by another incarnation."""
        info = make_info(name, incarnation)
        ours = self.twin.join(
            info, "live", load, proposed_gen=7, is_rejoin=is_rejoin, now_ms=self.now_ms
        )
        theirs = parse_join(
            self.run(
                self.calls.join(
                    worker_id=name,
                    incarnation=incarnation,
                    info=encode_info(info),
                    record=pack_record("decode", "live", load),
                    proposed_gen=7,
                    is_rejoin=is_rejoin,
                    now_ms=self.now_ms,
                )
            )
        )
        assert theirs == ours
        if ours.outcome == "OK":
            self.held[name] = (ours.slot, ours.gen, 0)

    def renew(self, name: str, load: LoadReport, state: str) -> None:
        """Renew with a load."""
        slot, gen, _ = self.held[name]
        record = pack_record("decode", state, load)
        ours = self.twin.renew(slot, gen, state, load, self.now_ms)
        assert parse_status(self.run(self.calls.renew(slot, gen, record, self.now_ms))) == ours

    def leave(self, name: str) -> None:
        """Leave."""
        slot, gen, _ = self.held[name]
        assert parse_status(self.run(self.calls.leave(slot, gen))) == self.twin.leave(slot, gen)

    def publish(
        self,
        name: str,
        added: list[BlockHash],
        removed: list[BlockHash],
        skip: int,
        tier: int = 0,
    ) -> None:
        """Publish; `skip` 1 follows on, 0 repeats, 2 leaves a gap."""
        slot, gen, seq = self.held[name]
        load, change = LoadReport(queued_uncached_tokens=seq), HintChange(added, removed, tier)
        ours = self.twin.publish((slot, gen), seq + skip, change, load=load, now_ms=self.now_ms)
        theirs = parse_status(
            self.run(
                self.calls.publish(
                    slot=slot,
                    gen=gen,
                    seq=seq + skip,
                    change=change,
                    record=pack_record("decode", "live", load),
                    now_ms=self.now_ms,
                )
            )
        )
        assert theirs == ours
        if ours == "OK":
            self.held[name] = (slot, gen, seq + skip)

    def compare(self, chain: list[BlockHash]) -> None:
        """Read all workers, and how deep each holds a chain, on both sides."""
        theirs = parse_snapshot(self.run(self.calls.snapshot("", self.now_ms)), {}, "").records
        assert theirs == self.twin.snapshot(self.now_ms)
        everybody = [Candidate(r.slot, r.slot_gen, is_prefill=False, seed=1) for r in theirs]
        strides = stride_hashes(chain)
        self.route(Weights(), everybody, {}, [RouteAsk(Ask(4096, 0, 4096), pack_fields(strides))])

    def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
    ) -> tuple[Verdict | None, ...]:
        """Decide on both sides; every term must be equal, not only the worker."""
        raw = self.run(self.calls.route(weights, candidates, pairs, asks, self.now_ms))
        theirs = parse_route(raw, len(asks))
        ours = self.twin.route(weights, candidates, pairs, asks, self.now_ms)
        assert theirs == ours
        return ours

    def release(self, rid: str, lies: bytes = b"") -> None:
        """End a reservation."""
        self.run(self.calls.release([(rid, lies)]))
        self.twin.release(rid, lies)

    def hold(self, rid: str) -> None:
        """Extend a reservation."""
        self.run(self.calls.hold([rid], self.now_ms))
        self.twin.reservations.hold(rid, self.now_ms)

    def booked(self) -> dict[int, tuple[float, ...]]:
        """Read the store's account of each slot: its generation, its open reservations, ..."""
        accounts: dict[int, tuple[float, ...]] = {}
        for slot, packed in self.client.hgetall(f"{self.calls.keys.prefix}q").items():
            assert isinstance(packed, bytes)
            accounts[int(slot)] = struct.unpack("<HHIIIIIdd", packed)
        return accounts

    def compare_bookings(self) -> None:
        """Hold what is booked of every slot, and what holds it, to be the same on both sides."""
        prefix, twin = self.calls.keys.prefix, self.twin.reservations
        assert self.booked() == {
            slot: (
                a.gen, a.in_flight, a.epoch, a.prefill, a.resident, a.old_prefill, a.old_resident,
                a.began_ms, a.newest_ms,
            )
            for slot, a in twin._accounts.items()
        }  # fmt: skip
        members = [
            (struct.pack("<HH", *held.owner) + rid.encode(), held.expiry_ms)
            for rid, held in twin._held.items()
        ]
        assert self.client.zcard(f"{prefix}rz") == len(members)
        for member, expiry_ms in members:
            assert self.client.zscore(f"{prefix}rz", member) == expiry_ms
        keys = {f"{prefix}r:{rid}".encode() for rid in twin._held}
        assert set(self.client.keys(f"{prefix}r:*")) == keys

    def num_hints(self) -> int:
        """Count the hashes the store has owners for."""
        keys = self.client.keys(f"{self.calls.keys.prefix}b:*")
        return sum(self.client.hlen(key) for key in keys)


@contextmanager
def both(url: str, namespace: str) -> Iterator[Both]:
    """Open a client for one comparison."""
    with closing(redis.Redis.from_url(url)) as client:
        yield Both(client, namespace)
