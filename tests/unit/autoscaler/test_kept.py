from __future__ import annotations

import json

import pytest

from services.autoscaler.drains import Drain
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.kept import Claim, Kept, Resized, kept_from, rfc3339
from services.autoscaler.leadership import Lease
from services.autoscaler.policy import OnDeadline
from services.autoscaler.state import Ask, PoolState, State
from services.common.clock import ManualClock
from tests.support.scaling_twin import ScalingTwin

KEPT = Kept(
    at=1_000.0,
    state=State(at=1_000.0, pools={"decode": PoolState(size=3, highs=(Ask(990.0, 4),))}),
    drains=(Drain("d0", "decode", 900.0, 1_100.0, OnDeadline.ABORT),),
    sizes={"decode": 3},
    history=(Resized(990.0, "decode", 2, 3, "why"),),
    claims={"Stale": Claim(True, "no figures", 980.0)},
)


def test_what_is_kept_comes_back_as_it_was() -> None:
    assert kept_from(KEPT.to_json(), 1_001.0) == KEPT


@pytest.mark.parametrize(
    "text", [None, "", "{}x", "[]", json.dumps({"format": 2}), json.dumps({"drains": [1]})]
)
def test_what_is_not_of_this_form_is_nothing(text: str | None) -> None:
    assert kept_from(text, 1_000.0) == Kept()


def test_state_from_ahead_of_our_clock_is_not_gone_on_with() -> None:
    """Its windows would hold until we are there."""
    assert kept_from(KEPT.to_json(), 1_000.0 - 59.0) == KEPT
    assert kept_from(KEPT.to_json(), 1_000.0 - 61.0) == Kept()


def test_moments_are_written_as_kubernetes_writes_them() -> None:
    assert rfc3339(1_700_000_000.9) == "2023-11-14T22:13:20Z"


class TwoClocks(ManualClock):
    """The wall clock may be set by itself."""

    def set_wall(self, seconds: float) -> None:
        self._unix_ms += round(seconds * 1000)


def test_clock_that_is_set_back_goes_on_and_a_machine_that_slept_wakes_up_later() -> None:
    machine = TwoClocks()
    clock = EpochClock(machine)
    began = clock.now()
    assert began == machine.unix_ms() / 1000
    machine.set_wall(-3600.0)
    machine.advance(5.0)
    assert clock.now() == pytest.approx(began + 5.0)
    machine.set_wall(3600.0 + 600.0)
    assert clock.now() == pytest.approx(began + 605.0)


async def test_lease_ends_here_before_it_ends_in_the_store() -> None:
    clock = ManualClock()
    store = ScalingTwin(clock)
    lease = Lease(store, "a", clock, lease_s=10.0)
    assert lease.left_s == 0.0
    taken = await lease.renew()
    assert taken is not None
    assert lease.left_s == 8.0
    clock.advance(8.0)
    assert lease.left_s == 0.0
    assert not await lease.keep({"state": "late"})
    assert "state" not in store.fields


async def test_time_that_a_renewal_took_is_not_counted_as_ours() -> None:
    clock = ManualClock()
    store = ScalingTwin(clock)
    lease = Lease(store, "a", clock, lease_s=10.0)
    original = store.lead

    async def slow(owner: str, lease_ms: int, least_token: int) -> object:
        answer = await original(owner, lease_ms, least_token)
        clock.advance(6.0)
        return answer

    store.lead = slow  # type: ignore[method-assign,assignment]  # a moment of the test's own
    await lease.renew()
    assert lease.left_s == 2.0


async def test_store_that_was_restarted_empty_is_led_on_with_a_higher_token() -> None:
    clock = ManualClock()
    store = ScalingTwin(clock, token=41)
    lease = Lease(store, "a", clock)
    await lease.renew()
    assert lease.token == 42
    store.owner, store.token, store.until = "", 0, 0
    assert not await lease.keep({"state": "s"})
    await lease.renew()
    assert lease.token == 43
