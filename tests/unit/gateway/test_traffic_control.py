"""Which traffic rules are in force, and what a request's share is drawn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError
from services.common.ids import RequestId
from services.gateway.spec import ChatInput, GenerateSpec, PromptInput, TextInput, TokenInput
from services.gateway.traffic_control import TrafficControl, traffic_key
from services.gateway.validate import Arrival
from services.router.traffic import TrafficTable, parse_table
from services.text.template import ChatTurn

ONE = "aliases: {one: [{model: m}]}"
TWO = "aliases: {two: [{model: m}]}"


def write(path: Path, text: str) -> None:
    """Replace a file: its inode changes, whatever the clock of the file system says."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def aliases(control: TrafficControl) -> set[str]:
    return set(control.table().aliases)


def test_changed_file_counts_and_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "rules.yaml", ManualClock()
    write(path, ONE)
    control = TrafficControl(path, clock)
    assert (aliases(control), control.source) == ({"one"}, "file")
    write(path, "aliases: [")
    clock.advance(2)
    assert aliases(control) == {"one"}
    path.write_bytes(b"\xff\xfe")
    clock.advance(2)
    assert aliases(control) == {"one"}
    write(path, TWO)
    clock.advance(2)
    assert aliases(control) == {"two"}


def test_operators_rules_hold_until_the_file_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "rules.yaml", ManualClock()
    write(path, ONE)
    control = TrafficControl(path, clock)
    control.set(parse_table("aliases: {own: [{model: m}]}", "test"))
    clock.advance(2)
    assert (aliases(control), control.source) == ({"own"}, "operator")
    write(path, TWO)
    clock.advance(2)
    assert (aliases(control), control.source) == ({"two"}, "file")


def test_without_a_file_an_operators_rules_can_be_taken_back() -> None:
    control = TrafficControl(None, ManualClock())
    assert (control.table(), control.source) == (TrafficTable(), "none")
    control.set(parse_table(ONE, "test"))
    assert aliases(control) == {"one"}
    control.set(None)
    assert (control.table(), control.source) == (TrafficTable(), "none")


def test_missing_file_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.traffic_file"):
        TrafficControl(tmp_path / "none.yaml", ManualClock())


def key(prompt: PromptInput, session: str = "", namespace: str = "a") -> bytes:
    arrival = Arrival(RequestId("r"), 0.0, namespace=namespace, session=session)
    return traffic_key(GenerateSpec(prompt), arrival)


def test_later_turns_of_a_conversation_keep_its_key() -> None:
    turns = (ChatTurn("system", "be brief"), ChatTurn("user", "hello"))
    later = (*turns, ChatTurn("assistant", "hi"), ChatTurn("user", "and now?"))
    other = (turns[0], ChatTurn("user", "goodbye"))
    assert key(ChatInput(turns)) == key(ChatInput(later))
    assert key(ChatInput(turns)) != key(ChatInput(other))
    assert key(ChatInput(turns)) != key(ChatInput(turns), namespace="b")


def test_session_counts_more_than_the_prompt() -> None:
    ids = TokenInput(np.arange(100, dtype=np.int64))
    assert key(TextInput("x"), "s") == key(ids, "s") != key(ids, "t")
    longer = TokenInput(np.arange(200, dtype=np.int64))
    assert key(ids) == key(longer) != key(TextInput("x"))
    assert key(TokenInput(np.arange(100, dtype=np.uint32))) == key(ids)  # of the other door
