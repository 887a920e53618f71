"""A GGUF file: metadata as plain values, tensors as views of the mapped file. Loads without torch.

The header is read here and not with gguf.GGUFReader, which builds several numpy views per string and takes 11 s for a
vocabulary of 262,144. Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from server.errors import StartupError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 4
_DEFAULT_ALIGNMENT = 32
_FAULT_BYTES = 2 * 2**20
"""Linux maps up to this much around a page that is touched: fault_around_bytes, or a whole large folio of the cache."""
_SCALARS: dict[int, tuple[str, Any]] = {
    GGUFValueType.UINT8: ("<B", np.uint8),
    GGUFValueType.INT8: ("<b", np.int8),
    GGUFValueType.UINT16: ("<H", np.uint16),
    GGUFValueType.INT16: ("<h", np.int16),
    GGUFValueType.UINT32: ("<I", np.uint32),
    GGUFValueType.INT32: ("<i", np.int32),
    GGUFValueType.FLOAT32: ("<f", np.float32),
    GGUFValueType.BOOL: ("<?", np.bool_),
    GGUFValueType.UINT64: ("<Q", np.uint64),
    GGUFValueType.INT64: ("<q", np.int64),
    GGUFValueType.FLOAT64: ("<d", np.float64),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """shape is in torch order (GGUF writes it reversed); raw is [rows, bytes per row], a view of the file from byte
    `offset` on."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    raw: np.ndarray

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Values as float32; but for a vector, only entries [start, stop) of the first axis."""
        raw, shape = self._entries(start, stop)
        if self.kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(shape)
        if self.kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(shape)
        try:
            return quants.dequantize(raw, self.kind).astype(np.float32, copy=False).reshape(shape)
        except NotImplementedError as error:
            raise StartupError(f"tensor {self.name}: type {self.kind.name} cannot be dequantized") from error

    def mxfp4_codes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Codes [..., K / 2] as `kernels.mxfp4.Mxfp4` has them, of entries [start, stop) of the first axis.

        A block of the file is its scale and 16 bytes: their low nibbles are columns 0 to 15, the high ones 16 to 31
        (block_mxfp4 in ggml; `gguf.quants.MXFP4`). Only nibbles change places.
        """
        halves = self._mxfp4_blocks(start, stop)[..., 1:]
        columns = np.concatenate((halves & 15, halves >> 4), -1)
        codes: np.ndarray = columns[..., ::2] | columns[..., 1::2] << 4
        return codes.reshape(*codes.shape[:-2], -1)

    def mxfp4_scales(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Scales [..., K / 32], see `mxfp4_codes`."""
        return np.ascontiguousarray(self._mxfp4_blocks(start, stop)[..., 0])

    def _mxfp4_blocks(self, start: int, stop: int | None) -> np.ndarray:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.MXFP4]
        raw, shape = self._entries(start, stop)
        return raw.reshape(*shape[:-1], shape[-1] // block, block_bytes)

    def _entries(self, start: int, stop: int | None) -> tuple[np.ndarray, tuple[int, ...]]:
        if len(self.shape) < 2:
            if start or stop is not None:
                raise ValueError("a vector is read whole")
            return self.raw, self.shape
        first, last, _ = slice(start, stop).indices(self.shape[0])
        rows = math.prod(self.shape[1:-1])
        return self.raw[first * rows : last * rows], (last - first, *self.shape[1:])


class GGUFFile:
    """Owner of the mapping; tensors stay readable for as long as any of their views lives."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with self.path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StartupError(f"{self.path}: cannot be read: {error}") from error
        self._offset = 0
        try:
            self._read()
        except StartupError:
            raise
        except (struct.error, ValueError, OverflowError, RecursionError) as error:
            raise StartupError(f"{self.path}: damaged GGUF header at byte {self._offset}: {error}") from error
        self._map.madvise(mmap.MADV_DONTNEED)  # the header's pages, which are not read again

    def forget(self, tensor: GGUFTensor, start: int = 0, stop: int | None = None) -> None:
        """Entries [start, stop) of the first axis were read: their pages no longer count as memory of this process.

        A page that is read brings its neighbours, so they go too.
        """
        first_entry, last_entry, _ = slice(start, stop).indices(tensor.shape[0])
        entry_bytes = tensor.raw.nbytes // tensor.shape[0]
        first = (tensor.offset + first_entry * entry_bytes) // _FAULT_BYTES * _FAULT_BYTES
        last = -(-(tensor.offset + last_entry * entry_bytes) // _FAULT_BYTES) * _FAULT_BYTES
        self._map.madvise(mmap.MADV_DONTNEED, first, min(last, len(self._map)) - first)

    def vocabulary_rows(self) -> int:
        """Rows of the embedding, since many files leave vocab_size out."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise StartupError(f"{self.path}: tensor token_embd.weight is missing or not a matrix")
        return embedding.shape[0]

    def _read(self) -> None:
        if self._take(4) != _MAGIC:
            raise StartupError(f"{self.path}: not a GGUF file (wrong magic)")
        version = self._u32()
        if version not in _VERSIONS:
            raise StartupError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 are")
        tensor_count, key_count = self._u64(), self._u64()
        self._expect(key_count, minimum_bytes=13, what="metadata keys")
        self._expect(tensor_count, minimum_bytes=24, what="tensors")
        for _ in range(key_count):
            name = self._string()
            if name in self.metadata:
                raise StartupError(f"{self.path}: metadata key {name!r} appears twice")
            self.metadata[name] = self._value(self._u32(), depth=0)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise StartupError(f"{self.path}: general.alignment {alignment!r} is not a power of two")
        data_start = -(-self._offset // alignment) * alignment
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise StartupError(f"{self.path}: tensor {name!r} appears twice")
            if offset % alignment:
                raise StartupError(f"{self.path}: tensor {name!r} is not aligned to {alignment} bytes")
            self.tensors[name] = self._tensor(name, shape, kind, data_start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> GGUFTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise StartupError(f"{self.path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of {block}")
        row_bytes = shape[-1] // block * block_bytes
        rows = math.prod(shape[:-1])
        if start + rows * row_bytes > len(self._map):
            raise StartupError(f"{self.path}: tensor {name!r} lies outside the file: it is cut short, fetch it again")
        raw = np.frombuffer(self._map, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
        return GGUFTensor(name=name, shape=shape, kind=kind, offset=start, raw=raw)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dims = self._u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise StartupError(f"{self.path}: tensor {name!r} has {dims} dimensions")
        shape = tuple(self._u64() for _ in range(dims))[::-1]
        if 0 in shape:
            raise StartupError(f"{self.path}: tensor {name!r} is empty")
        kind, offset = self._u32(), self._u64()
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError:
            raise StartupError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from None

    def _take(self, count: int) -> bytes:
        start = self._offset
        if count > len(self._map) - start:
            raise StartupError(
                f"{self.path}: damaged GGUF header at byte {start}, or the file is cut short: fetch it again"
            )
        self._offset = start + count
        return self._map[start : start + count]

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _expect(self, count: int, *, minimum_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold before anything is allocated for it."""
        if count * minimum_bytes > len(self._map) - self._offset:
            raise StartupError(
                f"{self.path}: {count} {what} do not fit in the file: it is cut short or damaged, fetch it again"
            )

    def _string(self) -> str:
        return self._take(self._u64()).decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            if depth == _MAX_DEPTH:
                raise StartupError(f"{self.path}: metadata arrays are nested too deeply")
            return self._array(depth)
        if kind not in _SCALARS:
            raise StartupError(f"{self.path}: unknown metadata type {kind} at byte {self._offset}")
        code = _SCALARS[kind][0]
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._u32(), self._u64()
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind][1])
            self._expect(count, minimum_bytes=dtype.itemsize, what="array entries")
            values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            return values
        self._expect(count, minimum_bytes=8, what="array entries")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        read: Callable[[int, int], Any] = self._value
        return [read(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop of a big vocabulary: no slice of the mapping but the string itself."""
        data, offset, size = self._map, self._offset, len(self._map)
        length_at = _U64.unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, offset)
            offset += 8
            if length > size - offset:
                raise StartupError(f"{self.path}: damaged or truncated GGUF header at byte {offset}")
            strings.append(data[offset : offset + length].decode("utf-8", "replace"))
            offset += length
        self._offset = offset
        return strings
