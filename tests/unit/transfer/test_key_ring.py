"""The key ring: three steps of a rotation, files that cannot be used, and what is tried when."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import zmq.auth

from services.common.errors import ConfigError
from services.transfer.config import TransferConfig
from services.transfer.key_ring import (
    CHECK_S,
    GRACE_S,
    CurveKeys,
    Dialler,
    KeyRing,
    KeyWatch,
    LinkKeys,
    RingChange,
    make_keys,
    read_ring,
    write_ring,
)

OLD, NEW, THIRD = make_keys(), make_keys(), make_keys()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.keys"
    write_ring(file, KeyRing((OLD,)))
    return file


def watch(path: Path) -> KeyWatch:
    found = KeyWatch.open(str(path), 0.0)
    assert found is not None
    return found


def test_a_rotation_adds_promotes_and_retires() -> None:
    ring = KeyRing((OLD,))
    both = ring.added(NEW)
    assert (both.current, both.keys) == (OLD, (OLD, NEW))
    promoted = both.promoted()
    assert (promoted.current, promoted.keys) == (NEW, (NEW, OLD))
    assert promoted.retired().keys == (NEW,)
    assert both.retired().keys == (OLD,)  # the next key taken back


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda: KeyRing((OLD, NEW)).added(THIRD), "full"),
        (lambda: KeyRing((OLD,)).promoted(), "add the next"),
        (lambda: KeyRing((OLD,)).retired(), "nothing can be retired"),
    ],
)
def test_steps_out_of_order_are_refused(step: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        step()  # type: ignore[operator]


def test_a_ring_is_written_for_its_owner_only_and_read_back(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_ring(path, KeyRing((NEW, OLD)))
    assert read_ring(path) == KeyRing((NEW, OLD))
    assert list(path.parent.iterdir()) == [path]


def test_a_zmq_certificate_is_a_ring_of_one(tmp_path: Path) -> None:
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "cluster")
    ring = read_ring(Path(secret_file))
    assert len(ring.keys) == 1
    with pytest.raises(ConfigError, match="holds no secret key"):
        read_ring(Path(public_file))


def entry(key: CurveKeys) -> dict[str, str]:
    return {"public": key.public.decode(), "secret": key.secret.decode()}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "neither"),
        ("hello", "neither"),
        ("{", "damaged"),
        ('{"keys": []}', "damaged"),
        (json.dumps({"format": 2, "keys": [entry(OLD)]}), "format"),
        (json.dumps({"format": 1, "keys": []}), "0 keys"),
        (json.dumps({"format": 1, "keys": [entry(OLD), entry(NEW), entry(THIRD)]}), "3 keys"),
        (json.dumps({"format": 1, "keys": [entry(OLD), entry(OLD)]}), "same key twice"),
        (
            json.dumps({"format": 1, "keys": [entry(CurveKeys(NEW.public, OLD.secret))]}),
            "not that of its secret",
        ),
        (json.dumps({"format": 1, "keys": [{"public": "x", "secret": "y"}]}), "not that of its"),
        ('{"format": 1, "keys": [{"public": 1, "secret": 2}]}', "damaged"),
        ("{" + " " * 70_000 + "}", "larger"),
        ("[" * 50_000, "neither"),
        ('{"a":' * 10_000, "damaged"),
    ],
)
def test_a_bad_key_file_is_an_error_at_the_edge(path: Path, content: str, what: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"transfer.curve_key_file: .*{what}"):
        KeyWatch.open(TransferConfig(curve_key_file=str(path)).curve_key_file, 0.0)


def test_no_secret_is_in_an_error(path: Path) -> None:
    """RB-118: the text of a key file is shown to nobody."""
    path.write_text(json.dumps({"format": 1, "keys": [entry(CurveKeys(NEW.public, OLD.secret))]}))
    with pytest.raises(ConfigError) as caught:
        watch(path)
    for text in (OLD.secret, NEW.public):
        assert text.decode() not in str(caught.value)


def test_a_missing_file_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyWatch.open(str(tmp_path / "absent"), 0.0)
    assert KeyWatch.open(None, 0.0) is None


def test_the_watch_sees_each_step_once_and_looks_once_a_second(path: Path) -> None:
    keys = watch(path)
    write_ring(path, KeyRing((OLD, NEW)))
    assert keys.poll(CHECK_S / 2) is None
    assert keys.poll(CHECK_S) == RingChange(added=(NEW.public,))
    assert keys.poll(2 * CHECK_S) is None
    write_ring(path, KeyRing((NEW, OLD)))
    assert keys.poll(3 * CHECK_S) == RingChange(is_promoted=True)
    write_ring(path, KeyRing((NEW,)))
    assert keys.poll(4 * CHECK_S) == RingChange(retired=(OLD.public,))
    assert keys.poll(4 * CHECK_S + GRACE_S - 0.1) is None
    assert keys.poll(5 * CHECK_S + GRACE_S) == RingChange(ended=(OLD.public,))
    assert keys.poll(6 * CHECK_S + GRACE_S) is None


def test_a_file_that_turns_bad_or_goes_changes_nothing(path: Path) -> None:
    keys = watch(path)
    path.write_text("nonsense")
    assert keys.poll(CHECK_S) is None
    assert keys.poll(2 * CHECK_S) is None  # told once
    assert (keys.ring.keys, keys.file_errors) == ((OLD,), 1)
    path.unlink()
    assert keys.poll(3 * CHECK_S) is None
    assert (keys.ring.keys, keys.file_errors) == ((OLD,), 2)
    write_ring(path, KeyRing((OLD, NEW)))
    assert keys.poll(4 * CHECK_S) == RingChange(added=(NEW.public,))


def test_a_rotation_lasts_until_the_grace_of_the_retired_key_is_over(path: Path) -> None:
    """Refusals are warnings again afterwards."""
    keys = watch(path)
    assert not keys.is_rotating
    write_ring(path, KeyRing((OLD, NEW)))
    keys.poll(CHECK_S)
    assert keys.is_rotating
    write_ring(path, KeyRing((NEW,)))
    keys.poll(2 * CHECK_S)
    assert keys.is_rotating
    keys.poll(3 * CHECK_S + GRACE_S)
    assert not keys.is_rotating


def test_one_end_of_a_worker_tells_what_becomes_of_the_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ends read it, and every change was in the log twice."""
    told, quiet = watch(path), KeyWatch.open(str(path), 0.0, is_quiet=True)
    assert quiet is not None
    write_ring(path, KeyRing((OLD, NEW)))
    with caplog.at_level("INFO"):
        assert told.poll(CHECK_S) == quiet.poll(CHECK_S) == RingChange(added=(NEW.public,))
        path.write_text("nonsense")
        assert told.poll(2 * CHECK_S) is quiet.poll(2 * CHECK_S) is None
    events = [record.message for record in caplog.records]
    assert events == ["transfer.keys_changed", "transfer.key_file_unusable"]


def test_keys_are_judged_by_the_ring_as_it_is_now(path: Path) -> None:
    keys = watch(path)
    assert [keys.judge(k.public) for k in (OLD, NEW)] == ["", "unknown"]
    write_ring(path, KeyRing((OLD, NEW)))
    keys.poll(1 * CHECK_S)
    assert [keys.judge(k.public) for k in (OLD, NEW)] == ["", ""]
    write_ring(path, KeyRing((NEW,)))
    keys.poll(2 * CHECK_S)
    assert [keys.judge(k.public) for k in (OLD, NEW)] == ["retired", ""]
    assert keys.judge(b"") == "unknown"
    keys.refuse("retired")
    keys.refuse("retired")
    assert keys.take_refusals() == {"retired": 2}
    assert keys.take_refusals() == {}


def test_a_key_taken_back_is_accepted_and_its_grace_forgotten(path: Path) -> None:
    keys = watch(path)
    write_ring(path, KeyRing((NEW,)))
    keys.poll(CHECK_S)
    write_ring(path, KeyRing((NEW, OLD)))
    assert keys.poll(2 * CHECK_S) == RingChange(added=(OLD.public,))
    assert keys.judge(OLD.public) == ""
    assert keys.poll(3 * CHECK_S + GRACE_S) is None


def test_what_a_peer_proved_is_tried_first_and_a_retired_key_last(path: Path) -> None:
    keys = watch(path)
    assert keys.candidates("a") == [LinkKeys(OLD, OLD.public)]
    write_ring(path, KeyRing((NEW, OLD)))
    keys.poll(CHECK_S)
    pairs = [(NEW, NEW), (OLD, NEW), (NEW, OLD), (OLD, OLD)]  # own pair, the peer's
    assert keys.candidates("a") == [LinkKeys(own, peer.public) for own, peer in pairs]
    keys.note_worked("a", OLD.public)
    assert keys.candidates("a")[0] == LinkKeys(NEW, OLD.public)
    assert keys.candidates("b")[0] == LinkKeys(NEW, NEW.public)
    write_ring(path, KeyRing((NEW,)))
    keys.poll(2 * CHECK_S)
    # A peer may not have read of it yet; but we prove the new key only.
    assert keys.candidates("b") == [LinkKeys(NEW, NEW.public), LinkKeys(NEW, OLD.public)]
    keys.poll(3 * CHECK_S + GRACE_S)
    assert keys.candidates("b") == [LinkKeys(NEW, NEW.public)]


def test_a_dialler_that_met_nobody_begins_again_later_with_the_best_keys() -> None:
    first, second = LinkKeys(OLD, OLD.public), LinkKeys(NEW, NEW.public)
    dialler = Dialler(lambda: [first, second])
    assert dialler.next() == (first, 0.0)
    tried = [dialler.again() for _ in range(4)]
    assert [keys for keys, _ in tried] == [first] * 4
    assert [wait_s for _, wait_s in tried] == sorted(wait_s for _, wait_s in tried)
    assert tried[0][1] > 0
    assert dialler.next() == (second, 0.0)
    assert dialler.again() == (None, 0.0)


def test_a_dialler_tries_everything_then_waits_and_ends() -> None:
    first, second = LinkKeys(OLD, OLD.public), LinkKeys(NEW, NEW.public)
    dialler = Dialler(lambda: [first, second])
    tried = []
    while True:
        keys, wait_s = dialler.next()
        if keys is None:
            break
        tried.append((keys, wait_s))
    assert [keys for keys, _ in tried] == [first, second] * 5
    waits = [wait_s for _, wait_s in tried]
    assert waits[0] == waits[1] == 0.0
    assert 0 < waits[2] < waits[4] < waits[6] < waits[8] < 1
    assert dialler.next() == (None, 0.0)
