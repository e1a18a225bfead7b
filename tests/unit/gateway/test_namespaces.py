"""RB-040, RB-037: caches of tenants are kept apart by a keyed hash of who they are."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import ConfigError
from services.common.secret import Secret
from services.gateway.namespaces import (
    Namespaces,
    make_secret,
    random_secret,
    read_secret,
    secret_path,
)
from services.kv.hashing import HashScope, chain_hashes

SECRET = Secret(b"s" * 32)
PROMPT = np.arange(64, dtype=np.uint32)


def test_tenants_share_no_block_hash() -> None:
    names = Namespaces(SECRET)
    hashes = [
        chain_hashes(HashScope("model", tenant=names.of(tenant)), PROMPT)
        for tenant in ("acme", "acm", "e", "other", "")
    ]
    assert len({block for chain in hashes for block in chain}) == 5 * 4


def test_a_namespace_is_of_the_tenant_and_the_secret_alone() -> None:
    first, second = Namespaces(SECRET), Namespaces(Secret(b"t" * 32))
    assert first.of("acme") == Namespaces(Secret(b"s" * 32)).of("acme")
    assert first.of("acme") != second.of("acme")
    assert "acme" not in first.of("acme")


def test_only_tenants_of_the_opt_in_list_share() -> None:
    names = Namespaces(SECRET, frozenset({"a", "b"}))
    assert names.of("a") == names.of("b")
    assert len({names.of(tenant) for tenant in ("a", "c", "d")}) == 3
    assert Namespaces(SECRET).of("a") != names.of("a")


def test_a_budget_is_of_one_tenant_whoever_shares_its_prefixes() -> None:
    names = Namespaces(SECRET, frozenset({"a", "b"}))
    budgets = [names.budget(tenant) for tenant in ("a", "b", "c", "")]
    assert len({*budgets, names.of("a"), names.of("c")}) == 6
    assert names.budget("a") == Namespaces(SECRET).budget("a")
    assert names.budget("a") != Namespaces(Secret(b"t" * 32)).budget("a")
    # Without keys every router makes a secret of its own.
    assert names.budget("") == Namespaces(random_secret()).budget("")


def test_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = secret_path("", str(tmp_path / "keys.json"))
    assert make_secret(path)
    assert not make_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_secret(path).reveal()) == 64
    assert secret_path("", str(tmp_path)) == path
    assert secret_path("/x/y", str(tmp_path)) == Path("/x/y")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000, b" " * 40])
def test_secret_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"auth\.tenant_secret_file"):
        read_secret(path)
    with pytest.raises(ConfigError, match="isthmus key tenant-secret"):
        read_secret(tmp_path / "none")


def test_a_secret_shows_itself_to_nobody() -> None:
    secret = random_secret()
    for text in (repr(secret), str(secret), f"{secret}", f"{[secret]!r}", f"{Exception(secret)}"):
        assert "***" in text
        assert repr(secret.reveal()) not in text
    with pytest.raises(TypeError):
        copy.copy(secret)
