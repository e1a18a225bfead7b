"""HELLO: same KV, or a refusal that names the field; the best plane both sides have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.kv.layout import LAYER_MAJOR
from services.pb import transfer_pb2 as pb
from services.transfer import codec
from services.transfer.handshake import (
    Incompatible,
    LocalEnd,
    answer_hello,
    hello_body,
    host_id,
    read_incompatible,
    read_welcome,
)
from services.transfer.planes import PLANES_BEST_FIRST
from services.transfer.values import RejectCode
from services.transfer.wire import MessageType, WireError
from tests.support.transfer_ends import IDENTITY, LAYOUT

PREFILL = LocalEnd(
    worker_id="prefill-0",
    incarnation=11,
    host_id="host-a",
    uid=1000,
    identity=IDENTITY,
    layout=LAYOUT,
    planes=("memfd", "zmq"),
    uds_path="/run/kv.sock",
    nonce=b"n" * 64,
    num_blocks=64,
)
DECODE = replace(PREFILL, worker_id="decode-0", incarnation=12, uds_path="", nonce=b"")


def test_same_host_gets_memfd() -> None:
    answer = answer_hello(PREFILL, hello_body(DECODE))
    assert (answer.type, answer.plane) == (MessageType.WELCOME, "memfd")
    assert (answer.worker_id, answer.incarnation) == ("decode-0", 12)
    welcome = read_welcome(DECODE, answer.body)
    assert (welcome.plane, welcome.uds_path, welcome.num_blocks) == ("memfd", "/run/kv.sock", 64)
    assert welcome.nonce == b"n" * 64


@pytest.mark.parametrize(
    "decode",
    [
        replace(DECODE, host_id="host-b"),
        replace(DECODE, uid=1001),
        replace(DECODE, planes=("zmq",)),
    ],
)
def test_anything_else_gets_zmq(decode: LocalEnd) -> None:
    """RB-030: a peer is local by host id, user and nonce, never by its address."""
    assert answer_hello(PREFILL, hello_body(decode)).plane == "zmq"


def test_no_common_plane_is_incompatible() -> None:
    decode = replace(DECODE, host_id="host-b", planes=("memfd",))
    answer = answer_hello(PREFILL, hello_body(decode))
    assert answer.type is MessageType.INCOMPATIBLE
    assert read_incompatible(answer.body).field == "planes"


GPU = {"planes": PLANES_BEST_FIRST, "device": "cuda", "group_backend": "nccl"}


@pytest.mark.parametrize(
    ("prefill", "decode", "plane"),
    [
        (GPU, GPU, "cuda_ipc"),
        (GPU, {**GPU, "host_id": "host-b"}, "nccl"),
        (GPU, {**GPU, "host_id": "host-b", "group_backend": ""}, "zmq"),
        (GPU, {**GPU, "device": "cpu", "group_backend": "gloo"}, "zmq"),  # not the mirror's memfd
        ({**GPU, "device": "cpu", "group_backend": "gloo"}, GPU, "memfd"),
        ({"planes": ("nccl", "zmq"), "group_backend": "gloo"},) * 2 + ("nccl",),
        ({"planes": ("nccl", "zmq")},) * 2 + ("zmq",),  # nothing to build groups with
    ],
)
def test_the_best_plane_that_both_pools_can_have(
    prefill: dict[str, Any], decode: dict[str, Any], plane: str
) -> None:
    answer = answer_hello(replace(PREFILL, **prefill), hello_body(replace(DECODE, **decode)))
    assert answer.plane == plane


def test_blocks_in_pieces_are_not_used_where_they_are() -> None:
    layer_major = replace(LAYOUT, tag=LAYER_MAJOR)
    prefill, decode = (replace(end, planes=PLANES_BEST_FIRST) for end in (PREFILL, DECODE))
    assert answer_hello(prefill, hello_body(decode)).plane == "attach"
    apart = replace(prefill, layout=layer_major)
    answer = answer_hello(apart, hello_body(decode))
    assert answer.plane == "memfd"
    assert read_welcome(decode, answer.body).layout == replace(
        layer_major, model_layers=LAYOUT.num_layers, model_heads=LAYOUT.num_kv_heads
    )
    # A prefill worker that offers it all the same is found out by decode.
    welcome = pb.WelcomePeer.FromString(answer.body)
    for plane in ("attach", "cuda_ipc"):
        welcome.plane = codec.plane_number(plane)
        with pytest.raises(Incompatible, match="planes"):
            read_welcome(decode, welcome.SerializeToString())
    on_gpu = replace(apart, device="cuda"), replace(decode, device="cuda")
    assert answer_hello(on_gpu[0], hello_body(on_gpu[1])).plane == "zmq"


def test_identity_mismatch_names_the_field() -> None:
    decode = replace(DECODE, identity=replace(IDENTITY, weights_digest="other"))
    answer = answer_hello(PREFILL, hello_body(decode))
    assert (answer.type, answer.plane) == (MessageType.INCOMPATIBLE, None)
    error = read_incompatible(answer.body)
    assert (error.field, error.ours, error.theirs) == ("weights_digest", "other", "w" * 8)


def test_layouts_that_convert_are_welcome() -> None:
    for change in (
        {"kv_dtype": "bfloat16"},
        {"block_size": 32},
        {"num_layers": 2, "first_layer": 1, "model_layers": 4},
        {"num_kv_heads": 1, "first_head": 1, "model_heads": 2},
    ):
        decode = replace(DECODE, layout=replace(LAYOUT, **change))
        answer = answer_hello(PREFILL, hello_body(decode))
        assert answer.type is MessageType.WELCOME, change
        assert read_welcome(decode, answer.body).layout.is_same(LAYOUT)


def test_layout_mismatch_names_both() -> None:
    decode = replace(DECODE, layout=replace(LAYOUT, head_dim=64, kv_dtype="bfloat16"))
    answer = answer_hello(PREFILL, hello_body(decode))
    assert answer.type is MessageType.REJECT
    code, _, detail = codec.reject_args(answer.body)
    assert code is RejectCode.LAYOUT
    assert detail == (
        "kv_layout: head_dim differs: "
        "prefill has float32/16/LKHTD layers 0-4 of 4 heads 0-2 of 2 of 32, "
        "decode has bfloat16/16/LKHTD layers 0-4 of 4 heads 0-2 of 2 of 64"
    )
    # A prefill worker that is too generous is found out by decode.
    generous = answer_hello(replace(PREFILL, layout=decode.layout), hello_body(decode))
    with pytest.raises(Incompatible, match="head_dim differs"):
        read_welcome(DECODE, generous.body)


def test_a_layout_that_does_not_add_up_is_a_bad_frame() -> None:
    hello = pb.Hello.FromString(hello_body(DECODE))
    detail = pb.PeerDetail.FromString(hello.detail)
    detail.layout.block_bytes += 1
    hello.detail = detail.SerializeToString()
    with pytest.raises(WireError, match="layout_bytes"):
        answer_hello(PREFILL, hello.SerializeToString())
    detail.layout.kv_dtype, detail.layout.head_dim = "float3", 1 << 31
    hello.detail = detail.SerializeToString()
    answer = answer_hello(PREFILL, hello.SerializeToString())
    assert (answer.type, "'float3'" in answer.reason) == (MessageType.REJECT, True)


def test_both_ends_must_want_the_same_wire_dtype() -> None:
    """Neither side may round, or not save bytes, without the other knowing."""
    decode = replace(DECODE, wire_dtype="int8")
    refused = read_incompatible(answer_hello(PREFILL, hello_body(decode)).body)
    assert (refused.field, refused.ours, refused.theirs) == ("wire_dtype", "int8", "as stored")
    answer = answer_hello(replace(PREFILL, wire_dtype="int8"), hello_body(decode))
    assert answer.plane == "memfd"
    with pytest.raises(Incompatible, match="wire_dtype"):
        read_welcome(DECODE, answer.body)


def test_protocol_ranges_are_compared_before_the_detail_is_read() -> None:
    hello = pb.Hello(
        proto_min=7, proto_max=9, incarnation=1, worker_id="d", detail=b"\xff not a detail"
    )
    answer = answer_hello(PREFILL, hello.SerializeToString())
    assert read_incompatible(answer.body).field == "protocol"


def test_a_later_protocol_that_overlaps_is_welcome() -> None:
    hello = pb.Hello.FromString(hello_body(DECODE))
    hello.proto_max = 9
    answer = answer_hello(PREFILL, hello.SerializeToString())
    assert answer.plane == "memfd"
    assert pb.WelcomePeer.FromString(answer.body).proto == 1


def test_decode_checks_the_welcome_too() -> None:
    answer = answer_hello(PREFILL, hello_body(DECODE))
    other = replace(DECODE, identity=replace(IDENTITY, model="other"))
    with pytest.raises(Incompatible) as caught:
        read_welcome(other, answer.body)
    assert caught.value.field == "model"
    with pytest.raises(Incompatible, match="planes"):
        read_welcome(replace(DECODE, planes=("zmq",)), answer.body)


def test_too_many_identity_fields_are_refused() -> None:
    detail = pb.PeerDetail(identity_fields={str(i): "x" for i in range(100)})
    hello = pb.Hello(
        proto_min=1, proto_max=1, incarnation=1, worker_id="d", detail=detail.SerializeToString()
    )
    with pytest.raises(WireError, match="detail_size"):
        answer_hello(PREFILL, hello.SerializeToString())


def test_host_id_depends_on_machine_and_boot(tmp_path: Path) -> None:
    def make(name: str, machine: str, boot: str) -> str:
        root = tmp_path / name
        (root / "etc").mkdir(parents=True)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "etc/machine-id").write_text(machine)
        (root / "proc/sys/kernel/random/boot_id").write_text(boot)
        return host_id(root)

    ids = {
        make("a", "m1", "b1"),
        make("b", "m2", "b1"),
        make("c", "m1", "b2"),
        make("d", "m1b", "1"),
    }
    assert len(ids) == 4
    assert host_id() == host_id()
