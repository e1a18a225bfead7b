"""What pools of two layouts can exchange, which part, and in what form on the wire; pure.

The part is what both hold, widened to the lines of the sender's digests so that it is verified
before anything of it is used. The receiver works it out from WELCOME and names it in OPEN; the
sender checks it again.
"""

from __future__ import annotations

from dataclasses import replace

from services.kv.digest import digest_columns
from services.kv.form import UNKNOWN, form_of
from services.kv.layout import KV_DTYPES, MAX_BLOCK_TOKENS, KvLayout

AS_STORED = ""
WIRE_DTYPES = (AS_STORED, "bfloat16", "int8")

Range = tuple[int, int]


class Unservable(Exception):
    """The OPEN asks for a part or a form this pool does not give."""


def mismatch(prefill: KvLayout, decode: KvLayout) -> str | None:
    """Say why KV of one layout cannot become KV of the other, with both; None if it can."""
    why = prefill.problem() or decode.problem() or _difference(prefill, decode)
    if why is None:
        return None
    return f"kv_layout: {why}: prefill has {prefill}, decode has {decode}"


def _difference(prefill: KvLayout, decode: KvLayout) -> str | None:
    if decode.is_layer_major:
        return "decode cannot write to a layer-major pool"
    for name in ("head_dim", "total_layers", "total_heads"):
        if getattr(prefill, name) != getattr(decode, name):
            return f"{name} differs"
    if _overlap(prefill.layers, decode.layers) is None:
        return "no layer in common"
    if _overlap(prefill.heads, decode.heads) is None:
        return "no KV head in common"
    return None


def needed(prefill: KvLayout, decode: KvLayout) -> tuple[Range, Range]:
    """Return the layers and heads that both hold."""
    layers = _overlap(prefill.layers, decode.layers)
    heads = _overlap(prefill.heads, decode.heads)
    if layers is None or heads is None:
        raise ValueError("the pools have nothing in common")
    return layers, heads


def wire_layout(prefill: KvLayout, decode: KvLayout, wire_dtype: str) -> KvLayout:
    """Return what one payload frame is: a block of the sender, cut and in the wire's dtype.

    Args:
        wire_dtype: what the link has agreed on; ignored where it would not make frames smaller.
    """
    (lo, hi), heads = needed(prefill, decode)
    touched = [group for group in prefill.layer_groups if group[0] < hi and group[1] > lo]
    part = prefill.part((touched[0][0], touched[-1][1]), heads)
    return in_wire_dtype(part, wire_dtype)


def in_wire_dtype(part: KvLayout, wire_dtype: str) -> KvLayout:
    """Return a part in the wire's dtype, or as stored where that is not larger."""
    if wire_dtype == AS_STORED:
        return part
    converted = replace(part, kv_dtype=wire_dtype)
    return converted if converted.block_bytes < part.block_bytes else part


def expected_form(computed: str, own: KvLayout, wire_dtype: str, is_sent: bool | None) -> str:
    """Foretell the form of KV that is yet to come.

    Args:
        computed: dtype the ticket names.
        is_sent: whether frames are sent, not mapped; None while there is no connection.
    """
    if not computed or computed not in KV_DTYPES:
        return UNKNOWN
    if wire_dtype == AS_STORED or is_sent is False:
        return form_of(computed, computed, own.kv_dtype)
    if is_sent is None:
        return UNKNOWN
    wire = in_wire_dtype(replace(own, kv_dtype=computed), wire_dtype)
    return form_of(computed, wire.kv_dtype, own.kv_dtype)


def requested(
    pool: KvLayout, layers: Range, heads: Range, dtype: str, agreed: str
) -> KvLayout | None:
    """Return what an OPEN asks for; None = blocks as they are.

    Args:
        layers: [lo, hi) in the model's numbers; hi 0 = all. `heads` likewise.
        dtype: of the frames; "" = as stored.
        agreed: the wire dtype this link may have.
    """
    wanted_layers = layers if layers[1] else pool.layers
    wanted_heads = heads if heads[1] else pool.heads
    for name, (lo, hi), (first, end) in (
        ("layers", wanted_layers, pool.layers),
        ("heads", wanted_heads, pool.heads),
    ):
        if not first <= lo < hi <= end:
            raise Unservable(f"{name} [{lo}, {hi}) are not in [{first}, {end})")
    part = pool.part(wanted_layers, wanted_heads)
    if digest_columns(pool, part) is None:
        raise Unservable("the layers do not end where digests do")
    if dtype not in ("", pool.kv_dtype):
        if dtype != in_wire_dtype(part, agreed).kv_dtype:
            raise Unservable(f"frames of {dtype} were not agreed")
        part = replace(part, kv_dtype=dtype)
    return None if part.is_same(pool) else part


def max_frame_bytes(layout: KvLayout) -> int:
    """Return the largest frame a peer may have to send us: largest blocks, widest dtype."""
    widest = replace(layout, kv_dtype="float32", block_size=MAX_BLOCK_TOKENS)
    return widest.part((0, layout.total_layers), layout.heads).block_bytes


def _overlap(left: Range, right: Range) -> Range | None:
    lo, hi = max(left[0], right[0]), min(left[1], right[1])
    return (lo, hi) if lo < hi else None
