from __future__ import annotations

import pytest

from services.cli import exits
from services.cli.unit import FAILED, READY, STARTING, UNREADY, WAITING, UnitState
from services.runtime.process import RestartPolicy


def started() -> UnitState:
    state = UnitState(RestartPolicy(first_delay_s=0.5, max_failures=2))
    state.spawned()
    return state


def test_ready_when_its_health_service_says_so() -> None:
    state = started()
    assert not state.observe(0.0, None, None)
    assert state.state == STARTING
    state.observe(1.0, None, True)
    assert state.state == READY


def test_dead_process_starts_again_after_its_pause() -> None:
    state = started()
    state.observe(1.0, None, True)
    assert not state.observe(2.0, -9, True)
    assert (state.state, state.reason) == (WAITING, "killed by SIGKILL")
    assert not state.observe(2.4, -9, None)
    assert state.observe(2.5, -9, None)
    assert state.num_restarts == 1


@pytest.mark.parametrize("status", [exits.USAGE, exits.MODEL])
def test_wrong_configuration_or_model_is_not_tried_again(status: int) -> None:
    state = started()
    state.observe(1.0, status, None)
    assert (state.state, state.reason) == (FAILED, f"exited with {status}")
    assert not state.observe(100.0, status, None)


def test_crash_loop_is_given_up_with_its_reason() -> None:
    state = started()
    state.observe(1.0, 1, None)
    assert state.observe(10.0, 1, None)
    state.spawned()
    state.observe(11.0, 1, None)
    assert state.state == FAILED
    assert "2 times in a row" in state.reason


def test_silent_process_is_unready_and_comes_back_without_a_restart() -> None:
    state = started()
    state.observe(1.0, None, True)
    state.observe(2.0, None, False)
    assert state.state == UNREADY
    state.observe(3.0, None, True)
    assert (state.state, state.reason, state.num_restarts) == (READY, "", 0)


def test_stopped_process_stays_stopped() -> None:
    state = started()
    state.stopped()
    assert not state.observe(5.0, 0, None)
