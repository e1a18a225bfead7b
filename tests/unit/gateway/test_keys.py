"""The keys file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.clock import ManualClock
from services.common.errors import ConfigError, RequestError
from services.gateway.auth import Authenticator
from services.gateway.keys import create_key, hash_key, list_keys, read_keys, revoke_key


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
    authenticator = Authenticator(path, clock, poll_s=1.0)
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
    assert Authenticator(None, ManualClock()).authenticate({}).tenant == ""


@pytest.mark.parametrize(
    "value", ["", "Basic abc", "Bearer", "Bearer \udcff", "Bearer " + "x" * 999]
)
def test_odd_credentials_are_unauthenticated(tmp_path: Path, value: str) -> None:
    path = tmp_path / "keys.json"
    create_key(path, "acme", "", 0)
    with pytest.raises(RequestError) as caught:
        Authenticator(path, ManualClock()).authenticate({"authorization": value})
    assert caught.value.spec.code == "unauthenticated"


def test_file_holds_digests_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, _ = create_key(path, "acme", "", 0)
    record = json.loads(path.read_text())["keys"][0]
    assert record.keys() == {"key_id", "sha256", "tenant", "label", "created_unix_ms"}
    assert key.rsplit("-", 1)[-1] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
