from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common.errors import ModelFileError
from services.models.safetensors_file import (
    MAX_TENSORS,
    SafetensorsFile,
    TensorSpec,
    write_float32,
)


def raw_file(path: Path, header: Any, data: bytes = b"", header_len: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_len is None else header_len
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return path


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_writes_what_the_format_library_reads(tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, dtype=np.float32)]
    specs = [TensorSpec("a.weight", (2, 3)), TensorSpec("b", (5,))]
    write_float32(tmp_path / "m.safetensors", specs, arrays)
    read = load_file(tmp_path / "m.safetensors")
    assert list(read) == ["a.weight", "b"]
    np.testing.assert_array_equal(read["a.weight"], arrays[0])
    np.testing.assert_array_equal(read["b"], arrays[1])


def test_written_tensors_start_on_a_cache_line(tmp_path: Path) -> None:
    write_float32(
        tmp_path / "m.safetensors", [TensorSpec("x", (16,))], [np.zeros(16, dtype=np.float32)]
    )
    assert SafetensorsFile(tmp_path / "m.safetensors").tensors["x"].begin % 64 == 0


def test_refuses_to_write_an_array_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"):
        write_float32(
            tmp_path / "m.safetensors", [TensorSpec("x", (4,))], [np.zeros(5, dtype=np.float32)]
        )


def test_reads_what_the_format_library_writes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    save_file({"a": array, "b": np.zeros(0, dtype=np.int8)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert (file.tensors["a"].dtype, file.tensors["a"].shape) == ("F16", (3, 4))
    assert bytes(file.buffer("a")) == array.tobytes()


def test_writing_to_a_buffer_never_changes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.zeros(4, dtype=np.float32)}, path)
    before = path.read_bytes()
    SafetensorsFile(path).buffer("a")[:] = b"\xff" * 16
    assert path.read_bytes() == before


GOOD = {"a": entry([2], 0, 8), "b": entry([2], 8, 16)}


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"", b"", "header length"),
        (b"[1]", b"", "not a JSON object"),
        (b"{nope", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        ({"a": 5}, b"", "needs exactly"),
        ({"a": {**entry([2], 0, 8), "extra": 1}}, bytes(8), "needs exactly"),
        ({"a": entry([2], 0, 8, "F4")}, bytes(8), "element type"),
        ({"a": entry([2], 0, 8, ["F32"])}, bytes(8), "element type"),
        ({"a": entry([-2], 0, 8)}, bytes(8), "impossible dimension"),
        ({"a": entry([True], 0, 4)}, bytes(4), "impossible dimension"),
        ({"a": entry([1 << 62, 4], 0, 8)}, bytes(8), "impossible dimension"),
        ({"a": entry([1 << 32, 1 << 32], 0, 0)}, b"", "do not match"),
        ({"a": entry([1] * 9, 0, 4)}, bytes(4), "shape"),
        ({"a": entry([2], 0, 16)}, bytes(8), "leave the file"),
        ({"a": entry([2], -8, 0)}, bytes(8), "leave the file"),
        ({"a": entry([2], 8, 0)}, bytes(8), "do not match"),
        ({"a": entry([3], 0, 8)}, bytes(8), "do not match"),
        ({**GOOD, "b": entry([2], 4, 12)}, bytes(12), "overlaps"),
        ({**GOOD, "b": entry([2], 0, 8)}, bytes(8), "overlaps"),
        ({**GOOD, "b": entry([2], 12, 20)}, bytes(20), "unused"),
        (GOOD, bytes(17), "after the last tensor"),
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, header: Any, data: bytes, why: str) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ModelFileError, match=why):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [0, 1, 10**6, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "m.safetensors", GOOD, bytes(16), header_len=length)
    with pytest.raises(ModelFileError, match="header length"):
        SafetensorsFile(path)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"1234")
    with pytest.raises(ModelFileError, match="too few"):
        SafetensorsFile(tmp_path / "m.safetensors")
    with pytest.raises(ModelFileError, match="cannot be read"):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_too_many_tensors_are_refused(tmp_path: Path) -> None:
    header = {str(i): entry([0], 0, 0) for i in range(MAX_TENSORS + 1)}
    with pytest.raises(ModelFileError, match="at most"):
        SafetensorsFile(raw_file(tmp_path / "m.safetensors", header))


def test_mutants_are_read_or_refused_but_never_crash(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", GOOD, bytes(16))
    good = path.read_bytes()
    rng = random.Random(7)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(3000):
        mutant = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        path.write_bytes(mutant[: rng.randint(0, len(mutant))] if rng.random() < 0.2 else mutant)
        try:
            file = SafetensorsFile(path)
            for name in file.tensors:
                assert (
                    len(bytes(file.buffer(name)))
                    == file.tensors[name].end - file.tensors[name].begin
                )
            outcomes["read"] += 1
        except ModelFileError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 50
    assert outcomes["refused"] > 1000
