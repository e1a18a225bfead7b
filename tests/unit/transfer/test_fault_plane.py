"""The `fault` plane: the same seed draws the same faults, and no configuration reaches it."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from services.common.config import TransferSettings
from services.common.errors import ConfigError
from services.transfer.config import TransferConfig, ordered_planes
from services.transfer.fault_script import FAULT_KINDS, FaultDeck, FaultDice, FaultScript

FRAMES = [b"h" * 48, b"body", b"p" * 4096, b"q" * 4096]


def drawn(dice: FaultDice, count: int) -> list[str]:
    return [dice.draw() for _ in range(count)]


def test_a_seed_draws_the_same_faults_again_and_another_others() -> None:
    runs = [drawn(FaultDice(FaultScript(seed, 0.5), "in"), 200) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_streams_of_one_script_differ_and_the_deck_counts_what_they_drew() -> None:
    deck = FaultDeck(FaultScript(7, 0.5))
    first, second = (drawn(deck.deal("in"), 300) for _ in range(2))
    assert first != second
    assert deck.drawn() == Counter(kind for kind in first + second if kind)
    assert set(deck.drawn()) == set(FAULT_KINDS)


def test_share_and_skip_are_kept() -> None:
    faults = drawn(FaultDice(FaultScript(1, 0.1, skip=50), "in"), 10_050)
    assert not any(faults[:50])
    assert 800 < sum(map(bool, faults)) < 1_200
    assert not any(drawn(FaultDice(FaultScript(1, 0.0), "in"), 1_000))
    assert all(drawn(FaultDice(FaultScript(1, 1.0, ("drop",)), "in"), 100))


@pytest.mark.parametrize(
    ("kind", "frame"), [("corrupt_header", 0), ("corrupt_body", 1), ("corrupt_payload", None)]
)
def test_corruption_is_one_bit_where_it_says(kind: str, frame: int | None) -> None:
    dice = FaultDice(FaultScript(3), "in")
    for _ in range(50):
        spoiled = dice.spoil(kind, FRAMES)
        changed = [i for i, (a, b) in enumerate(zip(FRAMES, spoiled, strict=True)) if a != b]
        assert len(changed) == 1
        assert changed[0] == frame if frame is not None else changed[0] >= 2
        pairs = zip(FRAMES[changed[0]], spoiled[changed[0]], strict=True)
        assert sum((a ^ b).bit_count() for a, b in pairs) == 1


def test_truncation_takes_bytes_or_a_frame() -> None:
    dice = FaultDice(FaultScript(3), "in")
    sizes = {tuple(len(frame) for frame in dice.spoil("truncate", FRAMES)) for _ in range(100)}
    whole = tuple(len(frame) for frame in FRAMES)
    assert whole not in sizes
    assert whole[:-1] in sizes
    assert all(sum(size) < sum(whole) for size in sizes)


def test_a_message_is_left_whole_where_it_has_no_such_part() -> None:
    dice = FaultDice(FaultScript(3), "in")
    assert dice.spoil("corrupt_body", [b"header", b""]) == [b"header", b""]
    assert dice.spoil("corrupt_payload", [b"header", b"body"]) == [b"header", b"body"]


@pytest.mark.parametrize("wrong", [{"kinds": ("explode",)}, {"share": 2.0}, {"delay_s": 0.0}])
def test_a_script_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"faults to choose|share|times"):
        FaultScript(1, **wrong)  # type: ignore[arg-type]


def test_no_configuration_file_can_name_the_plane() -> None:
    with pytest.raises(ValidationError):
        TransferSettings.model_validate({"planes": ["fault", "zmq"]})
    assert "fault_deck" not in TransferSettings.model_fields


def test_the_plane_needs_its_deck_and_the_deck_its_plane() -> None:
    deck = FaultDeck(FaultScript(1))
    with pytest.raises(ConfigError, match="fault is for tests"):
        TransferConfig(planes=("fault", "zmq"))
    with pytest.raises(ConfigError, match="fault is for tests"):
        TransferConfig(planes=("zmq",), fault_deck=deck)
    with pytest.raises(ConfigError, match="choose from"):
        TransferConfig(planes=("fault",), fault_deck=deck)  # it wraps another, it is none itself
    # What is offered to a peer is the plane below.
    assert ordered_planes(TransferConfig(planes=("fault", "zmq"), fault_deck=deck)) == ("zmq",)
