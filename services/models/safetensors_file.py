"""Reading safetensors as hostile input (memory-mapped) and writing it one tensor at a time."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ModelFileError

# The format itself caps the header at 100 MB; real ones have tens of kilobytes.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 17
MAX_DIMS = 8
_MAX_DIM = 1 << 40

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One checked header entry; offsets count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file whose header was checked against the file's size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.tensors = {info.name: info for info in _read_header(file, size, path.name)}
                # Copy-on-write: pages stay shared between processes, and torch gets the writable
                # buffer it asks for without the file ever changing.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(f"{path.name}: cannot be read: {error.strerror}") from error

    def buffer(self, name: str) -> memoryview:
        """Bytes of one tensor, without a copy; the view keeps the mapping alive."""
        info = self.tensors[name]
        return memoryview(self._map)[info.begin : info.end]

    def release_pages(self) -> None:
        """Give the read pages back to the page cache; what is read again comes from there.

        Weights that were packed into another order need not count as this process's memory twice.
        """
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(file: Any, size: int, label: str) -> list[TensorInfo]:  # Any: a binary file
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelFileError(f"{label}: {size} bytes are too few for a safetensors file")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelFileError(f"{label}: header length {header_bytes} does not fit {size} bytes")
    raw = _parse_json(file.read(header_bytes), label)
    raw.pop("__metadata__", None)
    if len(raw) > MAX_TENSORS:
        raise ModelFileError(f"{label}: {len(raw)} tensors, at most {MAX_TENSORS} are allowed")
    data_start = 8 + header_bytes
    infos = [_tensor_info(name, entry, data_start, size, label) for name, entry in raw.items()]
    _check_coverage(infos, data_start, size, label)
    return infos


def _parse_json(text: bytes, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ModelFileError(f"{label}: the header names a tensor twice")
        return made

    try:
        raw = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{label}: the header is not valid JSON") from error
    if not isinstance(raw, dict):
        raise ModelFileError(f"{label}: the header is not a JSON object")
    return raw


def _is_size(value: object, cap: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= cap


def _tensor_info(name: str, entry: Any, data_start: int, size: int, label: str) -> TensorInfo:
    where = f"{label}: tensor {name[:128]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where}: needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelFileError(f"{where}: element type {str(dtype)[:32]!r} is not supported")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ModelFileError(f"{where}: the shape is not a list of at most {MAX_DIMS} numbers")
    if not all(_is_size(dim, _MAX_DIM) for dim in shape):
        raise ModelFileError(f"{where}: the shape has an impossible dimension")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ModelFileError(f"{where}: data_offsets is not a pair")
    data_bytes = size - data_start
    if not all(_is_size(offset, data_bytes) for offset in offsets):
        raise ModelFileError(f"{where}: data_offsets {offsets} leave the file")
    num_bytes = ITEM_BYTES[dtype]
    for dim in shape:
        num_bytes *= dim
    begin, end = offsets
    if end - begin != num_bytes:
        raise ModelFileError(f"{where}: {end - begin} bytes do not match shape {shape} of {dtype}")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_coverage(infos: list[TensorInfo], data_start: int, size: int, label: str) -> None:
    """Demand that the tensors tile the data exactly: no overlap, no hole, nothing behind."""
    reached = data_start
    for info in sorted(infos, key=lambda info: (info.begin, info.end)):
        if info.begin < reached:
            raise ModelFileError(f"{label}: tensor {info.name[:128]!r} overlaps another one")
        if info.begin > reached:
            raise ModelFileError(f"{label}: bytes before tensor {info.name[:128]!r} are unused")
        reached = info.end
    if reached != size:
        raise ModelFileError(f"{label}: {size - reached} bytes after the last tensor")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and shape of a float32 tensor that will be written."""

    name: str
    shape: tuple[int, ...]


def write_float32(
    path: Path, specs: Sequence[TensorSpec], arrays: Iterable[NDArray[np.float32]]
) -> None:
    """Write float32 tensors in order, holding one at a time in memory.

    Data starts on a 64-byte boundary, so that mapped tensors are aligned for vector loads.
    """
    with path.open("wb") as file:
        header = _header(specs)
        file.write(struct.pack("<Q", len(header)) + header)
        for spec, array in _zip_strict(specs, arrays):
            if array.shape != spec.shape or array.dtype != np.float32:
                raise ValueError(f"{spec.name}: got {array.dtype} {array.shape}, not {spec.shape}")
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())


def _zip_strict(
    specs: Sequence[TensorSpec], arrays: Iterable[NDArray[np.float32]]
) -> Iterator[tuple[TensorSpec, NDArray[np.float32]]]:
    return zip(specs, arrays, strict=True)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + 4 * int(np.prod(spec.shape, dtype=np.int64))
        entries[spec.name] = {
            "dtype": "F32",
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % _ALIGNMENT)
