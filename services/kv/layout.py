"""What a KV block looks like in memory, and what must be equal for KV to be exchanged at all."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_TOKENS = 16  # the hash chain is always at this granularity
HINT_STRIDE_BLOCKS = 4  # hints are kept for every 4th value of the 16-token hash chain
DIGEST_LAYER_GROUPS = 4  # digests per (block, KV head, layer quarter)

_MAX_DIM = 4096
BLOCK_MAJOR, LAYER_MAJOR = "LKHTD", "LKNHTD"  # how blocks lie in a pool; see KvLayout
MAX_BLOCK_TOKENS = 128  # a larger block is refused: one frame would be hundreds of MiB
SCALE_BYTES = 2  # float16, one per (layer, K or V, head, token) of an int8 block

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
KV_DTYPES = tuple(_DTYPE_BYTES)


@functools.lru_cache(maxsize=256)
def _layer_groups(total: int, first: int, end: int) -> tuple[tuple[int, int], ...]:
    groups = min(DIGEST_LAYER_GROUPS, total)
    grid = ((g * total // groups, (g + 1) * total // groups) for g in range(groups))
    return tuple((max(lo, first), min(hi, end)) for lo, hi in grid if lo < end and hi > first)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one pool block: `[num_layers][2 (K, V)][num_kv_heads][block_size][head_dim]`.

    Tag "LKHTD", block-major: a pool is `[num_blocks, block_bytes]`; int8 values are followed by
    their scales, float16 `[num_layers][2][num_kv_heads][block_size]`. Tag "LKNHTD", layer-major: a
    pool is `[num_layers][2][num_blocks]` pieces of a block, which outside the pool is the same
    bytes as the other; never int8. Layouts may differ between peers and be converted; identities
    (KvIdentity) may not.

    A pool may hold a shard: layers from `first_layer` and heads from `first_head` on, of a model
    with `model_layers` and `model_heads` (0 = the shard is the whole).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "float32"
    block_size: int = BLOCK_TOKENS
    tag: str = BLOCK_MAJOR
    first_layer: int = 0
    first_head: int = 0
    model_layers: int = 0
    model_heads: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self.kv_dtype]

    @property
    def num_rows(self) -> int:
        """Rows of `head_dim` elements in one block."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size

    @property
    def data_bytes(self) -> int:
        """Bytes of the elements of one block."""
        return self.num_rows * self.head_dim * self.itemsize

    @property
    def has_scales(self) -> bool:
        """Whether scales follow the elements of a block."""
        return self.kv_dtype == "int8"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, scales included."""
        scales = SCALE_BYTES * self.num_rows if self.has_scales else 0
        return self.data_bytes + scales

    @property
    def is_layer_major(self) -> bool:
        """Whether a block's pieces lie apart in the pool."""
        return self.tag == LAYER_MAJOR

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layers(self) -> tuple[int, int]:
        """Layers held, [lo, hi), in the model's numbers."""
        return self.first_layer, self.first_layer + self.num_layers

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads held, [lo, hi), in the model's numbers."""
        return self.first_head, self.first_head + self.num_kv_heads

    @property
    def total_layers(self) -> int:
        """Layers of the model."""
        return self.model_layers or self.num_layers

    @property
    def total_heads(self) -> int:
        """KV heads of the model."""
        return self.model_heads or self.num_kv_heads

    @property
    def layer_groups(self) -> tuple[tuple[int, int], ...]:
        """Layer ranges [lo, hi) of the digests of one head, in the model's numbers.

        The grid is the model's, so shards that are cut elsewhere still share its lines.
        """
        return _layer_groups(self.total_layers, *self.layers)

    @property
    def digests_per_block(self) -> int:
        """Number of u64 digests stored beside one block."""
        return self.num_kv_heads * len(self.layer_groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def part(self, layers: tuple[int, int], heads: tuple[int, int]) -> KvLayout:
        """Return the layout of a part outside its pool, its ranges in the model's numbers."""
        # Every OPEN asks for this several times; dataclasses.replace takes four times as long.
        return KvLayout(
            layers[1] - layers[0],
            heads[1] - heads[0],
            self.head_dim,
            self.kv_dtype,
            self.block_size,
            BLOCK_MAJOR,
            layers[0],
            heads[0],
            self.total_layers,
            self.total_heads,
        )

    def is_same(self, other: KvLayout) -> bool:
        """Tell whether blocks of both, outside their pools, are alike byte for byte."""
        return self.part(self.layers, self.heads) == other.part(other.layers, other.heads)

    def problem(self) -> str | None:
        """Say what is wrong with numbers that came from elsewhere, or None."""
        if self.kv_dtype not in KV_DTYPES:
            return f"kv_dtype {self.kv_dtype!r} is not known"
        if self.tag not in (BLOCK_MAJOR, LAYER_MAJOR):
            return f"tag {self.tag!r} is not known"
        if self.is_layer_major and self.has_scales:
            return "layer-major blocks with scales are not known"
        if self.block_size % BLOCK_TOKENS or not 0 < self.block_size <= MAX_BLOCK_TOKENS:
            return f"block_size {self.block_size} is no multiple of {BLOCK_TOKENS} in bounds"
        for name, (lo, hi), total in (
            ("layers", self.layers, self.total_layers),
            ("heads", self.heads, self.total_heads),
        ):
            if not 0 <= lo < hi <= total <= _MAX_DIM:
                return f"{name} [{lo}, {hi}) of {total} are no range"
        if not 0 < self.head_dim <= _MAX_DIM:
            return f"head_dim {self.head_dim} is out of bounds"
        return None

    def __str__(self) -> str:
        (a, b), (c, d) = self.layers, self.heads
        return (
            f"{self.kv_dtype}/{self.block_size}/{self.tag} "
            f"layers {a}-{b} of {self.total_layers} heads {c}-{d} of {self.total_heads} "
            f"of {self.head_dim}"
        )


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
