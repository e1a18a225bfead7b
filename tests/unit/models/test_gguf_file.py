from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from services.common.errors import ModelFileError
from services.models.gguf_file import DEQUANTISABLE, GgufFile


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def build(
    fields: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_fields: int | None = None,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    body = head + b"".join(fields) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + data


def opened(tmp_path: Path, raw: bytes) -> GgufFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    return GgufFile(path)


def good() -> bytes:
    return build(
        [
            field("name", 8, text("toy")),
            field("count", 4, struct.pack("<I", 7)),
            field("eps", 6, struct.pack("<f", 1e-5)),
            field("flag", 7, b"\x01"),
            field("tokens", 9, array(8, 2, text("a") + text("ж"))),
            field("kinds", 9, array(5, 3, struct.pack("<3i", 1, -2, 3))),
        ],
        [tensor("w", [4, 2]), tensor("v", [3], offset=32)],
        np.arange(8, dtype=np.float32).tobytes() + np.ones(3, dtype=np.float32).tobytes(),
    )


def test_reads_fields_and_tensors(tmp_path: Path) -> None:
    with opened(tmp_path, good()) as file:
        assert (file.text("name"), file.integer("count")) == ("toy", 7)
        assert (file.number("eps"), file.flag("flag")) == (1e-5, True)
        assert file.fields["tokens"] == ["a", "ж"]
        assert file.fields["kinds"] == [1, -2, 3]
        assert file.integer("absent") is None
        np.testing.assert_array_equal(
            file.float32("w"), np.arange(8, dtype=np.float32).reshape(2, 4)
        )
        np.testing.assert_array_equal(file.float32("v"), np.ones(3, dtype=np.float32))


def test_a_field_of_another_type_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, good()) as file:
        readers: list[tuple[Callable[[str], object], str]] = [
            (file.text, "count"),
            (file.integer, "flag"),
            (file.integer, "name"),
            (file.number, "flag"),
            (file.flag, "count"),
        ]
        for read, key in readers:
            with pytest.raises(ModelFileError, match=key):
                read(key)


@pytest.mark.parametrize("name", sorted(q.name for q in DEQUANTISABLE))
def test_dequantises_every_supported_type(tmp_path: Path, name: str) -> None:
    """Blocks of random bytes (with sane scales) give what the gguf package gives for them."""
    qtype = GGMLQuantizationType[name]
    values = np.random.default_rng(3).standard_normal((6, 512)).astype(np.float32)
    try:
        stored = quantize(values, qtype)
    except NotImplementedError:  # no quantiser in the package: zero bytes are valid blocks
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        stored = np.zeros((6, 512 // block * block_bytes), dtype=np.uint8)
    raw = build([], [tensor("w", [512, 6], kind=int(qtype))], stored.tobytes())
    with opened(tmp_path, raw) as file:
        result = file.float32("w")
    assert result.shape == (6, 512)
    np.testing.assert_array_equal(result, dequantize(stored, qtype).reshape(6, 512))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"GGUF", "too few"),
        (build([], [], magic=b"GGML") + bytes(32), "not a GGUF"),
        (build([], [], version=1) + bytes(32), "version 1"),
        (build([], [], version=0x03000000) + bytes(32), "version"),  # big-endian
        (build([], [], num_tensors=2**63) + bytes(32), "tensors"),
        (build([], [], num_fields=2**63) + bytes(32), "metadata fields"),
        (build([], [], num_fields=3), "leave the file"),
        (build([struct.pack("<Q", 2**40)], []), "bytes in a string"),
        (build([struct.pack("<Q", 60_000)], []), "leave the file"),
        (build([field("x", 99, b"")], []), "type 99"),
        (build([field("x", 8, text(b"\xff\xfe"))], []), "UTF-8"),
        (build([field("x", 8, text("a")), field("x", 8, text("b"))], []), "twice"),
        (build([field("x", 9, array(8, 2**62, b""))], []), "array elements"),
        (build([field("x", 9, array(8, 4_000_000, b""))], []), "leaves the file"),
        (build([field("x", 9, array(4, 4_000_000, b""))], []), "leave the file"),
        (build([field("x", 9, array(9, 1, b""))], []), "arrays of metadata type 9"),
        (build([field("general.alignment", 4, struct.pack("<I", 0))], []), "alignment"),
        (build([field("general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
        (build([field("general.alignment", 8, text("32"))], []), "alignment"),
        (build([], [tensor("w", [])], bytes(32)), "0 dimensions"),
        (build([], [tensor("w", [1] * 5)], bytes(32)), "5 dimensions"),
        (build([], [tensor("w", [4, 0])], bytes(32)), "impossible dimensions"),
        (build([], [tensor("w", [2**63, 2])], bytes(32)), "impossible dimensions"),
        # The product wraps to 0 in 64-bit arithmetic.
        (build([], [tensor("w", [2**32, 2**32])], bytes(32)), "leave the file"),
        (build([], [tensor("w", [9])], bytes(32)), "leave the file"),
        (build([], [tensor("w", [8], offset=2**63)], bytes(32)), "leave the file"),
        (build([], [tensor("w", [8], offset=16)], bytes(64)), "aligned"),
        (build([], [tensor("w", [8], kind=77)], bytes(32)), "type 77"),
        (build([], [tensor("w", [8], kind=26)], bytes(32)), "I32"),
        (build([], [tensor("w", [33], kind=8)], bytes(64)), "no multiple of 32"),
        (build([], [tensor("w", [8])] * 2, bytes(64)), "twice"),
        (build([], [tensor("w", [8]), tensor("v", [8])], bytes(64)), "overlaps"),
    ],
)
def test_lying_files_are_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    """The classes of CVE-2024-21802 (lengths) and CVE-2026-7482 (dimensions)."""
    with pytest.raises(ModelFileError, match=why):
        opened(tmp_path, raw)


def test_infinities_in_weights_are_refused(tmp_path: Path) -> None:
    data = np.array([1, np.inf, 0, 0, 0, 0, 0, 0], dtype=np.float32).tobytes()
    with (
        opened(tmp_path, build([], [tensor("w", [8])], data)) as file,
        pytest.raises(ModelFileError, match="infinities"),
    ):
        file.float32("w")


def test_mutants_are_read_or_refused_but_never_crash(tmp_path: Path) -> None:
    """Any mutant either gives whole tensors or ModelFileError; nothing else escapes."""
    original = good()
    rng = random.Random(11)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(4000):
        mutant = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            mutant = mutant[: rng.randint(0, len(mutant))]
        try:
            with opened(tmp_path, bytes(mutant)) as file:
                for name, info in file.tensors.items():
                    assert file.float32(name).shape == info.shape
            outcomes["read"] += 1
        except ModelFileError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 100
    assert outcomes["refused"] > 1000
