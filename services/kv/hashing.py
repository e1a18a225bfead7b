"""Names of KV blocks: SHA-256 chains over 16-token blocks, equal in every process and host."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from kernels.cpu import kv_blocks
from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS

HASH_SCHEME = "sha256-128/chain16/1"  # part of KvIdentity: peers with another scheme never pair
HASH_BYTES = 16

_ROOT_TAG = b"isthmus-block-root/1"
_BLOCK_TAG = b"isthmus-block/1"
_TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES

# What precedes the parent and the tokens in every block's message; each part has its length
# before it, so no two different (parent, tokens) give the same message.
_BLOCK_PREFIX = struct.pack("<I", len(_BLOCK_TAG)) + _BLOCK_TAG + struct.pack("<I", HASH_BYTES)
_TOKENS_PREFIX = struct.pack("<I", _BLOCK_BYTES)

# One vector every process checks at start: a hash that depends on the process (PYTHONHASHSEED,
# byte order) would give a hit rate of zero without any error.
_REFERENCE_HASH = "c43cc517fb7e363e12852d852432fd73"


@dataclass(frozen=True, slots=True)
class HashScope:
    """What KV depends on besides the tokens; blocks of different scopes never match."""

    model_digest: str
    adapter_digest: str = ""
    tenant: str = ""

    @property
    def root(self) -> BlockHash:
        """Parent of every chain's first block."""
        return _root(self)


@lru_cache(maxsize=1024)  # tenants come again and again
def _root(scope: HashScope) -> BlockHash:
    digest = hashlib.sha256()
    fields = (scope.model_digest, scope.adapter_digest, scope.tenant)
    for part in (_ROOT_TAG, HASH_SCHEME.encode(), *(text.encode() for text in fields)):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest()[:HASH_BYTES])


def next_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Hash one full block after `parent` (a block's hash, or `HashScope.root` for the first).

    Args:
        parent: hash of the block before.
        tokens: 16 token ids as little-endian uint32.
    """
    if len(tokens) != _BLOCK_BYTES or len(parent) != HASH_BYTES:
        raise ValueError(f"a block hash takes {HASH_BYTES} and {_BLOCK_BYTES} bytes")
    message = b"".join((_BLOCK_PREFIX, parent, _TOKENS_PREFIX, tokens))
    return BlockHash(hashlib.sha256(message).digest()[:HASH_BYTES])


def pack_token_ids(token_ids: Iterable[int] | npt.NDArray[np.uint32]) -> bytes:
    """Token ids as little-endian uint32."""
    if not isinstance(token_ids, np.ndarray):
        token_ids = np.fromiter(token_ids, dtype=np.uint32)
    return token_ids.astype("<u4", copy=False).tobytes()


def chain_hashes(scope: HashScope, token_ids: npt.NDArray[np.uint32]) -> tuple[BlockHash, ...]:
    """Hashes of the full blocks of `token_ids`; a partial last block has none."""
    return extend_hashes(scope.root, token_ids)


def extend_hashes(parent: BlockHash, token_ids: npt.NDArray[np.uint32]) -> tuple[BlockHash, ...]:
    """Hashes of the full blocks of `token_ids`, which follow the block named `parent`."""
    data = pack_token_ids(token_ids)
    if len(parent) != HASH_BYTES:
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")
    library, _ = kv_blocks.available()
    if library is not None and library.can_hash:
        head = b"".join((_BLOCK_PREFIX, parent, _TOKENS_PREFIX))
        names = library.hash_chain(head, len(_BLOCK_PREFIX), data, _BLOCK_BYTES)
        cuts = range(0, len(names), HASH_BYTES)
        hashes = [names[at : at + HASH_BYTES] for at in cuts]
        return cast("tuple[BlockHash, ...]", tuple(hashes))
    # As next_hash, without a call for each block: a prompt has thousands.
    sha256, hashes, chained = hashlib.sha256, list[bytes](), bytes(parent)
    for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        tokens = data[start : start + _BLOCK_BYTES]
        chained = sha256(_BLOCK_PREFIX + chained + _TOKENS_PREFIX + tokens).digest()[:HASH_BYTES]
        hashes.append(chained)
    return cast("tuple[BlockHash, ...]", tuple(hashes))


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Hashes one after the other, as the wire carries them."""
    return b"".join(hashes)


def check_reference_vector() -> None:
    """Raise RuntimeError when this process hashes differently from every other one."""
    scope = HashScope("reference-model", "reference-adapter", "reference-tenant")
    (got,) = chain_hashes(scope, np.arange(BLOCK_TOKENS, dtype=np.uint32))
    if got.hex() != _REFERENCE_HASH:
        raise RuntimeError(
            f"block hashes of this process differ from the reference ({got.hex()} instead of "
            f"{_REFERENCE_HASH}): prefix hints would never match"
        )
