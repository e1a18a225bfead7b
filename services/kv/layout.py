"""What a KV block looks like in memory, and what must be equal for KV to be exchanged at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_TOKENS = 16  # the hash chain is always at this granularity
DIGEST_LAYER_GROUPS = 4  # digests per (block, KV head, layer quarter)

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one pool block: `[num_layers][2 (K, V)][num_kv_heads][block_size][head_dim]`.

    Tag "LKHTD", block-major: a pool is `[num_blocks, block_bytes]`. Layouts may differ between
    peers and be converted; identities (KvIdentity) may not.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "float32"
    block_size: int = BLOCK_TOKENS
    tag: str = "LKHTD"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return (
            self.num_layers
            * 2
            * self.num_kv_heads
            * self.block_size
            * self.head_dim
            * self.itemsize
        )

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def digests_per_block(self) -> int:
        """Number of u64 digests stored beside one block."""
        return self.num_kv_heads * min(DIGEST_LAYER_GROUPS, self.num_layers)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What the numbers in a block depend on; must be equal on both ends of a handoff."""

    model: str
    revision: str
    weights_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str
    tokenizer_digest: str
    hash_scheme: str
    adapter_policy: str = "none"

    def fields(self) -> dict[str, str]:
        """Field names and values, as sent in HELLO so that a mismatch can be named."""
        return {name: str(getattr(self, name)) for name in self.__slots__}

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the length-prefixed fields, hex."""
        digest = hashlib.sha256(b"isthmus-kv-identity/1")
        for name, value in sorted(self.fields().items()):
            for part in (name.encode(), value.encode()):
                digest.update(len(part).to_bytes(4, "little"))
                digest.update(part)
        return digest.hexdigest()


def first_mismatch(
    ours: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """Return (field, ours, theirs) of the first identity field that differs, or None."""
    for name in sorted(set(ours) | set(theirs)):
        left, right = ours.get(name, "<absent>"), theirs.get(name, "<absent>")
        if left != right:
            return name, left, right
    return None
