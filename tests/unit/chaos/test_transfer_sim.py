"""The transfer protocol under a simulated bad day, ten thousand times, and defects it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.chaos import transfers
from services.chaos.sim_prefill import Offer, PrefillWorker
from services.chaos.sim_world import SHAPES, Bytes, Odds, Shape, World, reference, turns_of
from services.chaos.transfer_sim import PROFILES, TRANSFERS_A_RUN, Cluster, run_seed
from services.chaos.transfers import Campaign, FailedRun, run_campaign
from services.common.ids import BlockHash, BlockId
from services.kv import block_copy
from services.kv.attached import AttachedKv
from services.kv.convert import Part, convert_part
from services.kv.memory import KvPoolMemory
from services.transfer import sender as tx
from services.transfer import wire
from services.transfer.conversion import Conversion
from services.transfer.receiver import ReceiverTransfer
from services.transfer.sender import SenderState, SenderTransfer
from services.transfer.values import RejectCode

CALM = Odds(
    **dict.fromkeys(Odds.__dataclass_fields__, 0.0),
)


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    return run_campaign(10_000, seed=0)


def test_ten_thousand_transfers_end_once_and_leave_nothing(campaign: Campaign) -> None:
    """RB-009, RB-010, RB-011, RB-015, RB-016, RB-025, RB-029: see `Violation` in the simulator."""
    assert campaign.failures == ()
    assert campaign.num_transfers == 10_000


@pytest.mark.parametrize(
    ("happened", "times"),
    [
        ("prompts ready", 5_000),
        ("sink ready", 5_500),
        ("source done", 5_500),
        ("source aborted", 100),
        ("source expired", 10),
        ("source peer_lost", 10),
        ("sink failed cancelled", 100),
        ("sink failed fenced", 3),
        ("sink failed handoff_failed", 100),
        ("refused for its digest", 20),
        ("refused for its generation", 10),
        ("refused for its length", 3),
        ("reject BUSY", 20),
        ("reject EXPIRED", 50),
        ("reject FENCED", 3),
        ("stale frames", 50),
        ("preemptions", 100),
        ("copies with the owner at work", 100),
        ("crashes", 30),
        ("cuts", 50),
        ("freezes", 50),
        ("clock steps", 50),
        ("links lost", 50),
        ("planes lost", 3),
        ("gaps", 500),
        ("retries", 100),
        ("bad frame: checksum", 100),
        ("bad frame: body_length", 30),
        ("bad frame: header_length", 10),
        ("forged: refused", 50),
        ("forged: taken", 50),
        ("handshakes failed: another life", 10),
        ("handshakes failed: broken while greeting", 3),
        ("handshakes failed: no answer to HELLO", 10),
        ("links over attach", 30),
        ("links over memfd", 100),
        ("attached", 200),
        ("steps in place", 1_000),
        ("answered in place", 50),
        ("moved home", 100),
        ("links over zmq", 100),
        ("unpinned", 500),
        ("went on beside a transfer", 100),
    ],
)
def test_every_kind_of_trouble_came_often_enough(
    campaign: Campaign, happened: str, times: int
) -> None:
    assert campaign.stats[happened] >= times


@pytest.mark.parametrize("seed", [151, 1159, 1318])
def test_runs_that_once_failed_hold(seed: int) -> None:
    """What they found: blocks that were given back and sent again (151) or anew (1159)."""
    assert run_seed(seed).violation is None


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_with_thousands_of_prompts_at_once_ends_as_well(seed: int) -> None:
    """Far more than the pools hold: everything waits, much of it for longer than its limits."""
    assert run_seed(seed, 4000).violation is None


def test_every_shape_of_pools_meets_every_weather() -> None:
    """Seeds take both in turn, and their numbers have no factor in common."""
    pairs = len(PROFILES) * len(SHAPES)
    met = {(seed % len(PROFILES), seed % len(SHAPES)) for seed in range(pairs)}
    assert len(met) == pairs <= 10_000 // TRANSFERS_A_RUN


def test_shards_hold_what_the_whole_block_holds_and_no_two_planes_are_alike() -> None:
    """Else a wrong range of heads or layers would look like the right one."""
    name = BlockHash(bytes(range(16)))
    for shape in SHAPES:
        for layout in (*shape.prefill, *shape.decode):
            whole = layout.part((0, layout.total_layers), (0, layout.total_heads))
            content = np.frombuffer(reference(name, turns_of(whole)), np.uint8)
            planes = content.reshape(len(turns_of(whole)), -1)
            assert len({plane.tobytes() for plane in planes}) == len(planes)
            cut = np.zeros(layout.block_bytes, np.uint8)
            part = Part(layout.layers, layout.heads, (0, layout.block_size))
            convert_part(whole, content, part, layout, cut, part)
            assert cut.tobytes() == reference(name, turns_of(layout))


@pytest.mark.parametrize("seed", range(len(PROFILES)))
def test_a_seed_is_one_run_to_the_byte(seed: int) -> None:
    first, second = (run_seed(seed, 60, record=True) for _ in range(2))
    assert first == second
    assert len(first.log) > 100


def test_a_shorter_run_begins_as_the_longer_one() -> None:
    """What the replay command relies on."""
    longer, shorter = (run_seed(3, num, record=True) for num in (40, 20))
    until = next(i for i, line in enumerate(longer.log) if "request 21 of" in line)
    assert shorter.log[:until] == longer.log[:until]


def _cancel(cluster: Cluster) -> None:
    for prompt in cluster.prompts:
        cluster.cancel(prompt)


def _unpin(cluster: Cluster) -> None:
    for worker in cluster.prefills:
        worker.unpin_all()
        worker.press(worker.num_blocks)  # what came back is overwritten at once


@pytest.mark.parametrize("intrude", [_cancel, _unpin])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4]])
def test_no_moment_of_a_transfer_is_a_bad_one(
    seed: int, intrude: Callable[[Cluster], None], shape: Shape
) -> None:
    """RB-004, RB-009, RB-011: cancelled, or asked to give blocks back, after every single event."""
    num_steps = 0
    is_over = False
    while not is_over:
        world = World(seed, CALM, record=False, shape=shape)
        cluster = Cluster(world, num=1)
        cluster.start()
        for _ in range(num_steps):
            world.step()
        is_over = not world.pending()
        intrude(cluster)
        world.run(5_000)
        cluster.check_at_rest()
        if intrude is _unpin:
            assert world.stats["prompts ready"] == 1
        num_steps += 1
    assert num_steps > 20  # events of one undisturbed transfer


# ---- planted defects --------------------------------------------------------------------------


def _release_while_read(patch: pytest.MonkeyPatch) -> None:
    original = SenderTransfer._try_close

    def hasty(self: SenderTransfer, now: float) -> list[tx.SenderAction]:
        flying, self._num_in_flight = self._num_in_flight, 0
        try:
            return original(self, now)
        finally:
            self._num_in_flight = flying

    patch.setattr(SenderTransfer, "_try_close", hasty)


def _accept_everything(patch: pytest.MonkeyPatch) -> None:
    original = ReceiverTransfer.on_block

    def trusting(
        self: ReceiverTransfer, index: int, is_good: bool, now: float, why: str = ""
    ) -> Any:
        return original(self, index, True, now, why)

    patch.setattr(ReceiverTransfer, "on_block", trusting)


def _write_after_the_end(patch: pytest.MonkeyPatch) -> None:
    original = ReceiverTransfer.dest_of

    def careless(self: ReceiverTransfer, index: int) -> Any:
        if self._ended and self._dest is not None:
            return self._dest[index]
        return original(self, index)

    patch.setattr(ReceiverTransfer, "dest_of", careless)


def _obey_lower_attempts(patch: pytest.MonkeyPatch) -> None:
    def anyone(self: SenderTransfer, peer: Any, attempt: int) -> bool:
        return self.owner is not None

    patch.setattr(SenderTransfer, "_is_owner", anyone)


def _never_expire(patch: pytest.MonkeyPatch) -> None:
    original = SenderTransfer.on_time

    def patient(self: SenderTransfer, now: float) -> list[tx.SenderAction]:
        is_waiting = self.state in (SenderState.STREAMING, SenderState.DRAINING)
        if is_waiting and now >= self._deadline:
            self._deadline = now + 1.0
            return []
        return original(self, now)

    patch.setattr(SenderTransfer, "on_time", patient)


def _send_what_is_not_held(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are queued for sending are not pinned."""

    def unpinned(self: PrefillWorker, offer: Offer) -> None:
        blocks, offer.held = offer.held, []
        self.drop(blocks)

    original = PrefillWorker._finish

    def finish(self: PrefillWorker, job: Any) -> None:
        original(self, job)
        unpinned(self, job.offer)

    patch.setattr(PrefillWorker, "_finish", finish)


def _take_a_lower_attempt(patch: pytest.MonkeyPatch) -> None:
    original = SenderTransfer._refusal

    def meek(self: SenderTransfer, peer: Any, args: Any) -> Any:
        refusal = original(self, peer, args)
        return None if refusal is not None and refusal[0] is RejectCode.FENCED else refusal

    patch.setattr(SenderTransfer, "_refusal", meek)


def _trust_generations(patch: pytest.MonkeyPatch) -> None:
    def trusting(
        source: KvPoolMemory, rows: Any, _gens: Any, dest: Bytes, dest_blocks: Any, part: Any
    ) -> list[bool]:
        dest[list(dest_blocks)] = source.pieces(part)[rows].reshape(len(rows), -1)
        return [True] * len(rows)

    patch.setattr(block_copy, "pull_with_numpy", trusting)


def _trust_generations_of_shards(patch: pytest.MonkeyPatch) -> None:
    original = Conversion.pull

    def trusting(self: Conversion, pool: KvPoolMemory, block: int, _gen: int, copy: Any) -> bool:
        original(self, pool, block, int(pool.gens[block]) // 2 * 2, copy)
        return True

    patch.setattr(Conversion, "pull", trusting)


def _sum_nothing_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire, "_checksum", lambda _head, _body: 0)


def _write_into_the_frozen_tail(patch: pytest.MonkeyPatch) -> None:
    def in_place(self: PrefillWorker, tail: BlockId) -> BlockId:
        self.hold([tail])
        return tail

    patch.setattr(PrefillWorker, "_copy_on_write", in_place)


def _deliver_without_the_last_block(patch: pytest.MonkeyPatch) -> None:
    original = ReceiverTransfer._try_finish

    def hasty(self: ReceiverTransfer, now: float) -> Any:
        missing = self._num_missing
        self._num_missing = 0 if missing == 1 else missing
        try:
            return original(self, now)
        finally:
            self._num_missing = missing

    patch.setattr(ReceiverTransfer, "_try_finish", hasty)


def _look_at_no_generation_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttachedKv, "is_current", lambda _self, _first=0: True)


def _keep_what_is_out_of_reach(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverTransfer, "_forget_in_place", lambda _self: None)


def _send_again_what_went_back(patch: pytest.MonkeyPatch) -> None:
    original = SenderTransfer._unpin_some

    def forgetful(self: SenderTransfer) -> list[tx.SenderAction]:
        asked_again = list(self._resend)
        actions = original(self)
        self._resend.clear()
        self._resend.extend(asked_again)
        return actions

    patch.setattr(SenderTransfer, "_unpin_some", forgetful)


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    def patient(self: ReceiverTransfer, now: float, _progress_at: float) -> Any:
        self._progress_at = now
        return []

    patch.setattr(ReceiverTransfer, "_on_stall_check", patient)


# profiles in which such a defect shows soonest
LOSSY, DEATHS, STALE, CANCELS = 1, 2, 4, 5


@pytest.mark.parametrize(
    ("plant", "profile", "told_as"),
    [
        (_release_while_read, CANCELS, "while it is read"),  # RB-011
        (_accept_everything, LOSSY, "wrong content"),  # RB-025, RB-029
        (_write_after_the_end, CANCELS, "does not hold it"),  # RB-011
        (_obey_lower_attempts, CANCELS, "another attempt or life"),
        (_never_expire, LOSSY, "after the last sign of life"),  # RB-009
        (_send_what_is_not_held, CANCELS, "under transfer was written"),  # RB-010
        (_take_a_lower_attempt, LOSSY, "a lower attempt was obeyed"),
        (_trust_generations, STALE, "wrong content"),  # RB-025
        (_trust_generations_of_shards, STALE, "wrong content"),  # RB-025
        (_sum_nothing_up, LOSSY, "passes for a message"),
        (_write_into_the_frozen_tail, CANCELS, "under transfer was written"),
        (_deliver_without_the_last_block, CANCELS, "accepted with wrong content"),
        (_look_at_no_generation_in_place, CANCELS, "read wrong content in place"),
        (_keep_what_is_out_of_reach, DEATHS, "out of reach"),
        (_send_again_what_went_back, LOSSY, "under transfer was written"),  # RB-010
        (_wait_for_ever, LOSSY, "a hang"),  # RB-015
    ],
)
def test_the_simulator_finds_planted_defects(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    profile: int,
    told_as: str,
) -> None:
    """RB-009, RB-010, RB-011, RB-025, RB-029: and says which seed and how few prompts it takes."""
    plant(monkeypatch)
    for seed in range(profile, 400, len(PROFILES)):
        report = run_seed(seed)
        if report.violation is not None:
            break
    assert report.violation is not None
    again = run_seed(report.seed, report.num_transfers, record=True)
    assert again.violation == report.violation
    assert told_as in report.violation


def test_a_failed_run_tells_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _accept_everything(monkeypatch)
    campaign = run_campaign(5 * TRANSFERS_A_RUN, seed=LOSSY)
    assert campaign.failures
    first = campaign.failures[0]
    assert first.replay == (
        f"isthmus chaos transfers --seed {first.seed} --num {first.num_transfers} --log"
    )


def test_processes_play_the_runs_one_would_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PART_TRANSFERS", 2 * TRANSFERS_A_RUN)
    num = 5 * TRANSFERS_A_RUN
    together, apart = (run_campaign(num, seed=0, jobs=jobs) for jobs in (2, 1))
    assert (together.num_transfers, together.num_runs) == (num, num // TRANSFERS_A_RUN)
    assert (together.num_events, together.stats) == (apart.num_events, apart.stats)


def test_joined_campaigns_keep_the_first_failures_by_seed() -> None:
    parts = [Campaign(failures=(FailedRun(seed, 1, "x"),)) for seed in (9, 2, 8, 1, 7, 3)]
    joined = Campaign()
    for part in parts:
        joined = joined.joined(part)
    assert [failed.seed for failed in joined.failures] == [1, 2, 3, 7, 8]
