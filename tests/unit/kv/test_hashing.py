"""Block hashes are the same everywhere and bind everything KV depends on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import kv_blocks
from services.common.config import IsthmusConfig
from services.common.settings import Section
from services.kv import hashing
from services.kv.hashing import (
    HashScope,
    chain_hashes,
    check_reference_vector,
    extend_hashes,
    next_hash,
    pack_hashes,
    pack_token_ids,
)

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests/golden/block_hashes.json").read_text())
SCOPE = HashScope("model", "adapter", "tenant")


def _tokens(count: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(start, start + count, dtype=np.uint32)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    scope = HashScope(*case["scope"])
    tokens = np.array(case["token_ids"], dtype=np.uint32)
    assert [value.hex() for value in chain_hashes(scope, tokens)] == case["hashes"]


def test_golden_vectors_are_of_this_scheme() -> None:
    assert GOLDEN["scheme"] == hashing.HASH_SCHEME


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_do_not_depend_on_the_process(seed: str) -> None:
    """RB-038: another process with another PYTHONHASHSEED gives the same hashes."""
    code = (
        "import numpy as np\n"
        "from services.kv.hashing import *\n"
        "scope = HashScope('model', 'adapter', 'tenant')\n"
        "check_reference_vector()\n"
        "print(pack_hashes(chain_hashes(scope, np.arange(48, dtype=np.uint32))).hex())\n"
    )
    env = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == pack_hashes(chain_hashes(SCOPE, _tokens(48))).hex()


def test_self_test_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reference_vector()
    monkeypatch.setattr(hashing, "_BLOCK_TAG", b"other")
    monkeypatch.setattr(hashing, "_BLOCK_PREFIX", b"other")
    with pytest.raises(RuntimeError, match="prefix hints would never match"):
        check_reference_vector()


@pytest.mark.parametrize("has_library", [True, False])
def test_a_chain_is_what_its_blocks_give_one_by_one(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(kv_blocks, "available", lambda: (None, "turned off"))
    rng, parent = np.random.default_rng(1), SCOPE.root
    for count in (0, 15, 16, 17, 640, 1000):
        tokens = rng.integers(0, 1 << 32, count, dtype=np.uint32)
        expected, raw = [parent], pack_token_ids(tokens)
        for at in range(0, len(raw) - 63, 64):
            expected.append(next_hash(expected[-1], raw[at : at + 64]))
        assert extend_hashes(parent, tokens) == tuple(expected[1:])
        parent = expected[-1]


@pytest.mark.parametrize(("head_bytes", "block_bytes"), [(16, 1), (20, 35), (20, 36), (100, 156)])
def test_the_library_names_blocks_by_sha256(head_bytes: int, block_bytes: int) -> None:
    """Around the lengths at which padding takes another chunk, and at the longest."""
    library, _ = kv_blocks.available()
    if library is None or not library.can_hash:
        pytest.skip("no C compiler here, or a processor without instructions for SHA-256")
    rng = np.random.default_rng(head_bytes)
    head, tokens = rng.bytes(head_bytes), rng.bytes(3 * block_bytes + block_bytes // 2)
    at, names = head_bytes - 16, b""
    for block in range(3):
        named = head[:at] + (names[-16:] or head[at:]) + tokens[block * block_bytes :][:block_bytes]
        names += hashlib.sha256(named).digest()[:16]
    assert library.hash_chain(head, at, tokens, block_bytes) == names
    for wrong in ((head, at + 1, block_bytes), (head, -1, block_bytes), (head, at, 0)):
        with pytest.raises(ValueError, match="head"):
            library.hash_chain(wrong[0], wrong[1], tokens, wrong[2])
    with pytest.raises(ValueError, match="256 bytes"):
        library.hash_chain(head, at, tokens, 257 - head_bytes)


def test_only_full_blocks_have_hashes() -> None:
    for count, blocks in ((0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (48, 3)):
        assert len(chain_hashes(SCOPE, _tokens(count))) == blocks


def test_names_of_blocks_are_of_a_hash_that_cannot_be_collided_on_purpose() -> None:
    """RB-037, RB-043: SHA-256 to 128 bits over framed parts, and no setting for a faster one."""
    tokens = _tokens(16)
    fields = (
        b"isthmus-block-root/1",
        hashing.HASH_SCHEME.encode(),
        b"model",
        b"adapter",
        b"tenant",
    )
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in fields)
    root = hashlib.sha256(framed).digest()[:16]
    parts = (b"isthmus-block/1", root, pack_token_ids(tokens.tolist()))
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    assert chain_hashes(SCOPE, tokens) == (hashlib.sha256(framed).digest()[:16],)
    assert hashing.HASH_BYTES * 8 >= 128
    names = [name for section in IsthmusConfig.model_fields for name in _settings_of(section)]
    assert len(names) > 20
    assert not [name for name in names if "hash" in name or "salt" in name]


def _settings_of(section: str) -> list[str]:
    kind = IsthmusConfig.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    return list(kind.model_fields)


def test_every_field_changes_every_hash() -> None:
    """RB-042: the digest of an adapter and the tenant, never a name that two may share."""
    base = chain_hashes(SCOPE, _tokens(32))
    others = [
        HashScope("model2", "adapter", "tenant"),
        HashScope("model", "adapter2", "tenant"),
        HashScope("model", "adapter", "tenant2"),
        HashScope("modeladapter", "", "tenant"),  # the same text, framed otherwise
        HashScope("model", "adaptertenant", ""),
        HashScope("model", "", "adaptertenant"),
    ]
    seen = {*base}
    for scope in others:
        hashes = set(chain_hashes(scope, _tokens(32)))
        assert not hashes & seen
        seen |= hashes


def test_a_block_depends_on_all_before_it() -> None:
    one, two = _tokens(48), _tokens(48)
    two[3] += 1
    assert not set(chain_hashes(SCOPE, one)) & set(chain_hashes(SCOPE, two))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(0, 4))
def test_chain_can_be_extended_block_by_block(ids: list[int], split: int) -> None:
    tokens = np.array(ids, dtype=np.uint32)
    whole = chain_hashes(SCOPE, tokens)
    head = whole[:split]
    parent = head[-1] if head else SCOPE.root
    assert head + extend_hashes(parent, tokens[len(head) * 16 :]) == whole
    parent = SCOPE.root
    for idx, expected in enumerate(whole):
        parent = next_hash(parent, pack_token_ids(ids[idx * 16 : idx * 16 + 16]))
        assert parent == expected


def test_block_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="block hash"):
        next_hash(SCOPE.root, b"short")
