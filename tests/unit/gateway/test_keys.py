"""The keys file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError, RequestError
from services.gateway.auth import AuthConfig, Authenticator
from services.gateway.keys import create_key, hash_key, list_keys, read_keys, revoke_key
from services.gateway.namespaces import Namespaces, random_secret


def make_authenticator(path: Path | None, clock: ManualClock) -> Authenticator:
    return Authenticator(AuthConfig(path), Namespaces(random_secret()), clock)


def test_created_keys_are_listed_until_revoked(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "keys.json"
    assert list_keys(path) == ()
    key, record = create_key(path, "acme", "laptop", 123)
    assert list_keys(path) == (record,)
    assert record.sha256 == hash_key(key)
    assert (record.tenant, record.label, record.created_unix_ms) == ("acme", "laptop", 123)
    assert revoke_key(path, record.key_id) is True
    assert revoke_key(path, record.key_id) is False
    assert list_keys(path) == ()
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.json"]


def test_two_keys_differ(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert create_key(path, "a", "", 0)[0] != create_key(path, "a", "", 0)[0]


@pytest.mark.parametrize("tenant", ["", "a b", "a/b", "x" * 65, "ü"])
def test_odd_tenant_names_are_refused(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        create_key(tmp_path / "keys.json", tenant, "", 0)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"format": 2}', '{"keys": [{"sha256": "x"}]}', '{"extra": 1}']
)
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="keys file"):
        read_keys(path)


def test_file_is_looked_at_again_after_the_poll_interval(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    authenticator = make_authenticator(path, clock)
    key, record = create_key(path, "acme", "", 0)
    headers = {"authorization": f"Bearer {key}"}
    with pytest.raises(RequestError):
        authenticator.authenticate(headers)
    clock.advance(1.0)
    assert authenticator.authenticate(headers).tenant == "acme"
    revoke_key(path, record.key_id)
    assert authenticator.authenticate(headers).key_id == record.key_id
    clock.advance(1.0)
    with pytest.raises(RequestError, match="not known"):
        authenticator.authenticate(headers)


def test_without_a_file_everyone_is_the_nameless_tenant() -> None:
    assert make_authenticator(None, ManualClock()).authenticate({}).tenant == ""


@pytest.mark.parametrize(
    "value", ["", "Basic abc", "Bearer", "Bearer \udcff", "Bearer " + "x" * 999]
)
def test_odd_credentials_are_unauthenticated(tmp_path: Path, value: str) -> None:
    path = tmp_path / "keys.json"
    create_key(path, "acme", "", 0)
    with pytest.raises(RequestError) as caught:
        make_authenticator(path, ManualClock()).authenticate({"authorization": value})
    assert caught.value.spec.code == "unauthenticated"


def test_file_holds_digests_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, _ = create_key(path, "acme", "", 0)
    record = json.loads(path.read_text())["keys"][0]
    assert record.keys() == {
        *("key_id", "sha256", "tenant", "label", "created_unix_ms", "expires_unix_ms", "scopes")
    }
    _, _, secret = key.split("-", 2)  # the secret may have a "-" of its own
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_end_at_their_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", ManualClock(unix_ms=1_000)
    key, _ = create_key(path, "acme", "", 0, expires_unix_ms=2_000)
    authenticator = make_authenticator(path, clock)
    headers = {"authorization": f"Bearer {key}"}
    clock.advance(0.999)
    assert authenticator.authenticate(headers).tenant == "acme"
    clock.advance(0.001)
    with pytest.raises(RequestError, match="expired"):
        authenticator.authenticate(headers)


def test_pages_beside_the_doors_are_for_keys_that_may_monitor(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    inference, _ = create_key(path, "acme", "", 0)
    monitor, _ = create_key(path, "ops", "", 0, ("monitor",))
    authenticator = make_authenticator(path, ManualClock())
    assert authenticator.may_monitor(f"Bearer {monitor}")
    for wrong in ("", "Bearer ", f"Bearer {inference}", monitor, f"Bearer {monitor}x", "\udcff"):
        assert not authenticator.may_monitor(wrong)
    assert make_authenticator(None, ManualClock()).may_monitor("")


def test_file_from_before_there_were_scopes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, "acme", "", 0)
    content = json.loads(path.read_text())
    del content["keys"][0]["scopes"], content["keys"][0]["expires_unix_ms"]
    path.write_text(json.dumps(content))
    (record,) = list_keys(path)
    assert record.scopes == ("inference", "monitor")
    assert not record.is_expired(1 << 60)


@pytest.mark.parametrize("scopes", [(), ("root",), ("inference", "peer")])
def test_scopes_nobody_can_have_are_refused(tmp_path: Path, scopes: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="scopes"):
        create_key(tmp_path / "keys.json", "acme", "", 0, scopes)


def test_a_mounted_directory_is_read_as_one_file(tmp_path: Path) -> None:
    """A Secret is mounted as links into a directory that is swapped as a whole."""
    clock, keys = ManualClock(), []
    for version, tenants in (("v1", ("a", "b")), ("v2", ("b", "c"))):
        (tmp_path / version).mkdir()
        keys += [create_key(tmp_path / version / f"{t}.json", t, "", 0)[0] for t in tenants]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(tmp_path / "v1")
    for name in ("a.json", "b.json"):
        (mounted / name).symlink_to(f"..data/{name}")
    (mounted / "tenant.secret").write_text("x" * 32)
    authenticator = make_authenticator(mounted, clock)

    def known() -> list[int]:
        found = []
        for i, key in enumerate(keys):
            with contextlib.suppress(RequestError):
                authenticator.authenticate({"authorization": f"Bearer {key}"})
                found.append(i)
        return found

    assert known() == [0, 1]
    (mounted / "..new").symlink_to(tmp_path / "v2")
    (mounted / "a.json").unlink()
    (mounted / "c.json").symlink_to("..data/c.json")
    (mounted / "..new").rename(mounted / "..data")
    clock.advance(1.0)
    assert known() == [2, 3]
    with pytest.raises(ConfigError, match="is a directory"):
        create_key(mounted, "d", "", 0)


def test_a_directory_without_keys_or_with_one_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        read_keys(tmp_path)
    create_key(tmp_path / "a.json", "acme", "", 0)
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    with pytest.raises(ConfigError, match="same key_id"):
        read_keys(tmp_path)
