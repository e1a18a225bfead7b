"""Which KV numbers may stand for which: what happened to them since they were computed. Pure.

A block hash binds tokens to a block, not how its numbers were rounded. A form does: blocks of
one hash may be used for each other only where their form is the same too.
"""

from __future__ import annotations

import hashlib
import struct

from services.common.ids import BlockHash
from services.kv.hashing import HASH_BYTES

EXACT = ""  # as the holder's own model computes them
UNKNOWN = "?"  # never used again: nobody can say what would be the same

_FORM_TAG = b"isthmus-block-form/1"


def form_of(computed: str, wire: str, own: str) -> str:
    """Name the form of KV that came over a link.

    Args:
        computed: dtype of the pool it was computed in; "" when its issuer cannot say.
        wire: dtype of the frames.
        own: dtype of the pool it was written to.
    """
    if not computed:
        return UNKNOWN
    steps = [computed]
    for dtype in (wire, own):
        if dtype != steps[-1]:
            steps.append(dtype)
    return EXACT if steps == [own] else ">".join(steps)


def cache_key(block_hash: BlockHash, form: str) -> BlockHash:
    """Name a block in the prefix cache: its hash, or one of its own where the form is not exact.

    The hash commits to every token before the block, so it need not be chained again.
    """
    if form == EXACT:
        return block_hash
    if form == UNKNOWN:
        raise ValueError("KV of an unknown form is not cached")
    text = form.encode()
    message = b"".join((_FORM_TAG, struct.pack("<I", len(text)), text, block_hash))
    return BlockHash(hashlib.sha256(message).digest()[:HASH_BYTES])
