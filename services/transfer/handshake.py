"""HELLO and WELCOME: who the peer is, whether its KV fits ours, and over which plane it comes.

The prefill side judges a HELLO and picks the plane; the decode side checks the answer again. The
second phase of HELLO is read only when the protocol ranges overlap, so that it may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.kv.layout import KvIdentity, KvLayout, first_mismatch
from services.pb import transfer_pb2 as pb
from services.transfer.codec import clip, parse, plane_name, plane_number, reject_body
from services.transfer.pairing import AS_STORED, mismatch
from services.transfer.planes import PLANES_BEST_FIRST, WHOLE_BLOCK_PLANES
from services.transfer.values import RejectCode
from services.transfer.wire import MessageType, WireError

PROTO_MIN = 1
PROTO_MAX = 1
MAX_WORKER_ID_BYTES = 128
_MAX_IDENTITY_FIELDS = 32
_MAX_FIELD = 256
_MAX_POOL_BLOCKS = 1 << 32


class Incompatible(Exception):
    """The two ends may not exchange KV; `field` says which property differs."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field}: ours {ours}, theirs {theirs}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What this worker says of itself."""

    worker_id: str
    incarnation: int
    host_id: str
    uid: int
    identity: KvIdentity
    layout: KvLayout
    planes: tuple[str, ...]
    uds_path: str = ""
    nonce: bytes = b""
    num_blocks: int = 0
    wire_dtype: str = AS_STORED
    device: str = "cpu"  # where the pool is computed on: "cpu" or "cuda"
    group_backend: str = ""  # of the nccl plane's groups: "nccl", "gloo", or none at all


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """What to send back on a HELLO, and the plane if the peer is welcome."""

    type: MessageType
    body: bytes
    worker_id: str
    incarnation: int
    plane: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the decode side learns of the prefill worker."""

    plane: str
    uds_path: str
    nonce: bytes
    num_blocks: int
    layout: KvLayout  # of its pool
    planes: frozenset[str]  # it allows


def host_id(root: Path = Path("/")) -> str:
    """Name this host as far as shared memory reaches: machine, boot, and namespaces."""
    parts = [
        _read_text(root / "etc/machine-id"),
        _read_text(root / "proc/sys/kernel/random/boot_id"),
        *(_read_link(root / "proc/self/ns" / name) for name in ("mnt", "ipc", "user", "pid")),
    ]
    digest = hashlib.sha256(b"isthmus-host/1")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part.encode())
    return digest.hexdigest()


def hello_body(end: LocalEnd) -> bytes:
    """Serialise our HELLO."""
    return pb.Hello(
        proto_min=PROTO_MIN,
        proto_max=PROTO_MAX,
        incarnation=end.incarnation,
        worker_id=end.worker_id,
        detail=_detail(end),
    ).SerializeToString()


def answer_hello(end: LocalEnd, body: bytes) -> HelloAnswer:
    """Judge a HELLO at the prefill side; raise WireError if it is not one."""
    hello = parse(pb.Hello, body)
    if not hello.worker_id or len(hello.worker_id.encode()) > MAX_WORKER_ID_BYTES:
        raise WireError("worker_id")
    try:
        if hello.proto_min > PROTO_MAX or hello.proto_max < PROTO_MIN:
            theirs = f"{hello.proto_min}..{hello.proto_max}"
            raise Incompatible("protocol", f"{PROTO_MIN}..{PROTO_MAX}", theirs)
        detail = _parse_detail(hello.detail)
        _check_identity(end, detail)
        why = mismatch(end.layout, _parse_layout(detail.layout))
        if why is not None:
            refusal = reject_body(RejectCode.LAYOUT, 0.0, why)
            return _refused(hello, MessageType.REJECT, refusal, why)
        _check_wire_dtype(end, detail)
        plane = _choose_plane(end, detail)
    except Incompatible as error:
        refusal = pb.Incompatible(
            field=error.field, ours=clip(error.ours), theirs=clip(error.theirs)
        ).SerializeToString()
        return _refused(hello, MessageType.INCOMPATIBLE, refusal, str(error))
    welcome = pb.WelcomePeer(
        proto=min(PROTO_MAX, hello.proto_max),
        detail=_detail(end),
        plane=plane_number(plane),
        nonce=end.nonce,
        num_blocks=end.num_blocks,
    ).SerializeToString()
    return HelloAnswer(
        MessageType.WELCOME, welcome, hello.worker_id, hello.incarnation, plane, "welcome"
    )


def read_welcome(end: LocalEnd, body: bytes) -> Welcome:
    """Check a WELCOME at the decode side; raise Incompatible if the peer was too generous."""
    message = parse(pb.WelcomePeer, body)
    if not PROTO_MIN <= message.proto <= PROTO_MAX:
        raise Incompatible("protocol", f"{PROTO_MIN}..{PROTO_MAX}", str(message.proto))
    detail = _parse_detail(message.detail)
    _check_identity(end, detail)
    layout = _parse_layout(detail.layout)
    why = mismatch(layout, end.layout)
    if why is not None:
        raise Incompatible("kv_layout", why, "")
    _check_wire_dtype(end, detail)
    plane = plane_name(message.plane)
    if plane not in end.planes or (layout.is_layer_major and plane in WHOLE_BLOCK_PLANES):
        raise Incompatible("planes", ",".join(end.planes), plane)
    if not 0 < message.num_blocks < _MAX_POOL_BLOCKS or len(message.nonce) > _MAX_FIELD:
        raise WireError("welcome")
    nonce, num_blocks = message.nonce, message.num_blocks
    return Welcome(plane, detail.uds_path, nonce, num_blocks, layout, _known_planes(detail))


def read_incompatible(body: bytes) -> Incompatible:
    """Read the peer's refusal; its `ours` is their side of it."""
    message = parse(pb.Incompatible, body)
    return Incompatible(clip(message.field), ours=clip(message.theirs), theirs=clip(message.ours))


def _refused(hello: pb.Hello, kind: MessageType, body: bytes, why: str) -> HelloAnswer:
    return HelloAnswer(kind, body, hello.worker_id, hello.incarnation, None, why)


def _known_planes(detail: pb.PeerDetail) -> frozenset[str]:
    names: set[str] = set()
    for number in detail.planes:
        with contextlib.suppress(WireError):  # a plane of a later version: not for us
            names.add(plane_name(number))
    return frozenset(names)


def _choose_plane(end: LocalEnd, detail: pb.PeerDetail) -> str:
    theirs = _known_planes(detail)
    for plane in PLANES_BEST_FIRST:
        if plane not in end.planes or plane not in theirs:
            continue
        if _is_possible(plane, end, detail):
            return plane
    # One both allow may still need the same device, the same host, or something to build groups.
    ours = f"{','.join(end.planes)} ({end.device}, groups: {end.group_backend or 'none'})"
    other = f"{','.join(sorted(theirs)) or 'none'} ({clip(detail.device)}, groups: "
    raise Incompatible("planes", ours, f"{other}{clip(detail.group_backend) or 'none'})")


def _is_possible(plane: str, end: LocalEnd, detail: pb.PeerDetail) -> bool:
    """Tell whether a plane both allow can carry KV from this pool to that peer."""
    if end.layout.is_layer_major and plane in WHOLE_BLOCK_PLANES:
        return False
    same_host = (detail.host_id, detail.uid) == (end.host_id, end.uid) and bool(end.uds_path)
    if plane == "attach":  # what is read in place cannot be converted
        is_alike = end.device == detail.device == "cpu" and _has_layout(detail, end.layout)
        return same_host and is_alike
    if plane == "memfd":
        return same_host and end.device == "cpu"
    if plane == "cuda_ipc":
        return same_host and end.device == detail.device == "cuda"
    if plane == "nccl":
        return end.group_backend != "" and end.group_backend == detail.group_backend
    return True


def _has_layout(detail: pb.PeerDetail, layout: KvLayout) -> bool:
    return _parse_layout(detail.layout).is_same(layout)


def _check_identity(end: LocalEnd, detail: pb.PeerDetail) -> None:
    if detail.kv_identity_fp == end.identity.fingerprint:
        return
    fields: Mapping[str, str] = detail.identity_fields
    differing = first_mismatch(end.identity.fields(), fields)
    if differing is None:
        differing = ("kv_identity_fp", end.identity.fingerprint, detail.kv_identity_fp)
    raise Incompatible(*differing)


def _check_wire_dtype(end: LocalEnd, detail: pb.PeerDetail) -> None:
    # Whoever wants fewer bytes also wants to know when it does not get them.
    if detail.wire_dtype != end.wire_dtype:
        theirs = clip(detail.wire_dtype) or "as stored"
        raise Incompatible("wire_dtype", end.wire_dtype or "as stored", theirs)


def _layout_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        block_size=layout.block_size,
        kv_dtype=layout.kv_dtype,
        scale_format="float16/row" if layout.kv_dtype == "int8" else "",
        layout_tag=layout.tag,
        num_layers=layout.total_layers,
        num_kv_heads=layout.total_heads,
        head_dim=layout.head_dim,
        tp_rank=0,
        tp_size=1,
        pp_first_layer=layout.first_layer,
        pp_num_layers=layout.num_layers,
        block_bytes=layout.block_bytes,
        first_kv_head=layout.first_head,
        held_kv_heads=layout.num_kv_heads,
    )


def _parse_layout(message: pb.KvLayout) -> KvLayout:
    """Read a layout and check its numbers; raise WireError when they do not fit together."""
    if len(message.kv_dtype) > _MAX_FIELD or len(message.layout_tag) > _MAX_FIELD:
        raise WireError("layout")
    layout = KvLayout(
        num_layers=message.pp_num_layers,
        num_kv_heads=message.held_kv_heads or message.num_kv_heads,
        head_dim=message.head_dim,
        kv_dtype=message.kv_dtype,
        block_size=message.block_size,
        tag=message.layout_tag,
        first_layer=message.pp_first_layer,
        first_head=message.first_kv_head,
        model_layers=message.num_layers,
        model_heads=message.num_kv_heads,
    )
    # A layout of a later version may have dtypes we do not know: `mismatch` names it.
    is_whole = layout.problem() is not None or layout.block_bytes == message.block_bytes
    if not is_whole:
        raise WireError("layout_bytes")
    return layout


def _detail(end: LocalEnd) -> bytes:
    detail = pb.PeerDetail(
        host_id=end.host_id,
        uid=end.uid,
        kv_identity_fp=end.identity.fingerprint,
        identity_fields=end.identity.fields(),
        layout=_layout_message(end.layout),
        planes=[plane_number(plane) for plane in end.planes],
        uds_path=end.uds_path,
        wire_dtype=end.wire_dtype,
        device=end.device,
        group_backend=end.group_backend,
    )
    # The map of fields in one order: equal ends say HELLO in equal bytes, in every process.
    return detail.SerializeToString(deterministic=True)


def _parse_detail(body: bytes) -> pb.PeerDetail:
    detail = parse(pb.PeerDetail, body)
    if len(detail.identity_fields) > _MAX_IDENTITY_FIELDS or len(detail.planes) > 16:
        raise WireError("detail_size")
    if len(detail.uds_path) > _MAX_FIELD or len(detail.host_id) > _MAX_FIELD:
        raise WireError("detail_size")
    return detail


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # absent in some containers; boot id and namespaces still tell hosts apart


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
