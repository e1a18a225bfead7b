"""Reading GGUF files as hostile input: every count, length and offset is checked before use."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from services.common.errors import ModelFileError

MAX_TENSORS = 1 << 16
MAX_FIELDS = 1 << 14
MAX_ARRAY = 1 << 22  # elements; the largest vocabularies have a few hundred thousand
MAX_STRING_BYTES = 16 << 20  # chat templates are tens of kilobytes
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMS = 4
_MAX_DIM = 1 << 40
_MAX_ALIGNMENT = 1 << 16
_DEQUANTISE_ELEMENTS = 1 << 22  # worked on at once: bounds the peak memory of a conversion

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
            10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip

# What can be turned into float32; anything else is refused by name.
DEQUANTISABLE = frozenset(
    GGMLQuantizationType[name]
    for name in (
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
        "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    )
)  # fmt: skip

GgufValue = int | float | bool | str | list[str] | list[int] | list[float] | list[bool]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One checked tensor entry; `shape` is row-major, outermost first."""

    name: str
    shape: tuple[int, ...]
    qtype: GGMLQuantizationType
    begin: int
    num_bytes: int


class GgufFile:
    """A memory-mapped GGUF file; use as a context manager, or close()."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 24:
                    raise ModelFileError(f"{self.name}: {size} bytes are too few for a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{self.name}: cannot be read: {error.strerror}") from error
        try:
            parser = _Parser(self._map, self.name)
            self.fields, self.tensors = parser.parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def text(self, key: str) -> str | None:
        """Return a string field, or None when absent."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelFileError(f"{self.name}: {key} is not a string")
        return value

    def integer(self, key: str) -> int | None:
        """Return an integer field, or None when absent."""
        value = self.fields.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelFileError(f"{self.name}: {key} is not an integer")
        return value

    def number(self, key: str) -> float | None:
        """Return a numeric field, or None when absent.

        A float32 comes back as the shortest decimal that rounds to it: 1e-5, not 9.999999747e-6.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{self.name}: {key} is not a number")
        if abs(value) > np.finfo(np.float32).max:
            return float(value)
        narrow = np.float32(value)
        return float(str(narrow)) if float(narrow) == value else float(value)

    def flag(self, key: str) -> bool | None:
        """Return a boolean field, or None when absent."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"{self.name}: {key} is not a boolean")
        return value

    def float32(self, name: str) -> NDArray[np.float32]:
        """Dequantise one tensor, a bounded number of rows at a time."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        row_bytes = tensor.num_bytes // rows
        step = max(1, _DEQUANTISE_ELEMENTS * rows // int(np.prod(tensor.shape)))
        result = np.empty((rows, int(np.prod(tensor.shape)) // rows), dtype=np.float32)
        for lo in range(0, rows, step):
            hi = min(lo + step, rows)
            raw = np.frombuffer(
                self._map, np.uint8, (hi - lo) * row_bytes, tensor.begin + lo * row_bytes
            )
            # A copy: a view of the mapping would keep it from being closed, and may be misaligned.
            block = raw.copy().reshape(hi - lo, row_bytes)
            del raw
            with np.errstate(all="ignore"):  # what came out is checked below
                result[lo:hi] = dequantize(block, tensor.qtype)
        if not np.isfinite(result).all():
            raise ModelFileError(f"{self.name}: tensor {name!r} holds infinities or NaNs")
        return result.reshape(tensor.shape)


class _Parser:
    """A cursor over the file that cannot leave it."""

    def __init__(self, buffer: mmap.mmap, label: str) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._label = label
        self._at = 0

    def _bad(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._label}: {why}")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._at:
            raise self._bad(f"{num_bytes} bytes at offset {self._at} leave the file")
        chunk = self._buffer[self._at : self._at + num_bytes]
        self._at += num_bytes
        return chunk

    def _scalar(self, code: str) -> int:
        value: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return value

    def _count(self, what: str, cap: int) -> int:
        count = self._scalar("<Q")
        if count > cap:
            raise self._bad(f"{count} {what}, at most {cap} are allowed")
        return count

    def _string(self, cap: int) -> str:
        length = self._count("bytes in a string", cap)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._bad("a string is not valid UTF-8") from error

    def parse(self) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
        """Read header, fields and tensor entries, and check the entries against the file."""
        if self._take(4) != b"GGUF":
            raise self._bad("not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise self._bad(f"GGUF version {version} is not supported (little-endian 2 and 3 are)")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_fields = self._count("metadata fields", MAX_FIELDS)
        fields: dict[str, GgufValue] = {}
        for _ in range(num_fields):
            key = self._string(_MAX_NAME_BYTES)
            if key in fields:
                raise self._bad(f"metadata field {key[:128]!r} appears twice")
            fields[key] = self._value(self._scalar("<I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        return fields, self._place(heads, self._alignment(fields))

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._bad(f"metadata type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> GgufValue:
        kind = self._scalar("<I")
        count = self._count("array elements", MAX_ARRAY)
        if kind == _STRING:
            # Every string has 8 bytes of length: refuse before building a list of a lying size.
            if count * 8 > self._size - self._at:
                raise self._bad(f"an array of {count} strings leaves the file")
            return [self._string(MAX_STRING_BYTES) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._bad(f"arrays of metadata type {kind} are not supported")
        code = _SCALARS[kind]
        raw = self._take(count * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code[1:]}", raw))

    def _alignment(self, fields: dict[str, GgufValue]) -> int:
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT:
            raise self._bad("general.alignment is out of range")
        if alignment & (alignment - 1):
            raise self._bad(f"general.alignment {alignment} is not a power of two")
        return alignment

    def _tensor_head(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Read name, row-major shape, type and offset within the data section."""
        name = self._string(_MAX_NAME_BYTES)
        where = f"tensor {name[:128]!r}"
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._bad(f"{where}: {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
        dims = [self._scalar("<Q") for _ in range(num_dims)]
        if not all(1 <= dim <= _MAX_DIM for dim in dims):
            raise self._bad(f"{where}: impossible dimensions {dims}")
        kind = self._scalar("<I")
        if kind not in GGMLQuantizationType._value2member_map_:
            raise self._bad(f"{where}: tensor type {kind} is unknown")
        qtype = GGMLQuantizationType(kind)
        if qtype not in DEQUANTISABLE:
            raise self._bad(f"{where}: tensor type {qtype.name} is not supported")
        return name, tuple(reversed(dims)), qtype, self._scalar("<Q")

    def _place(
        self, heads: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, qtype, offset in heads:
            where = f"tensor {name[:128]!r}"
            if name in tensors:
                raise self._bad(f"{where} appears twice")
            if offset % alignment:
                raise self._bad(f"{where}: offset {offset} is not aligned to {alignment}")
            block, block_bytes = GGML_QUANT_SIZES[qtype]
            if shape[-1] % block:
                raise self._bad(f"{where}: {shape[-1]} columns are no multiple of {block}")
            num_elements = 1
            for dim in shape:
                num_elements *= dim
            num_bytes = num_elements // block * block_bytes
            begin = data_start + offset
            if begin + num_bytes > self._size:
                raise self._bad(f"{where}: {num_bytes} bytes at {begin} leave the file")
            tensors[name] = GgufTensor(name, shape, qtype, begin, num_bytes)
        self._check_overlaps(tensors.values())
        return tensors

    def _check_overlaps(self, tensors: Iterable[GgufTensor]) -> None:
        reached = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
            if tensor.begin < reached:
                raise self._bad(f"tensor {tensor.name[:128]!r} overlaps another one")
            reached = tensor.begin + tensor.num_bytes
